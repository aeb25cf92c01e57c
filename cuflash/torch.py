"""The functions of cuflash for PyTorch: with gradients, and under everything that traces or transforms.

Three ways lead to the same kernels. Plain tensors that want no gradient go straight to the functions of the package, plain ones
that want one through an autograd.Function; custom operators, ``torch.ops.cuflash.*``, are what torch.compile, fake tensors and
dispatch modes see. An operator costs more than a launch, so it is called only where one is needed: not in code that Inductor
generates either (torch_inductor.py).
"""

from __future__ import annotations

import functools
import sys

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("cuflash.torch needs PyTorch, which is not installed: pip install torch") from error

if not hasattr(torch.library, "register_vmap"):
    raise ImportError(f"cuflash.torch needs PyTorch 2.5 or newer; got {torch.__version__}")

from torch.autograd import forward_ad as _forward_ad

from . import attention as _attention
from . import attention_backward, attention_varlen_backward, problem
from . import attention_varlen as _attention_varlen
from . import attention_with_kvcache as _attention_with_kvcache
from . import merge_attention as _merge_attention

__all__ = ["attention", "attention_varlen", "attention_with_kvcache", "merge_attention", "register_sdpa"]

_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
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
    been called before). There are no second derivatives and no forward-mode ones. What torch.func differentiates inside of
    compiled code (vmap alone does not) runs between two graphs, and not at all with fullgraph=True.

    Raises:
        TypeError, ValueError, RuntimeError: as `cuflash.attention`; in compiled code when it runs.
        NotImplementedError: a second derivative is asked for, or as `cuflash.attention`.
    """
    if _is_simple(q, k, v) and type(deterministic) is bool:
        return _attention(q, k, v, causal=causal, window=window, softmax_scale=softmax_scale, softcap=softcap,
                          return_lse=return_lse)
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
    if (_is_simple(q, k, v) and type(cu_seqlens_q) is type(cu_seqlens_k) is _TENSOR and seqused_q is seqused_k is None
            and type(deterministic) is bool):
        return _attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                                 causal=causal, window=window, softmax_scale=softmax_scale, softcap=softcap,
                                 return_lse=return_lse)
    if not torch.compiler.is_compiling():
        problem.check_hint("max_seqlen_q", max_seqlen_q)
        problem.check_hint("max_seqlen_k", max_seqlen_k)
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    tensors = (*cast(q, k, v), cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return _attend(tensors, options, deterministic, return_lse)


def attention_with_kvcache(q, k_cache, v_cache, *, k=None, v=None, cache_seqlens=None, cache_batch_idx=None, block_table=None,
                           causal=True, window=None, softmax_scale=None, softcap=0.0, num_splits=0, return_lse=False):
    """`cuflash.attention_with_kvcache`, in code that is compiled too. Nothing of it is differentiable.

    Args:
        q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, causal, window, softmax_scale, softcap,
            num_splits, return_lse: as in `cuflash.attention_with_kvcache`. q, k and v are of any strides, and under autocast they
            are cast to the dtype of the caches, which are taken as they are and written where they lie.

    Returns:
        out, with ``return_lse`` (out, lse), as `cuflash.attention_with_kvcache`, which also takes ``out`` and ``workspace``.

    Works under torch.compile and CUDA graphs as `attention` does; an integer as cache_seqlens may be a symbolic one.

    Raises:
        NotImplementedError: a tensor requires a gradient, outside of torch.no_grad().
        And as `attention`.
    """
    if _is_simple(q, k_cache, v_cache) and (k is None or _is_simple(k, v, v)):
        return _attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, block_table=block_table,
            causal=causal, window=window, softmax_scale=softmax_scale, softcap=softcap, num_splits=num_splits,
            return_lse=return_lse)
    if _casts(q):
        q, k, v = (x.to(k_cache.dtype) if isinstance(x, torch.Tensor) and x.dtype in _CAST else x for x in (q, k, v))
    tensors = q, k_cache, v_cache, k, v, cache_batch_idx, block_table
    of_lengths = isinstance(cache_seqlens, torch.Tensor)
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    if not torch.compiler.is_compiling() and _is_plain((*tensors, cache_seqlens)) and not _is_transformed():
        return _attention_with_kvcache(
            _rows(q), k_cache, v_cache, k=_rows(k), v=_rows(v), cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
            block_table=block_table, num_splits=num_splits, return_lse=return_lse, **options)
    names = "q", "k_cache", "v_cache", "k", "v"
    wanting = [name for name, x in zip(names, tensors) if isinstance(x, torch.Tensor) and x.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise NotImplementedError(f"{', '.join(wanting)} require a gradient, which cuflash.torch.attention_with_kvcache does not "
                                  "record: attention and attention_varlen do; call this one under torch.no_grad() or on "
                                  "x.detach()")
    operator = torch.ops.cuflash.attention_with_kvcache if k is None else torch.ops.cuflash.attention_with_kvcache_append
    lengths, number = (cache_seqlens, None) if of_lengths else (None, cache_seqlens)
    out, lse = operator(*tensors, lengths, number, *_flat(options), num_splits, return_lse)
    return (out, lse) if return_lse else out


def merge_attention(outs, lses):
    """`cuflash.merge_attention` with gradients of outs and lses.

    Args:
        outs, lses: as in `cuflash.merge_attention`.

    Returns:
        (out, lse), as `cuflash.merge_attention`. A part whose lse is -inf has no influence, and gets gradient 0.

    Works under torch.compile, torch.func and CUDA graphs, and can be differentiated again.

    Raises:
        As `attention`.
    """
    if torch.compiler.is_compiling():
        return _merge_unfused(outs, lses) if _is_differentiated() else torch.ops.cuflash.merge_attention(outs, lses)
    problem.check_parts(outs, lses)
    tensors = (*outs, *lses)
    if not _is_plain(tensors):
        return torch.ops.cuflash.merge_attention(list(outs), list(lses))
    if _is_transformed():
        return _merge_unfused(outs, lses)
    if _wants_grad(*tensors) and torch.is_grad_enabled():
        return _Merge.apply(*tensors)
    return _merge_attention(outs, lses)


# ------------------------------------------------------------------------------------------------------- which way to go

def _is_simple(q, k, v) -> bool:
    """Whether they are plain tensors of contiguous rows that want no gradient, and nothing else is to see what is called: the
    usual case of inference, found out in half the time that the checks below take."""
    if torch.compiler.is_compiling():
        return False
    try:
        return (type(q) is type(k) is type(v) is _TENSOR and not (q.requires_grad or k.requires_grad or v.requires_grad)
                and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and not (q.is_neg() or k.is_neg() or v.is_neg())
                and not torch._C._is_any_autocast_enabled()
                and not _is_watched() and not _is_transformed())
    except (IndexError, RuntimeError):      # no axes, or no strides
        return False


def cast(q, k, v) -> tuple:
    """q, k and v as autocast wants them."""
    if not _casts(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in _CAST else x for x in (q, k, v))


def _casts(q) -> bool:
    """Whether autocast is at work where q is."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch.Tensor; got {type(q).__name__}: cuflash.attention takes arrays of other frameworks")
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False            # the usual case, in a fifth of the time
    kind = q.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def _attend(tensors: tuple, options: dict, deterministic, return_lse):
    """``tensors``: q, k and v, and of a packed batch the four of its lengths, which tells the two apart."""
    compiling = torch.compiler.is_compiling()
    if compiling and _is_differentiated():
        return _attend_uncompiled_under_torch_func(tensors, options, deterministic, return_lse)
    if deterministic is not False and not compiling:
        problem.check_flag("deterministic", deterministic)
    is_plain = not compiling and _is_plain(tensors)
    is_transformed = is_plain and _is_transformed()
    if is_plain and not is_transformed and not (_wants_grad(*tensors[:3]) and torch.is_grad_enabled()):
        return _forward(tensors, options, return_lse)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if not is_plain:
        operator = torch.ops.cuflash.attention if len(tensors) == 3 else torch.ops.cuflash.attention_varlen
        out, lse = operator(*tensors, *_flat(options), deterministic)
    else:
        apply = functools.partial(_transformed, _TransformedAttention.apply) if is_transformed else _Attention.apply
        out, lse = apply(options, deterministic, *tensors)
    return (out, lse) if return_lse else out


