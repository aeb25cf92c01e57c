"""Every contender behind one signature: ``make(case, arrays) -> callable``, called once a run.

It returns the output, (batch, seqlen_q, heads_q, head_dim_v), in whatever memory the contender takes for it.
Making views, masks and plans is done outside. ``Unavailable`` says why a contender does not take part: it is
not installed, or has no such case.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable

import numpy as np

import cuflash
from cuflash import config
from cuflash.problem import ITEMSIZE

from .cases import Arrays, Case


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


def _cuflash(case: Case, arrays: Arrays, tier: str | None = None) -> Callable:
    q, k, v, options = arrays.q, arrays.k, arrays.v, case.options
    attention = cuflash.attention
    if tier is None:
        return lambda: attention(q, k, v, **options)
    _require(arrays.framework != "numpy", "tiers are for GPUs")

    def forced():
        with config.force_tier(tier):
            return attention(q, k, v, **options)

    return forced


# ------------------------------------------------------------------------------------------------------------
# Unfused: two products and a softmax, the scores in memory and in the inputs' dtype


def _unfused(case: Case, arrays: Arrays) -> Callable:
    if arrays.framework == "numpy":
        return _unfused_numpy(case, arrays)
    from cuflash.jit import import_cupy

    cupy = import_cupy()
    _require_memory(case, 2.2)  # the scores, and a temporary in softmax
    try:
        from cupy_backends.cuda.libs import cublas
    except Exception:  # CuPy names the library and where it looked, at length
        raise Unavailable("CuPy has no cuBLAS here") from None
    q, k, v = (as_cupy(x) for x in (arrays.q, arrays.k, arrays.v))
    hidden = None
    if case.causal or case.window is not None:
        hidden = _hidden_bias(cupy, case, q.dtype)
    out_shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v)
    torch = _module("torch") if arrays.framework == "torch" else None
    product = functools.partial(_batched_product, cupy, cublas, case)
    scale = case.head_dim**-0.5

    def attend():
        scores = cupy.empty((case.batch, case.heads_q, case.seqlen_q, case.seqlen_k), q.dtype)
        product(q, k, scores, alpha=scale, to_scores=True)
        if hidden is not None:
            scores += hidden
        scores -= scores.max(axis=-1, keepdims=True)
        cupy.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        if torch is None:
            out = cupy.empty(out_shape, q.dtype)
        else:
            out = torch.empty(out_shape, dtype=arrays.q.dtype, device=arrays.q.device)
        product(scores, v, as_cupy(out), alpha=1.0, to_scores=False)
        return out

    return attend


def as_cupy(x):
    """A CuPy array on the memory of a CUDA tensor, of any dtype; CuPy arrays as they are."""
    import cupy

    if isinstance(x, cupy.ndarray):
        return x
    from cuflash.arrays import numpy_dtype

    dtype = numpy_dtype(str(x.dtype).removeprefix("torch."))
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


def _batched_product(cupy, cublas, case: Case, a, b, c, *, alpha: float, to_scores: bool) -> None:
    """c = alpha * a b^T, queries a and keys b into scores c (batch, heads, seqlen_q, seqlen_k); or, not
    ``to_scores``, c = alpha * a b, scores a and values b into the output c.

    By cuBLAS itself, on tensor cores and without copies: ``cupy.matmul`` takes float16 to float32 first and
    knows no strided heads. cuBLAS is column-major, and a row-major matrix is its transpose there, so b comes
    first.
    """
    item, kind = ITEMSIZE[case.dtype], _CUDA_TYPES[case.dtype]
    double = case.dtype == "float64"
    factors = np.array([alpha, 0], np.float64 if double else np.float32)
    handle = cupy.cuda.Device().cublas_handle

    def steps(x, is_scores):  # elements from row to row, from head to head and from batch to batch
        batch, second, third, _ = (stride // item for stride in x.strides)
        return (third, second, batch) if is_scores else (second, third, batch)

    row_a, head_a, batch_a = steps(a, not to_scores)
    row_b, head_b, batch_b = steps(b, False)
    row_c, head_c, batch_c = steps(c, to_scores)
    columns, depth = (case.seqlen_k, case.head_dim) if to_scores else (case.head_dim_v, case.seqlen_k)
    # Query heads that share a key head are one batch of products with a step of 0 over that head.
    group = case.heads_q // case.heads_k
    runs = [(0, case.heads_q, head_b)] if group == 1 else [(h * group, group, 0) for h in range(case.heads_k)]
    for batch in range(case.batch):
        for head, count, step_b in runs:
            cublas.gemmStridedBatchedEx(
                handle,
                int(to_scores),
                0,
                columns,
                case.seqlen_q,
                depth,
                factors.ctypes.data,
                b.data.ptr + item * (batch * batch_b + head // group * head_b),
                kind,
                row_b,
                step_b,
                a.data.ptr + item * (batch * batch_a + head * head_a),
                kind,
                row_a,
                head_a,
                factors.ctypes.data + factors.itemsize,
                c.data.ptr + item * (batch * batch_c + head * head_c),
                kind,
                row_c,
                head_c,
                count,
                _COMPUTE_64F if double else _COMPUTE_32F,
                _DEFAULT_ALGORITHM,
            )


def _unfused_numpy(case: Case, arrays: Arrays) -> Callable:
    wide = np.float64 if case.dtype == "float64" else np.float32  # BLAS knows no other
    dtype, group = arrays.q.dtype, case.heads_q // case.heads_k
    hidden = _hidden_bias(np, case, wide) if case.causal or case.window is not None else None
    scale = wide(case.head_dim**-0.5)

    def heads_first(x):
        return x.astype(wide, copy=False).swapaxes(1, 2)

    def attend():
        q, k, v = heads_first(arrays.q), heads_first(arrays.k), heads_first(arrays.v)
        if group > 1:
            k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.matmul(q * scale, k.swapaxes(-1, -2))
        if hidden is not None:
            scores += hidden
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.ascontiguousarray(np.matmul(scores, v).swapaxes(1, 2)).astype(dtype, copy=False)

    return attend


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
    _require(not case.causal or case.seqlen_q == case.seqlen_k, "its causal mask is aligned top-left")
    if backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        _require_half(case)
    if backend == "MATH":
        _require_memory(case, 5)
    q, k, v = (x.transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v))
    options = {"is_causal": case.causal}
    if case.heads_q != case.heads_k:
        options["enable_gqa"] = True
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend():
        with attention.sdpa_kernel(kind):
            return sdpa(q, k, v, **options).transpose(1, 2)

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # one for each reason against each backend
            attend()
    except RuntimeError as error:
        if any(text in str(error) for text in ("No available kernel", "No viable backend")):
            raise Unavailable(f"this backend of torch {torch.__version__} does not take the case") from None
        raise
    return attend


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
    _torch(arrays)
    _require_half(case)
    # Two distributions of one thing: the first that is installed, so that it is its error that is reported.
    module = next(filter(_is_installed, _NEEDS["fa3"]), _NEEDS["fa3"][0])
    attention = _module(module).flash_attn_func
    options = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = _sides(case, -1)
    q, k, v = arrays.q, arrays.k, arrays.v
    return lambda: _first(attention(q, k, v, **options))


def _fa4(case: Case, arrays: Arrays) -> Callable:
    _torch(arrays)
    _require_half(case)
    attention = _module("flash_attn.cute").flash_attn_func
    options = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = _sides(case, None)
    q, k, v = arrays.q, arrays.k, arrays.v
    return lambda: _first(attention(q, k, v, **options))


def _flashinfer(case: Case, arrays: Arrays) -> Callable:
    torch = _torch(arrays)
    _require_half(case)
    flashinfer = _module("flashinfer")
    left, right = _sides(case, -1)
    _require(right in (-1, 0), "its window has no right side")
    _require(right == -1 or case.causal, "its window has no right side")
    device = arrays.q.device
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD")
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
    q, k, v = (x.flatten(0, 1) for x in (arrays.q, arrays.k, arrays.v))
    return lambda: wrapper.run(q, k, v).unflatten(0, (case.batch, case.seqlen_q))


# ------------------------------------------------------------------------------------------------------------
# The table


CONTENDERS: dict[str, Callable[[Case, Arrays], Callable]] = {
    "cuflash": _cuflash,
    **{f"cuflash/{tier}": functools.partial(_cuflash, tier=tier) for tier in config.TIERS},
    "unfused": _unfused,
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa_efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "sdpa_math": functools.partial(_sdpa, "MATH"),
    "fa3": _fa3,
    "fa4": _fa4,
    "flashinfer": _flashinfer,
}

# What a suite is compared with unless told otherwise: the fast ones that have its cases.
USUAL = {
    "forward": ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4"),
    "float32": ("sdpa_efficient", "sdpa_math", "unfused"),
    "float64": ("sdpa_math", "unfused"),
    "gqa": ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4"),
    "window": ("fa3", "fa4", "flashinfer"),
    "small": ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4", "unfused"),
}

# The modules of each, any of which will do.
_NEEDS = {
    "sdpa_flash": ("torch",),
    "sdpa_cudnn": ("torch",),
    "sdpa_efficient": ("torch",),
    "sdpa_math": ("torch",),
    "fa3": ("fa3_fwd_interface", "flash_attn_interface"),
    "fa4": ("flash_attn.cute",),
    "flashinfer": ("flashinfer",),
}


def make(name: str, case: Case, arrays: Arrays) -> Callable:
    """A contender ready for a case, called at least once by nobody yet. Raises Unavailable, or what its own
    code does.
    """
    return CONTENDERS[name](case, arrays)


def is_cuflash(name: str) -> bool:
    return name.split("/")[0] == "cuflash"


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
