"""attention and attention_varlen for PyTorch: with gradients, and under everything that traces or transforms.

Three ways lead to the same kernels. Plain tensors that want no gradient go straight to the functions of the package, plain ones
that want one through an autograd.Function; custom operators, ``torch.ops.cuflash.*``, are what torch.compile, fake tensors and
dispatch modes see. An operator costs more than a launch, so it is called only where one is needed.
"""

from __future__ import annotations

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("cuflash.torch needs PyTorch, which is not installed: pip install torch") from error

if not hasattr(torch.library, "register_vmap"):
    raise ImportError(f"cuflash.torch needs PyTorch 2.5 or newer; got {torch.__version__}")

from . import attention as _attention
from . import attention_backward, attention_varlen_backward, problem
from . import attention_varlen as _attention_varlen

__all__ = ["attention", "attention_varlen", "register_sdpa"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CAST = (torch.float16, torch.bfloat16, torch.float32)      # what autocast turns into its own dtype; float64 stays


def attention(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0, return_lse=False, deterministic=False):
    """`cuflash.attention` with gradients of q, k and v, those through lse included.

    Args:
        q, k, v, causal, window, softmax_scale, softcap, return_lse: as in `cuflash.attention`, the first three tensors on the CPU
            or on a CUDA device. Of any strides: one that is not contiguous in its last axis is copied first. Under autocast they
            are cast to its dtype.
        deterministic: sum dq in a fixed order, as in `cuflash.attention_backward`; also under
            ``torch.use_deterministic_algorithms(True)``.

    Returns:
        out, with ``return_lse`` (out, lse), as `cuflash.attention`.

    Works under torch.compile, torch.func, activation checkpointing and CUDA graphs (once each of the forward and the backward has
    been called before). There are no second derivatives and no forward-mode ones.

    Raises:
        TypeError, ValueError, RuntimeError: as `cuflash.attention`; in compiled code when it runs.
        NotImplementedError: a second derivative is asked for, or as `cuflash.attention`.
    """
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    return _attend(cast(q, k, v), options, deterministic, return_lse)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
                     seqused_k=None, causal=False, window=None, softmax_scale=None, softcap=0.0, return_lse=False,
                     deterministic=False):
    """`cuflash.attention_varlen` with gradients of q, k and v, those through lse included.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, causal, window, softmax_scale,
            softcap, return_lse: as in `cuflash.attention_varlen`; q, k and v as in `attention`.
        deterministic: as in `attention`.

    Returns:
        out, with ``return_lse`` (out, lse), as `cuflash.attention_varlen`.

    Raises:
        As `attention`.
    """
    if not torch.compiler.is_compiling():
        problem.check_hint("max_seqlen_q", max_seqlen_q)
        problem.check_hint("max_seqlen_k", max_seqlen_k)
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    tensors = (*cast(q, k, v), cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return _attend(tensors, options, deterministic, return_lse)


# ------------------------------------------------------------------------------------------------------- which way to go

def cast(q, k, v) -> tuple:
    """q, k and v as autocast wants them."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch.Tensor; got {type(q).__name__}: cuflash.attention takes arrays of other frameworks")
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return q, k, v          # the usual case, in a fifth of the time
    kind = q.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in _CAST else x for x in (q, k, v))


def _attend(tensors: tuple, options: dict, deterministic, return_lse):
    """``tensors``: q, k and v, and of a packed batch the four of its lengths, which tells the two apart."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        problem.check_flag("deterministic", deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if compiling or not _is_plain(tensors):
        operator = torch.ops.cuflash.attention if len(tensors) == 3 else torch.ops.cuflash.attention_varlen
        out, lse = operator(*tensors, *_flat(options), deterministic)
    elif _is_transformed():
        out, lse = _TransformedAttention.apply(options, deterministic, *tensors)
    elif torch.is_grad_enabled() and _wants_grad(*tensors[:3]):
        out, lse = _Attention.apply(options, deterministic, *tensors)
    else:
        return _forward(tensors, options, return_lse)
    return (out, lse) if return_lse else out


def _is_plain(tensors: tuple) -> bool:
    """Whether nothing but autograd and torch.func wants to see what happens to the tensors."""
    for x in tensors:
        if x is not None and type(x) not in _PLAIN:
            # What is no tensor at all is plain: the function of the package names it.
            if isinstance(x, torch.Tensor):
                return False
    return not torch._C._len_torch_dispatch_stack() and torch._C._get_tracing_state() is None


def _wants_grad(q, k, v) -> bool:
    try:
        return q.requires_grad or k.requires_grad or v.requires_grad
    except AttributeError:      # no tensor: the function of the package says so
        return False


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _flat(options: dict) -> tuple:
    """The options as an operator takes them: -1 is a window without bound."""
    window = options["window"]
    left, right = (-1, -1) if window is None else window
    return (options["causal"], -1 if left is None else left, -1 if right is None else right, options["softmax_scale"],
            options["softcap"])


def _named(causal, window_left, window_right, softmax_scale, softcap) -> dict:
    return {"causal": causal, "window": (window_left, window_right), "softmax_scale": softmax_scale, "softcap": softcap}


# --------------------------------------------------------------------------------------------------------- what is computed

def _rows(x):
    """x, or a copy whose last axis is contiguous."""
    try:
        return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    except (AttributeError, TypeError, IndexError, RuntimeError):
        return x                # no dense tensor with axes: the function of the package says so


def _forward(tensors: tuple, options: dict, return_lse=True):
    q, k, v, *lengths = tensors
    q, k, v = _rows(q), _rows(k), _rows(v)
    if not lengths:
        return _attention(q, k, v, return_lse=return_lse, **options)
    *ends, seqused_q, seqused_k = lengths
    return _attention_varlen(q, k, v, *ends, seqused_q=seqused_q, seqused_k=seqused_k, return_lse=return_lse, **options)


def _backward(dout, dlse, out, lse, tensors: tuple, options: dict, deterministic) -> tuple:
    q, k, v, *lengths = tensors
    given = (_rows(dout), _rows(q), _rows(k), _rows(v), out.contiguous(), lse.contiguous())
    more = {"dlse": None if dlse is None else dlse.contiguous(), "deterministic": deterministic, **options}
    if not lengths:
        return attention_backward(*given, **more)
    *ends, seqused_q, seqused_k = lengths
    return attention_varlen_backward(*given, *ends, seqused_q=seqused_q, seqused_k=seqused_k, **more)


def _refuse_second_derivative(*_):
    raise NotImplementedError("cuflash.torch has no second derivatives: the gradients of attention and attention_varlen cannot "
                              "be differentiated again; use unfused attention where they are needed")


def _refuse_forward_mode(*_):
    raise NotImplementedError("cuflash.torch has no forward-mode derivatives: use those of backward mode")


# ------------------------------------------------------------------------------------------------------- autograd.Function

class _Attention(torch.autograd.Function):
    """(options, deterministic, *tensors) -> out, lse."""

    @staticmethod
    def forward(ctx, options, deterministic, *tensors):
        out, lse = _forward(tensors, options)
        _keep(ctx, options, deterministic, tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * (2 + len(tensors))
            dout = torch.zeros_like(out)
        given = dout, dlse, out, lse
        if torch.is_grad_enabled() or _is_transformed():
            gradients = _Gradients.apply(ctx.options, ctx.deterministic, *given, *tensors)
        elif _is_plain((*given, *tensors)):
            gradients = _backward(*given, tensors, ctx.options, ctx.deterministic)
        else:
            gradients = _call_backward(dout, dlse, out, lse, tensors, _flat(ctx.options), ctx.deterministic)
        return None, None, *gradients, *(None,) * (len(tensors) - 3)

    jvp = staticmethod(_refuse_forward_mode)


def _keep(ctx, options, deterministic, tensors, out, lse) -> None:
    ctx.set_materialize_grads(False)        # one that is not used costs nothing
    ctx.options, ctx.deterministic = options, deterministic
    ctx.save_for_backward(out, lse, *tensors)


class _TransformedAttention(_Attention):
    """As _Attention, in the form that torch.func takes and that costs more."""

    @staticmethod
    def forward(options, deterministic, *tensors):
        return _forward(tensors, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        options, deterministic, *tensors = inputs
        _keep(ctx, options, deterministic, tensors, *output)

    @staticmethod
    def vmap(info, in_dims, options, deterministic, *tensors):
        return _vmap_forward(info.batch_size, in_dims[2:], tensors,
                             lambda folded: _attend(folded, options, deterministic, return_lse=True))


class _Gradients(torch.autograd.Function):
    """The gradients where they may be differentiated again, to say that they cannot be, and under torch.func."""

    @staticmethod
    def forward(options, deterministic, dout, dlse, out, lse, *tensors):
        return _backward(dout, dlse, out, lse, tensors, options, deterministic)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_refuse_second_derivative)
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def vmap(info, in_dims, options, deterministic, *given):
        return _vmap_backward(info.batch_size, in_dims[2:], given,
                              lambda *folded: _Gradients.apply(options, deterministic, *folded))


# ---------------------------------------------------------------------------------------------------------------- operators

_INPUTS = "Tensor q, Tensor k, Tensor v"
_LENGTHS = ", Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
_OPTIONS = "bool causal, int window_left, int window_right, float? softmax_scale, float softcap, bool deterministic"
_NUM_OPTIONS = 6


def _split(args: tuple) -> tuple[tuple, dict, bool]:
    """(tensors, options by name, deterministic) of an operator's arguments."""
    *tensors, causal, left, right, softmax_scale, softcap, deterministic = args
    return tuple(tensors), _named(causal, left, right, softmax_scale, softcap), deterministic


def _call_backward(dout, dlse, out, lse, tensors, flat, deterministic) -> tuple:
    operator = torch.ops.cuflash.attention_backward if len(tensors) == 3 else torch.ops.cuflash.attention_varlen_backward
    return operator(dout, dlse, out, lse, *tensors, *flat, deterministic)


def _run_forward(*args):
    tensors, options, _ = _split(args)
    return _forward(tensors, options)


def _run_backward(dout, dlse, out, lse, *args):
    return _backward(dout, dlse, out, lse, *_split(args))


def _fake_forward(q, k, v, *_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]),
                      dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return out, lse


def _fake_backward(dout, dlse, out, lse, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    tensors, flat = inputs[:-_NUM_OPTIONS], inputs[-_NUM_OPTIONS:]
    _keep(ctx, flat[:-1], flat[-1], tensors, *output)


def _differentiate(ctx, dout, dlse):
    out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = _call_backward(dout, dlse, out, lse, tensors, ctx.options, ctx.deterministic)
    return *gradients, *(None,) * (len(tensors) - 3 + _NUM_OPTIONS)


def _vmap_operator(info, in_dims, *args):
    tensors, options = args[:-_NUM_OPTIONS], args[-_NUM_OPTIONS:]
    operator = torch.ops.cuflash.attention if len(tensors) == 3 else torch.ops.cuflash.attention_varlen
    return _vmap_forward(info.batch_size, in_dims, tensors, lambda folded: operator(*folded, *options))


def _vmap_backward_operator(info, in_dims, *args):
    given, flat = args[:-_NUM_OPTIONS], args[-_NUM_OPTIONS:]
    return _vmap_backward(info.batch_size, in_dims, given,
                          lambda *folded: _call_backward(*folded[:4], folded[4:], flat[:-1], flat[-1]))


def _define() -> None:
    forward_results, backward_results = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor)"
    statistics = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    for name, tensors in (("attention", _INPUTS), ("attention_varlen", _INPUTS + _LENGTHS)):
        forward = torch.library.custom_op(f"cuflash::{name}", _run_forward, mutates_args=(),
                                          schema=f"({tensors}, {_OPTIONS}) -> {forward_results}")
        forward.register_fake(_fake_forward)
        forward.register_autograd(_differentiate, setup_context=_setup_context)
        forward.register_vmap(_vmap_operator)
        backward = torch.library.custom_op(f"cuflash::{name}_backward", _run_backward, mutates_args=(),
                                           schema=f"({statistics}{tensors}, {_OPTIONS}) -> {backward_results}")
        backward.register_fake(_fake_backward)
        backward.register_autograd(_refuse_second_derivative)
        backward.register_vmap(_vmap_backward_operator)


_define()


# --------------------------------------------------------------------------------------------------------------------- vmap

def _vmap_forward(size: int, dims: tuple, tensors: tuple, call) -> tuple:
    """((out, lse), their axes of vmap) of ``call`` on tensors that have that axis folded into another one."""
    if len(tensors) == 3:
        has_batch = tensors[0].ndim - (dims[0] is not None) == 4
        out, lse = call(_fold_dense(size, dims, tensors, has_batch))
        return (_unfold_dense(size, out, has_batch), _unfold_dense(size, lse, has_batch)), (0, 0)
    out, lse = call(_fold_packed(size, dims, tensors))
    return (_unfold(size, out, 0), _unfold(size, lse, 1)), (0, 1)


def _vmap_backward(size: int, dims: tuple, given: tuple, call) -> tuple:
    """As _vmap_forward, of (dout, dlse, out, lse, *tensors)."""
    (dout, dlse, out, lse, *tensors), (dout_dim, dlse_dim, out_dim, lse_dim, *dims) = given, dims
    if len(tensors) == 3:
        has_batch = tensors[0].ndim - (dims[0] is not None) == 4
        folded = _fold_dense(size, (dout_dim, dlse_dim, out_dim, lse_dim, *dims), given, has_batch)
        return tuple(_unfold_dense(size, x, has_batch) for x in call(*folded)), (0, 0, 0)
    dout, out = (_with_axis(x, dim, size, 0).flatten(0, 1) for x, dim in ((dout, dout_dim), (out, out_dim)))
    dlse, lse = (None if x is None else _with_axis(x, dim, size, 1).flatten(1, 2)
                 for x, dim in ((dlse, dlse_dim), (lse, lse_dim)))
    return tuple(_unfold(size, x, 0) for x in call(dout, dlse, out, lse, *_fold_packed(size, dims, tensors))), (0, 0, 0)


def _with_axis(x, dim, size: int, place: int):
    """x with its axis of vmap at ``place``, or with a new one of stride 0."""
    return x.unsqueeze(place).expand(*x.shape[:place], size, *x.shape[place:]) if dim is None else x.movedim(dim, place)


def _unfold(size: int, x, axis: int):
    return x.unflatten(axis, (size, x.shape[axis] // size))


def _fold_dense(size: int, dims, tensors, has_batch: bool) -> tuple:
    """Into the batch axis, or as it where there is none."""
    moved = (x if x is None else _with_axis(x, dim, size, 0) for x, dim in zip(tensors, dims))
    return tuple(x if x is None or not has_batch else x.flatten(0, 1) for x in moved)


def _unfold_dense(size: int, x, has_batch: bool):
    return _unfold(size, x, 0) if has_batch else x


def _fold_packed(size: int, dims, tensors) -> tuple:
    """Into more sequences. The rows that no sequence covers are one of which nothing is used."""
    q, k, v = (_with_axis(x, dim, size, 0).flatten(0, 1) for x, dim in zip(tensors[:3], dims[:3]))
    folded_ends, folded_used = [], []
    for side, x in enumerate((q, k)):
        ends, used = tensors[3 + side], tensors[5 + side]
        rows = x.shape[0] // size
        ends = _with_axis(ends, dims[3 + side], size, 0)
        if used is None:
            used = ends[:, 1:] - ends[:, :-1]
        else:
            used = _with_axis(used, dims[5 + side], size, 0)
        first = torch.arange(size, dtype=ends.dtype, device=ends.device)[:, None] * rows
        folded_ends.append(torch.nn.functional.pad((ends + first).flatten(), (0, 1), value=size * rows))
        folded_used.append(torch.nn.functional.pad(used, (0, 1)).flatten())
    return q, k, v, *folded_ends, *folded_used


# --------------------------------------------------------------------------------------------------------------------- SDPA

def register_sdpa(name: str = "cuflash") -> None:
    """Offer cuflash as the flash backend of ``torch.nn.functional.scaled_dot_product_attention``, under ``name``.

    Nothing changes until ``torch.nn.attention.activate_flash_attention_impl(name)`` is called; from then on whatever SDPA gives
    to its flash backend on CUDA is computed here: float16 and bfloat16 without a mask and without dropout. Nested tensors and
    ``varlen_attn`` take the same way. ``restore_flash_attention_impl()`` ends it.

    Raises:
        RuntimeError: this PyTorch has no register_flash_attention_impl.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise RuntimeError("register_sdpa needs a PyTorch with torch.nn.attention.register_flash_attention_impl, as 2.11 has it; "
                           f"got {torch.__version__}")
    from .torch_sdpa import activate
    register(name, register_fn=activate)