@torch._disable_dynamo
def _attend_uncompiled_under_torch_func(*args):
    """As _attend, between two compiled graphs: what torch.func differentiates in compiled code can be no operator."""
    return _attend(*args)


@torch._disable_dynamo
def _uncompiled(function, *args):
    return function(*args)


def _transformed(function, *args):
    """function(*args) under torch.func. Where the compiler gives up a frame of that, it goes on to trace what is called there,
    down to the launch."""
    return _uncompiled(function, *args) if "torch._dynamo" in sys.modules else function(*args)


def _is_plain(tensors: tuple) -> bool:
    """Whether nothing but autograd and torch.func wants to see what happens to the tensors."""
    for x in tensors:
        # What is no tensor at all is plain: the function of the package names it.
        if type(x) is not _TENSOR and isinstance(x, _TENSOR) and type(x) is not _PARAMETER:
            return False
    return not _is_watched()


def _is_watched() -> bool:
    """Whether a dispatch mode or a tracer is at work."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def _wants_grad(*tensors) -> bool:
    try:
        for x in tensors:
            if x.requires_grad:
                return True
    except AttributeError:      # no tensor: the function of the package says so
        pass
    return False


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or _forward_ad._current_level >= 0


def _is_differentiated() -> bool:
    """Whether torch.func is at work with more than vmap. While code is compiled it says how things stand in the trace."""
    if not torch._C._are_functorch_transforms_active():
        return False
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() != vmap for level in torch._C._functorch.get_interpreter_stack() or ())


_is_differentiated._dynamo_marked_constant = True       # as torch.compiler.assume_constant_result, which imports the compiler


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
    """x, or a copy whose last axis is contiguous and whose memory holds its values, not the negated ones."""
    try:
        x = x.resolve_neg()
        return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    except (AttributeError, TypeError, IndexError, RuntimeError):
        return x                # no dense tensor with axes: the function of the package says so


def _forward(tensors: tuple, options: dict, return_lse=True):
    q, k, v, *lengths = tensors
    try:
        are_rows = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and not (q.is_neg() or k.is_neg() or v.is_neg())
    except (AttributeError, IndexError, RuntimeError):
        are_rows = False
    if not are_rows:
        q, k, v = _rows(q), _rows(k), _rows(v)
    if not lengths:
        return _attention(q, k, v, return_lse=return_lse, **options)
    *ends, seqused_q, seqused_k = lengths
    return _attention_varlen(q, k, v, *ends, seqused_q=seqused_q, seqused_k=seqused_k, return_lse=return_lse, **options)


def _backward(dout, dlse, out, lse, tensors: tuple, options: dict, deterministic) -> tuple:
    q, k, v, *lengths = tensors
    given = (_rows(dout), _rows(q), _rows(k), _rows(v), out.contiguous(), lse.contiguous())
    more = {"dlse": None if dlse is None else dlse.contiguous().resolve_neg(), "deterministic": deterministic, **options}
    if not lengths:
        return attention_backward(*given, **more)
    *ends, seqused_q, seqused_k = lengths
    return attention_varlen_backward(*given, *ends, seqused_q=seqused_q, seqused_k=seqused_k, **more)


def _merge_unfused(outs, lses) -> tuple:
    """merge_attention by PyTorch's own functions, whatever they are to be for."""
    lses = torch.stack(tuple(lses))
    seen = lses != -torch.inf
    has_keys = seen.any(0)
    lses = torch.where(has_keys, lses, 0)       # where no part has seen a key gradients would be NaN
    lse = lses.logsumexp(0)
    parts = torch.where(_by_row(seen), torch.stack(tuple(outs)).to(lse.dtype), 0)
    weights = torch.where(seen, (lses - lse).exp(), 0)
    return (parts * _by_row(weights)).sum(0).to(outs[0].dtype), torch.where(has_keys, lse, -torch.inf)


