"""Every contender behind one signature: ``make(case, arrays) -> callable``, called once a run.

It returns out (batch, seqlen_q, heads_q, head_dim_v), of decoding too, or dq, dk and dv of a backward, or those of packed
sequences (total, heads, head_dim), in whatever memory the contender takes for it. Making views, masks and plans is done outside,
and the forward that a backward needs unless the case is a step. ``Unavailable`` says why a contender does not take part: it
is not installed, or has no such case.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np

import cuflash
from cuflash import config
from cuflash.problem import ITEMSIZE

from .cases import Arrays, Case
from .decode import BESIDE, DecodeArrays, DecodeCase


class Unavailable(Exception):
    """One line that says why a contender does not take part."""


def _module(name: str):
    """An optional module. Whatever its import raises means that it is not there: many peers are tied to one
    version of everything.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unavailable(f"cannot import {name}: {one_line(error)}") from None


def one_line(error, limit: int = 200) -> str:
    """Text of an exception on one line, with its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."


def _torch(arrays: Arrays):
    if arrays.framework != "torch":
        raise Unavailable(f"takes torch tensors, not {arrays.framework} arrays")
    return _module("torch")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unavailable(reason)


def _require_half(case: Case) -> None:
    _require(case.dtype in ("float16", "bfloat16"), f"takes float16 and bfloat16, not {case.dtype}")


# ------------------------------------------------------------------------------------------------------------
# cuflash


def _cuflash(
    case: Case, arrays: Arrays, tier: str | None = None, deterministic: bool = False, through_cupy: bool = False
) -> Callable:
    if through_cupy:
        _require(arrays.framework == "torch", f"the arrays are {arrays.framework}'s already")
        _require(isinstance(case, DecodeCase), "only decoding is compared between CuPy and torch")
        given = {name: as_cupy(x) for name, x in arrays.given.items()}
        q, k, v = (as_cupy(x) for x in (arrays.q, arrays.k, arrays.v))
        arrays = replace(arrays, framework="cupy", q=q, k=k, v=v, given=given)
    if tier is None:
        return _cuflash_call(case, arrays, deterministic)
    _require(arrays.framework != "numpy", "tiers are for GPUs")
    with config.force_tier(tier):
        call = _cuflash_call(case, arrays, deterministic)

    def forced():
        with config.force_tier(tier):
            return call()

    return forced


def _cuflash_call(case, arrays, deterministic):
    q, k, v, options = arrays.q, arrays.k, arrays.v, case.options
    if isinstance(case, DecodeCase):
        _require(not deterministic, "every forward is deterministic")
        function, options = cuflash.attention_with_kvcache, options | arrays.given
        return lambda: function(q, k, v, **options)
    starts = (arrays.starts, arrays.starts) if case.lengths else ()  # no max_seqlen: the host need not know it
    forward = cuflash.attention_varlen if case.lengths else cuflash.attention
    if not case.backward:
        _require(not deterministic, "every forward is deterministic")
        return lambda: forward(q, k, v, *starts, **options)
    backward = cuflash.attention_varlen_backward if case.lengths else cuflash.attention_backward
    more = {"deterministic": True} if deterministic else {}
    return _with_forward(
        case,
        lambda: forward(q, k, v, *starts, return_lse=True, **options),
        lambda saved: backward(arrays.dout, q, k, v, *saved, *starts, **options, **more),
    )


def _with_forward(case: Case, forward: Callable, backward: Callable) -> Callable:
    """``backward(what forward returns)``: a forward in each call of a step, else one before all."""
    if case.step:
        return lambda: backward(forward())
    saved = forward()
    return lambda: backward(saved)


# ------------------------------------------------------------------------------------------------------------
# Unfused: two products and a softmax, the scores in memory and in the inputs' dtype


def _unfused(case: Case, arrays: Arrays) -> Callable:
    if arrays.framework == "numpy":
        return _unfused_numpy_backward(case, arrays) if case.backward else _unfused_numpy(case, arrays)
    unfused = Unfused(case, arrays)
    if not case.backward:
        return unfused.forward
    return _with_forward(case, unfused.forward, lambda _: unfused.backward())


class Unfused:
    """On a GPU: ``forward`` returns out and leaves the probabilities in memory, ``backward`` takes them from there."""

    def __init__(self, case: Case, arrays: Arrays):
        from cuflash.jit import import_cupy

        _require(not case.lengths, "takes no packed sequences")
        _require(not case.backward or case.heads_q == case.heads_k, "its backward has no grouped heads")
        self.cupy = import_cupy()
        _require_memory(case, 3.2 if case.backward else 2.2)  # the scores, their gradient, and a temporary in softmax
        try:
            from cupy_backends.cuda.libs import cublas
        except Exception:  # CuPy names the library and where it looked, at length
            raise Unavailable("CuPy has no cuBLAS here") from None
        self.case, self.arrays, self.scale = case, arrays, case.head_dim**-0.5
        self.q, self.k, self.v = (as_cupy(x) for x in (arrays.q, arrays.k, arrays.v))
        self.dout = as_cupy(arrays.dout) if case.backward else None
        self.hidden = None
        if case.causal or case.window is not None:
            self.hidden = _hidden_bias(self.cupy, case, self.q.dtype)
        self.product = functools.partial(_batched_product, self.cupy, cublas, case)
        self.probabilities = self.out = None

    def forward(self):
        self.free()
        scores = self._scores()
        self.product("scores", self.q, self.k, scores, alpha=self.scale)
        if self.hidden is not None:
            scores += self.hidden
        scores -= scores.max(axis=-1, keepdims=True)
        self.cupy.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = self._empty(self.case.out_shape)
        self.product("rows", scores, self.v, as_cupy(out))
        if self.case.backward:
            self.probabilities, self.out = scores, as_cupy(out)
        return out

    def backward(self):
        q, k, v, dout, p = self.q, self.k, self.v, self.dout, self.probabilities
        ds = self._scores()
        self.product("scores", dout, v, ds)
        # rowsum(dout * out), which equals rowsum(dp * p).
        wide = np.float64 if self.case.dtype == "float64" else np.float32
        ds -= (dout * self.out).sum(axis=-1, dtype=wide).swapaxes(1, 2)[..., None].astype(ds.dtype)
        ds *= p
        dq, dk, dv = (self._empty(shape) for shape in self.case.shapes)
        self.product("rows", ds, k, as_cupy(dq), alpha=self.scale)
        self.product("columns", ds, q, as_cupy(dk), alpha=self.scale)
        self.product("columns", p, dout, as_cupy(dv))
        return dq, dk, dv

    def free(self):
        """Give the probabilities back."""
        self.probabilities = self.out = None

    def _scores(self):
        case = self.case
        return self.cupy.empty((case.batch, case.heads_q, case.seqlen_q, case.seqlen_k), self.q.dtype)

    def _empty(self, shape):
        """An array of the framework of the inputs."""
        if self.arrays.framework != "torch":
            return self.cupy.empty(shape, self.q.dtype)
        return _module("torch").empty(shape, dtype=self.arrays.q.dtype, device=self.arrays.q.device)


def as_cupy(x):
    """A CuPy array on the memory of a CUDA tensor, of any dtype; CuPy arrays as they are."""
    import cupy

    if isinstance(x, cupy.ndarray):
        return x
    from cuflash.arrays import numpy_dtype

    name = str(x.dtype).removeprefix("torch.")
    dtype = np.dtype(name) if name.startswith("int") else numpy_dtype(name)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), extent * dtype.itemsize, x, x.device.index)
    return cupy.ndarray(
        tuple(x.shape),
        dtype,
        memptr=cupy.cuda.MemoryPointer(memory, 0),
        strides=tuple(stride * dtype.itemsize for stride in x.stride()),
    )


def _hidden_bias(xp, case: Case, dtype):
    """(seqlen_q, seqlen_k): 0 where visible, else -inf."""
    first, last = (xp.asarray(key)[:, None] for key in case.visible(np.arange(case.seqlen_q)))
    key = xp.arange(case.seqlen_k)
    return xp.where((key < first) | (key > last), np.float32(-np.inf), np.float32(0)).astype(dtype)


_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType: CUDA_R_32F, ...
_COMPUTE_32F, _COMPUTE_64F = 68, 70  # cublasComputeType_t
_DEFAULT_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT


def _batched_product(cupy, cublas, case: Case, kind: str, a, b, c, *, alpha: float = 1.0) -> None:
    """c = alpha * a b^T ("scores"): rows of queries a and of keys b into scores c (batch, heads, seqlen_q, seqlen_k).
    c = alpha * a b ("rows"): scores a and rows of keys b into rows of queries c.
    c = alpha * a^T b ("columns"): scores a and rows of queries b into rows of keys c; no grouped heads.

    By cuBLAS itself, on tensor cores and without copies: ``cupy.matmul`` takes float16 to float32 first and
    knows no strided heads. cuBLAS is column-major, and a row-major matrix is its transpose there, so b comes
    first.
    """
    item, dtype = ITEMSIZE[case.dtype], _CUDA_TYPES[case.dtype]
    double = case.dtype == "float64"
    factors = np.array([alpha, 0], np.float64 if double else np.float32)
    handle = cupy.cuda.Device().cublas_handle

    def steps(x, is_scores):  # elements from row to row, from head to head and from batch to batch
        batch, second, third, _ = (stride // item for stride in x.strides)
        return (third, second, batch) if is_scores else (second, third, batch)

    row_a, head_a, batch_a = steps(a, kind != "scores")
    row_b, head_b, batch_b = steps(b, False)
    row_c, head_c, batch_c = steps(c, kind == "scores")
    columns, rows, depth = {
        "scores": (case.seqlen_k, case.seqlen_q, a.shape[-1]),
        "rows": (b.shape[-1], case.seqlen_q, case.seqlen_k),
        "columns": (b.shape[-1], case.seqlen_k, case.seqlen_q),
    }[kind]
    # Query heads that share a key head are one batch of products with a step of 0 over that head.
    group = case.heads_q // case.heads_k
    runs = [(0, case.heads_q, head_b)] if group == 1 else [(h * group, group, 0) for h in range(case.heads_k)]
    for batch in range(case.batch):
        for head, count, step_b in runs:
            cublas.gemmStridedBatchedEx(
                handle,
                int(kind == "scores"),
                int(kind == "columns"),
                columns,
                rows,
                depth,
                factors.ctypes.data,
                b.data.ptr + item * (batch * batch_b + head // group * head_b),
                dtype,
                row_b,
                step_b,
                a.data.ptr + item * (batch * batch_a + head * head_a),
                dtype,
                row_a,
                head_a,
                factors.ctypes.data + factors.itemsize,
                c.data.ptr + item * (batch * batch_c + head * head_c),
                dtype,
                row_c,
                head_c,
                count,
                _COMPUTE_64F if double else _COMPUTE_32F,
                _DEFAULT_ALGORITHM,
            )


def _one_by_one(make_one: Callable, case: Case, arrays: Arrays) -> Callable:
    """Packed sequences through a contender that has none, each as a batch of one."""
    calls = []
    for number, (start, stop) in enumerate(itertools.pairwise(case.starts)):
        if start < stop:
            rows = (x if x is None else x[None, start:stop] for x in (arrays.q, arrays.k, arrays.v, arrays.dout))
            calls.append(make_one(case.alone(number), Arrays(arrays.framework, *rows)))

    def all_of_them():
        results = [call() for call in calls]
        if not case.backward:
            return np.concatenate(results, axis=1)[0]
        return tuple(np.concatenate(parts, axis=1)[0] for parts in zip(*results, strict=True))

    return all_of_them


def _probabilities_numpy(case: Case, arrays: Arrays) -> tuple[Callable, Callable]:
    """(a function that returns the probabilities, one that puts the heads first), in a type that BLAS knows."""
    wide = np.float64 if case.dtype == "float64" else np.float32
    group = case.heads_q // case.heads_k
    hidden = _hidden_bias(np, case, wide) if case.causal or case.window is not None else None
    scale = wide(case.head_dim**-0.5)

    def heads_first(x, repeats=1):
        x = x.astype(wide, copy=False).swapaxes(1, 2)
        return np.repeat(x, repeats, axis=1) if repeats > 1 else x

    def attend():
        q, k = heads_first(arrays.q), heads_first(arrays.k, group)
        scores = np.matmul(q * scale, k.swapaxes(-1, -2))
        if hidden is not None:
            scores += hidden
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores

    return attend, heads_first


def _unfused_numpy(case: Case, arrays: Arrays) -> Callable:
    if case.lengths:
        return _one_by_one(_unfused_numpy, case, arrays)
    probabilities, heads_first = _probabilities_numpy(case, arrays)
    dtype, group = arrays.q.dtype, case.heads_q // case.heads_k

    def attend():
        out = np.matmul(probabilities(), heads_first(arrays.v, group))
        return np.ascontiguousarray(out.swapaxes(1, 2)).astype(dtype, copy=False)

    return attend


def _unfused_numpy_backward(case: Case, arrays: Arrays) -> Callable:
    if case.lengths:
        return _one_by_one(_unfused_numpy_backward, case, arrays)
    probabilities, heads_first = _probabilities_numpy(case, arrays)
    dtype, group = arrays.q.dtype, case.heads_q // case.heads_k

    def rows_first(x, heads):
        """Back to (batch, seqlen, heads, head_dim), summed over the query heads of a key head."""
        x = x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(axis=2)
        return np.ascontiguousarray(x.swapaxes(1, 2)).astype(dtype, copy=False)

    def backward(p):
        q, dout = heads_first(arrays.q), heads_first(arrays.dout)
        k, v = heads_first(arrays.k, group), heads_first(arrays.v, group)
        ds = np.matmul(dout, v.swapaxes(-1, -2))
        ds -= np.einsum("bhij,bhij->bhi", p, ds)[..., None]
        ds *= p
        ds *= ds.dtype.type(case.head_dim**-0.5)
        dq, dk, dv = np.matmul(ds, k), np.matmul(ds.swapaxes(-1, -2), q), np.matmul(p.swapaxes(-1, -2), dout)
        return rows_first(dq, case.heads_q), rows_first(dk, case.heads_k), rows_first(dv, case.heads_k)

    return _with_forward(case, probabilities, backward)


def _require_memory(case: Case, scores: float) -> None:
    """Unless ``scores`` score matrices fit what is free."""
    from cuflash.jit import import_cupy

    needed = scores * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * ITEMSIZE[case.dtype]
    free = import_cupy().cuda.runtime.memGetInfo()[0]
    _require(
        needed < 0.9 * free, f"needs {needed / 2**30:.1f} GiB for scores, {free / 2**30:.1f} GiB are free"
    )


# ------------------------------------------------------------------------------------------------------------
# PyTorch


def _sdpa(backend: str, case: Case, arrays: Arrays) -> Callable:
    torch = _torch(arrays)
    attention = _module("torch.nn.attention")
    kind = getattr(attention.SDPBackend, backend, None)
    _require(kind is not None, f"torch {torch.__version__} has no {backend}")
    _require(case.window is None, "scaled_dot_product_attention has no window")
    # A single query sees all keys, by a mask that is aligned bottom-right.
    causal = case.causal and case.seqlen_q > 1
    _require(not causal or case.seqlen_q == case.seqlen_k, "its causal mask is aligned top-left")
    if backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        _require_half(case)
    if backend == "MATH":
        _require_memory(case, 5)
    if case.lengths:
        _require(backend == "FLASH_ATTENTION", "scaled_dot_product_attention takes no packed sequences")
        return _flash_packed(torch, case, arrays)
    if case.backward and backend == "FLASH_ATTENTION":
        return _flash_backward(torch, case, arrays)
    if case.backward and backend == "CUDNN_ATTENTION":
        return _cudnn_backward(torch, case, arrays)
    options = {"is_causal": causal}
    if case.heads_q != case.heads_k:
        options["enable_gqa"] = True
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(q, k, v):
        with attention.sdpa_kernel(kind):
            return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # one for each reason against each backend
            attend(arrays.q, arrays.k, arrays.v)
    except RuntimeError as error:
        if any(text in str(error) for text in ("No available kernel", "No viable backend")):
            raise Unavailable(f"this backend of torch {torch.__version__} does not take the case") from None
        raise
    if case.backward:
        return _by_autograd(torch, attend, case, arrays)
    q, k, v = (x.transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v))

    def forward():
        with attention.sdpa_kernel(kind):
            return sdpa(q, k, v, **options).transpose(1, 2)

    return forward


def _by_autograd(torch, attend: Callable, case: Case, arrays: Arrays) -> Callable:
    """The backward of what ``attend(q, k, v)`` returns, its graph kept where that is the same in each call."""
    inputs = [x.detach().requires_grad_() for x in (arrays.q, arrays.k, arrays.v)]
    return _with_forward(
        case,
        lambda: attend(*inputs),
        lambda out: torch.autograd.grad(out, inputs, arrays.dout, retain_graph=not case.step),
    )


def _flash_backward(torch, case: Case, arrays: Arrays) -> Callable:
    """FlashAttention 2 by the operator that autograd calls, with what its forward saved: its kernels alone, none of
    autograd's work on the host or on the GPU. All arrays are views of (batch, seqlen, heads, head_dim), its own layout,
    so that it copies none.
    """
    _require(case.head_dim % 8 == case.head_dim_v % 8 == 0, "its operator takes head_dims that are multiples of 8")
    q, k, v, dout = (x.transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v, arrays.dout))
    aten = torch.ops.aten
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward

    def gradients(saved):
        out, lse, starts_q, starts_k, longest_q, longest_k, rng, unused = saved[:8]
        of_batch = (starts_q, starts_k, longest_q, longest_k, 0.0, case.causal, rng, unused)
        return tuple(x.transpose(1, 2) for x in backward(dout, q, k, v, out, lse, *of_batch))

    return _with_forward(case, lambda: forward(q, k, v, 0.0, case.causal), gradients)


def _cudnn_backward(torch, case: Case, arrays: Arrays) -> Callable:
    """As _flash_backward, of cuDNN."""
    q, k, v, dout = (x.transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v, arrays.dout))
    aten = torch.ops.aten
    forward, backward = aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward

    def gradients(saved):
        out, lse, starts_q, starts_k, longest_q, longest_k, seed, offset = saved[:8]
        of_batch = (None, starts_q, starts_k, longest_q, longest_k, 0.0, case.causal)
        return tuple(x.transpose(1, 2) for x in backward(dout, q, k, v, out, lse, seed, offset, *of_batch))

    return _with_forward(case, lambda: forward(q, k, v, None, True, 0.0, case.causal), gradients)


def _flash_packed(torch, case: Case, arrays: Arrays) -> Callable:
    """FlashAttention 2 on packed sequences, by the operators under ``torch.nn.attention.varlen``."""
    _require(case.head_dim % 8 == case.head_dim_v % 8 == 0, "its operator takes head_dims that are multiples of 8")
    q, k, v, dout = arrays.q, arrays.k, arrays.v, arrays.dout
    aten, longest = torch.ops.aten, case.seqlen_q
    batch = (arrays.starts, arrays.starts, longest, longest, 0.0, case.causal)
    forward = aten._flash_attention_forward
    if not case.backward:
        return lambda: forward(q, k, v, *batch, False)[0]
    backward = aten._flash_attention_backward

    def gradients(saved):
        out, lse, rng, unused, _ = saved
        return backward(dout, q, k, v, out, lse, *batch, rng, unused)

    return _with_forward(case, lambda: forward(q, k, v, *batch, False), gradients)


# ------------------------------------------------------------------------------------------------------------
# FlashAttention 3 and 4, FlashInfer


def _sides(case: Case, unbounded):
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    return tuple(unbounded if side is None else side for side in (left, right))


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def _fa3(case: Case, arrays: Arrays) -> Callable:
    torch = _torch(arrays)
    _require_half(case)
    # Two distributions of one thing: the first that is installed, so that it is its error that is reported.
    name = next(filter(_is_installed, _NEEDS["fa3"]), _NEEDS["fa3"][0])
    _require(not case.backward or not name.startswith("fa3_fwd"), f"{name} has no backward")
    module = _module(name)
    if isinstance(case, DecodeCase):
        return _fa3_decode(module, case, arrays)
    options = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = _sides(case, -1)
    attention, batch = module.flash_attn_func, ()
    if case.lengths:
        attention, batch = module.flash_attn_varlen_func, (arrays.starts, arrays.starts, case.seqlen_q, case.seqlen_q)
    if case.backward:
        return _by_autograd(torch, lambda q, k, v: _first(attention(q, k, v, *batch, **options)), case, arrays)
    q, k, v = arrays.q, arrays.k, arrays.v
    return lambda: _first(attention(q, k, v, *batch, **options))


def _fa3_decode(module, case: DecodeCase, arrays: DecodeArrays) -> Callable:
    q, k, v, given = arrays.q, arrays.k, arrays.v, arrays.given
    options = {"k": given.get("k"), "v": given.get("v"), "cache_seqlens": given["cache_seqlens"], "causal": case.causal}
    if case.page_size:
        options["page_table"] = given["block_table"]
    if case.v_is_k:  # it takes the columns that are values too apart from the others
        _require(not case.appended, "it appends to no keys that are values too")
        options["qv"] = q[..., : case.head_dim_v]
        q, k = (x[..., case.head_dim_v :] for x in (q, k))
    attention = module.flash_attn_with_kvcache
    return lambda: _first(attention(q, k, v, **options))


def _fa3_jax(case: Case, arrays: Arrays) -> Callable:
    """FlashAttention 3 as flash-attn3-jax has it: the one distribution on PyPI with its backward, for JAX. Tensors go to
    and fro by DLPack, by which each library's stream waits for the other's: of a call nothing runs outside the events
    that the timer puts around it.
    """
    torch = _torch(arrays)
    _require_half(case)
    _require(case.backward and not case.step, "is there for its backward, which alone it is timed with")
    _require(not case.lengths and case.window is None, "is called without packed sequences and windows")
    _require(case.head_dim == case.head_dim_v <= 128, "its backward has head_dims up to 128")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the memory that is free
    jax, from_torch = _module("jax"), _module("jax.dlpack").from_dlpack
    module = _module("flash_attn3_jax.flash")
    options = (case.head_dim**-0.5, case.causal, (-1, -1))
    forward = jax.jit(lambda *inputs: module._flash_mha_fwd(*inputs, *options))
    backward = jax.jit(lambda *inputs: module._flash_mha_bwd(*inputs, *options))
    inputs = tuple(map(from_torch, (arrays.q, arrays.k, arrays.v)))
    saved = forward(*inputs)

    def gradients():
        dout = from_torch(arrays.dout)  # in each call: it is what makes JAX's stream wait
        return tuple(map(torch.from_dlpack, backward(dout, *inputs, *saved)))

    return gradients


def _fa4(case: Case, arrays: Arrays) -> Callable:
    torch = _torch(arrays)
    _require_half(case)
    module = _module("flash_attn.cute")
    options = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = _sides(case, None)
    attention = module.flash_attn_func
    if case.lengths:
        attention = module.flash_attn_varlen_func
        for side in "qk":
            options |= {f"cu_seqlens_{side}": arrays.starts, f"max_seqlen_{side}": case.seqlen_q}
    if case.backward:
        return _by_autograd(torch, lambda q, k, v: _first(attention(q, k, v, **options)), case, arrays)
    q, k, v = arrays.q, arrays.k, arrays.v
    return lambda: _first(attention(q, k, v, **options))


def _flashinfer(case: Case, arrays: Arrays) -> Callable:
    torch = _torch(arrays)
    _require_half(case)
    _require(not case.backward, "it has no backward")
    flashinfer = _module("flashinfer")
    left, right = _sides(case, -1)
    _require(right in (-1, 0), "its window has no right side")
    _require(right == -1 or case.causal, "its window has no right side")
    device = arrays.q.device
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD")
    starts_q = starts_k = arrays.starts
    if not case.lengths:
        starts_q, starts_k = (
            torch.arange(case.batch + 1, dtype=torch.int32, device=device) * seqlen
            for seqlen in (case.seqlen_q, case.seqlen_k)
        )
    wrapper.plan(
        starts_q,
        starts_k,
        case.heads_q,
        case.heads_k,
        case.head_dim,
        head_dim_vo=case.head_dim_v,
        causal=case.causal,
        window_left=left,
        q_data_type=arrays.q.dtype,
        kv_data_type=arrays.k.dtype,
    )
    q, k, v = arrays.q, arrays.k, arrays.v
    if case.lengths:
        return lambda: wrapper.run(q, k, v)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return lambda: wrapper.run(q, k, v).unflatten(0, (case.batch, case.seqlen_q))


# ------------------------------------------------------------------------------------------------------------
# The table


def own_name(name: str, tier: str | None) -> str:
    return f"{name}/{tier}" if tier else name


def tier_of(name: str) -> str | None:
    """Of a contender of cuflash; None: as CUFLASH_TIER says."""
    return name.partition("/")[2] or None


# Of cuflash, each also with a tier behind it, "cuflash-deterministic/simt": the deterministic backward, calls with CuPy
# arrays on the memory of torch's, and what a case is compared with (`problem_of`).
_OWN = {
    "cuflash": {},
    "cuflash-deterministic": {"deterministic": True},
    "cuflash-cupy": {"through_cupy": True},
    "cuflash-dense": {},
    "cuflash-mha": {},
    "cuflash-causal": {},
    "cuflash-bfloat16": {},
    **{name: {} for name in BESIDE},
}
# Whose calls are timed by the host's clock too, where they are those of a decoding.
_CLOCKED = ("cuflash", "cuflash-cupy", "fa3")

CONTENDERS: dict[str, Callable[[Case, Arrays], Callable]] = {
    **{
        own_name(name, tier): functools.partial(_cuflash, tier=tier, **options)
        for tier in (None, *config.TIERS)
        for name, options in _OWN.items()
    },
    "unfused": _unfused,
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa_efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "sdpa_math": functools.partial(_sdpa, "MATH"),
    "fa3": _fa3,
    "fa3_jax": _fa3_jax,
    "fa4": _fa4,
    "flashinfer": _flashinfer,
}

# What a suite is compared with unless told otherwise: the fast ones that have its cases.
USUAL = {
    "forward": ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4"),
    "float32": ("sdpa_efficient", "sdpa_math", "unfused"),
    "float64": ("sdpa_math", "unfused"),
    "gqa": ("cuflash-mha", "sdpa_flash", "fa3", "fa4"),
    "window": ("cuflash-causal", "fa3", "fa4", "flashinfer"),
    "small": ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4", "unfused"),
    "backward": ("cuflash-deterministic", "sdpa_flash", "sdpa_cudnn", "fa3_jax", "fa4"),
    "step": ("sdpa_flash", "sdpa_cudnn"),
    "head-dims": ("sdpa_cudnn", "fa3", "fa4"),
    "varlen": ("cuflash-dense", "sdpa_flash", "fa3"),
    "decode": ("cuflash-cupy", "fa3", "sdpa_flash", "sdpa_cudnn"),
    "decode-paged": ("cuflash-contiguous", "fa3"),
    "decode-queries": ("cuflash-one-query", "fa3"),
    "decode-mla": ("fa3",),
    "decode-append": ("cuflash-no-append", "cuflash-uniform", "fa3"),
}

# The modules of each, any of which will do.
_NEEDS = {
    "sdpa_flash": ("torch",),
    "sdpa_cudnn": ("torch",),
    "sdpa_efficient": ("torch",),
    "sdpa_math": ("torch",),
    "fa3": ("fa3_fwd_interface", "flash_attn_interface"),
    "fa3_jax": ("flash_attn3_jax",),
    "fa4": ("flash_attn.cute",),
    "flashinfer": ("flashinfer",),
}


def make(name: str, case: Case, arrays: Arrays) -> Callable:
    """A contender ready for a case, called at least once by nobody yet. Raises Unavailable, or what its own
    code does.
    """
    if isinstance(case, DecodeCase) and not is_cuflash(name) and name != "fa3":
        _require(case.is_plain, "takes no pages, no lengths of its own for each request and no new keys")
    if arrays.turns:
        return InTurns([CONTENDERS[name](case, one) for one in arrays.turns])
    return CONTENDERS[name](case, arrays)


class InTurns:
    """Callables that do the same in other places; each call is that of the next one."""

    def __init__(self, calls):
        self.calls = calls
        self._next = itertools.cycle(calls).__next__

    def __call__(self):
        return self._next()()


def problem_of(name: str, case: Case) -> Case:
    """The case that a contender computes: another one for that whose rate is the measure. Raises Unavailable."""
    what = name.partition("/")[0]
    if what in BESIDE:
        beside = BESIDE[what](case) if isinstance(case, DecodeCase) else None
        _require(beside is not None, "would be the case itself")
        return beside
    if what == "cuflash-dense":
        _require(bool(case.lengths), "the sequences are not packed")
        _require(not case.wall, "compares rates, not the host's time")
        return case.dense
    if what not in ("cuflash-mha", "cuflash-causal", "cuflash-bfloat16"):
        return case
    others = {"mha": case.ungrouped, "causal": case.unwindowed, "bfloat16": replace(case, dtype="bfloat16")}
    other = others[what.removeprefix("cuflash-")]
    _require(other != case, "would be the case itself")
    return other


def is_clocked(name: str) -> bool:
    return name.partition("/")[0] in _CLOCKED


def is_cuflash(name: str) -> bool:
    return name.startswith("cuflash")


def needs_torch(names) -> bool:
    return any(name in _NEEDS for name in names)


def missing(name: str) -> str | None:
    """Why a contender cannot be there at all, without importing it; None if it may be."""
    modules = _NEEDS.get(name, ())
    found = not modules or any(_is_installed(module) for module in modules)
    return None if found else f"not installed (no module {' or '.join(modules)})"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # of the parent, which is imported
        return False


# Distributions whose versions belong into a record.
_DISTRIBUTIONS = (
    "numpy",
    "torch",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "fa3-fwd",
    "flash-attn-3",
    "flash_attn3_jax",
    "jax",
    "flash-attn-4",
    "flash-attn",
    "nvidia-cutlass-dsl",
    "flashinfer-python",
)


def versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