def _merge_gradients(dout, dlse, out, lse, outs, lses) -> tuple:
    """(gradients of outs, of lses): each part weighs exp(its lse - lse)."""
    d_outs, d_lses = [], []
    for x, of_part in zip(outs, lses):
        seen = of_part != -torch.inf
        weight = torch.where(seen, of_part - torch.where(seen, lse, 0), -torch.inf).exp()
        d_outs.append(None if dout is None else (_by_row(weight) * dout).to(x.dtype))
        d_lse = 0 if dlse is None else dlse
        if dout is not None:
            apart = torch.where(_by_row(seen), x, 0).to(lse.dtype) - out
            d_lse = d_lse + (apart * dout).sum(-1).transpose(-1, -2)
        d_lses.append(torch.where(seen, weight * d_lse, 0))
    return d_outs, d_lses


def _by_row(x):
    """(..., heads, seqlen) as (..., seqlen, heads, 1)."""
    return x.transpose(-1, -2).unsqueeze(-1)


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
        if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return _uncompiled(_Attention.backward, ctx, dout, dlse)
        out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * (2 + len(tensors))
            dout = torch.zeros_like(out)
        given = dout, dlse, out, lse
        if _is_transformed():
            gradients = _transformed(_Gradients.apply, ctx.options, ctx.deterministic, *given, *tensors)
        elif torch.is_grad_enabled():
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


class _Merge(torch.autograd.Function):
    """(*outs, *lses) -> out, lse."""

    @staticmethod
    def forward(ctx, *tensors):
        count = len(tensors) // 2
        out, lse = _merge_attention(tensors[:count], tensors[count:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        if dout is dlse is None:
            return (None,) * len(tensors)
        count = len(tensors) // 2
        d_outs, d_lses = _merge_gradients(dout, dlse, out, lse, tensors[:count], tensors[count:])
        return *d_outs, *d_lses


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
    *tensors, causal, left, right, softmax_scale, softcap, _ = args
    return _forward(tensors, _named(causal, left, right, softmax_scale, softcap))


def _run_backward(dout, dlse, out, lse, *args):
    return _backward(dout, dlse, out, lse, *_split(args))


def _meet_inductor() -> None:
    """Let code that it generates call past the dispatcher. What it compiles comes by here first; to import it takes seconds."""
    if "torch._inductor.lowering" in sys.modules:
        from . import torch_inductor
        torch_inductor.register()


def _fake_forward(q, k, v, *_):
    _meet_inductor()
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]),
                      dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return out, lse


def _fake_backward(dout, dlse, out, lse, q, k, v, *_):
    _meet_inductor()
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


_CACHES = ("Tensor q, {k_cache}, {v_cache}, Tensor? k, Tensor? v, Tensor? cache_batch_idx, Tensor? block_table, "
           "Tensor? cache_seqlens, SymInt? seqlen, bool causal, int window_left, int window_right, float? softmax_scale, "
           "float softcap, int num_splits, bool return_lse")


def _run_cached(q, k_cache, v_cache, k, v, cache_batch_idx, block_table, cache_seqlens, seqlen, causal, left, right,
                softmax_scale, softcap, num_splits, return_lse):
    result = _attention_with_kvcache(
        _rows(q), k_cache, v_cache, k=_rows(k), v=_rows(v), cache_seqlens=seqlen if cache_seqlens is None else cache_seqlens,
        cache_batch_idx=cache_batch_idx, block_table=block_table, num_splits=num_splits, return_lse=return_lse,
        **_named(causal, left, right, softmax_scale, softcap))
    return result if return_lse else (result, q.new_empty(0))


def _fake_cached(q, k_cache, v_cache, *rest):
    out, lse = _fake_forward(q, k_cache, v_cache)
    return out, lse if rest[-1] else q.new_empty(0)


def _fake_merge(outs, lses):
    problem.check_parts(outs, lses)
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _keep_parts(ctx, inputs, output):
    outs, lses = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *outs, *lses)


def _differentiate_merge(ctx, dout, dlse):
    out, lse, *tensors = ctx.saved_tensors
    count = len(tensors) // 2
    return _merge_gradients(dout, dlse, out, lse, tensors[:count], tensors[count:])


def _vmap_merge(info, in_dims, outs, lses):
    count, dims = len(outs), (*in_dims[0], *in_dims[1])
    has_batch = outs[0].ndim - (dims[0] is not None) == 4
    parts = _fold_dense(info.batch_size, dims, (*outs, *lses), has_batch)
    results = torch.ops.cuflash.merge_attention([_rows(x) for x in parts[:count]], [x.contiguous() for x in parts[count:]])
    return tuple(_unfold_dense(info.batch_size, x, has_batch) for x in results), (0, 0)


_kernels = torch.library.Library("cuflash", "IMPL")


def _shorten(name: str, num_tensors: int, run, setup_context, differentiate) -> None:
    """Give a custom operator a kernel for autograd by which plain tensors go straight to ``run``: what torch.library puts between
    the two takes longer than the call."""
    overload = getattr(torch.ops.cuflash, name).default

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with torch._C._AutoDispatchBelowAutograd():
                results = overload(*args)
            setup_context(ctx, args, results)
            return results

        backward = staticmethod(differentiate)

    Recorded.__name__ = f"cuflash_{name}"

    kinds = {_TENSOR, _PARAMETER, type(None)}

    def autograd(*args):
        tensors = args[:num_tensors]
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return Recorded.apply(*args)
        if kinds.issuperset(map(type, tensors)) and not _is_watched() and not _is_transformed():
            return run(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    for key in ("AutogradCPU", "AutogradCUDA"):
        _kernels.impl(name, autograd, key)


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
        _shorten(name, tensors.count("Tensor"), _run_forward, _setup_context, _differentiate)
        _shorten(f"{name}_backward", 4 + tensors.count("Tensor"), _run_backward, lambda *_: None, _refuse_second_derivative)
    # Two of a cache: one that writes nothing must not pass for one that does.
    plain, written = ("Tensor k_cache", "Tensor v_cache"), ("Tensor(a!) k_cache", "Tensor(b!) v_cache")
    for name, caches, mutated in (("", plain, ()), ("_append", written, ("k_cache", "v_cache"))):
        schema = _CACHES.format(k_cache=caches[0], v_cache=caches[1])
        cached = torch.library.custom_op(f"cuflash::attention_with_kvcache{name}", _run_cached, mutates_args=mutated,
                                         schema=f"({schema}) -> {forward_results}")
        cached.register_fake(_fake_cached)
    merge = torch.library.custom_op("cuflash::merge_attention", _merge_attention, mutates_args=(),
                                    schema=f"(Tensor[] outs, Tensor[] lses) -> {forward_results}")
    merge.register_fake(_fake_merge)
    merge.register_autograd(_differentiate_merge, setup_context=_keep_parts)
    merge.register_vmap(_vmap_merge)


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
