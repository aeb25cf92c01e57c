"""attention, attention_varlen and attention_with_kvcache for JAX: under jit, grad, vmap, shard_map and sharded jit.

A call is one XLA custom call (jax_ffi.py), forward or backward, with its scratch as one more result, so that XLA owns all
memory and may record the call into a CUDA graph. Around it, from the inside out: a primitive that checks shapes when it is
traced; a rule by which XLA's partitioner splits it over batch and heads; one by which vmap folds into the batch; the gradients.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import numbers

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("cuflash.jax needs JAX, which is not installed: pip install jax[cuda13] or jax[cuda12]") from error

if jax.__version_info__ < (0, 11):
    raise ImportError(f"cuflash.jax needs JAX 0.11 or newer; got {jax.__version__}")

import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import config, jax_ffi, problem
from .jax_ffi import Array, Call

__all__ = ["attention", "attention_varlen", "attention_with_kvcache", "dot_product_attention"]

_SymbolicZero = jax.custom_derivatives.SymbolicZero


def attention(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0, return_lse=False, deterministic=False):
    """`cuflash.attention` with gradients of q, k and v, those through lse included.

    Args:
        q, k, v, causal, window, softmax_scale, softcap, return_lse: as in `cuflash.attention`, the first three JAX or NumPy
            arrays, traced ones too; the options are Python values.
        deterministic: sum dq in a fixed order, as in `cuflash.attention_backward`.

    Returns:
        out, with ``return_lse`` (out, lse), as `cuflash.attention`.

    Works under jit, grad, vmap, checkpoint, scan and shard_map. Under jit with sharded arrays each device computes its own part
    of batch and heads: key heads and the query heads that read them, or where key heads are fewer than devices some of these;
    the gradients of a key head are then summed over devices (with explicit axes of a mesh: computed on each). What is sharded
    along sequences or head_dim is gathered first. There are no second derivatives and no forward-mode ones.

    Raises:
        TypeError, ValueError: an argument is wrong, when the call is traced; as `cuflash.attention`.
        NotImplementedError: a second derivative is asked for, or as `cuflash.attention`.
        jax.errors.JaxRuntimeError: what happens when the call runs.
    """
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    given = _arrays({"q": q, "k": k, "v": v})
    return _differentiable("attention", given, options, return_lse, deterministic)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
                     seqused_k=None, causal=False, window=None, softmax_scale=None, softcap=0.0, return_lse=False,
                     deterministic=False):
    """`cuflash.attention_varlen` with gradients of q, k and v, those through lse included.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, causal, window, softmax_scale,
            softcap, return_lse: as in `cuflash.attention_varlen`; arrays and options as in `attention`.
        deterministic: as in `attention`.

    Returns:
        out, with ``return_lse`` (out, lse), as `cuflash.attention_varlen`.

    Transformations and errors: as `attention`; sharded over heads only. On the CPU lengths are checked when the call runs.
    """
    problem.check_hint("max_seqlen_q", max_seqlen_q)
    problem.check_hint("max_seqlen_k", max_seqlen_k)
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    given = _arrays({"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
                     "seqused_q": seqused_q, "seqused_k": seqused_k}, optional=("seqused_q", "seqused_k"))
    return _differentiable("attention_varlen", given, options, return_lse, deterministic)


def attention_with_kvcache(q, k_cache, v_cache, *, k=None, v=None, cache_seqlens=None, cache_batch_idx=None, block_table=None,
                           causal=True, window=None, softmax_scale=None, softcap=0.0, num_splits=0, return_lse=False):
    """`cuflash.attention_with_kvcache`, which returns the caches where it appends to them.

    Args:
        q, k_cache, v_cache, cache_batch_idx, block_table, causal, window, softmax_scale, softcap, num_splits, return_lse: as
            in `cuflash.attention_with_kvcache`; arrays and options as in `attention`. JAX has no views: as v_cache
            ``k_cache[..., :512]`` is an array of its own.
        k, v: None, or keys and values that go into the caches first. JAX arrays do not change: the caches with them in are
            returned. They take the memory of those given where nothing else needs these: donated to jit (``donate_argnames``),
            or carried through a loop; otherwise XLA copies them.
        cache_seqlens: an integer, traced or not, or an array (batch,), or None.

    Returns:
        out; (out, lse) with ``return_lse``; with k and v (out, k_cache, v_cache) or (out, lse, k_cache, v_cache).

    Transformations and errors: as `attention`, but not differentiable; over batch it is sharded where request b has row b of
    the cache, or where nothing is appended. Lengths, indices and pages are checked on the CPU, when the call runs.
    """
    batch = getattr(q, "shape", (0,))[:1]
    if isinstance(cache_seqlens, numbers.Number):
        # The check names what is wrong with it; an array makes one program of all lengths.
        number = cache_seqlens
        cache_seqlens = None
    else:
        number = None
        if cache_seqlens is not None and getattr(cache_seqlens, "shape", None) == ():
            cache_seqlens = jnp.broadcast_to(cache_seqlens, batch)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens,
              "cache_batch_idx": cache_batch_idx, "block_table": block_table}
    given = _arrays(arrays, optional=tuple(arrays)[3:])
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap,
               "num_splits": num_splits, "return_lse": return_lse}
    if number is not None:
        views = jax_ffi.views_of(_described(given))
        problem.check_attention_with_kvcache(**views, cache_seqlens=number, **options)
        given = {name: given[name] if name in given else np.full(batch, number, np.int32)
                 for name in arrays if name in given or name == "cache_seqlens"}
    call = _call("attention_with_kvcache", given, options)
    results = _run_undifferentiable(call, tuple(given.values()))
    return results if len(results) > 1 else results[0]


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
                          key_value_seq_lengths=None, local_window_size=None, implementation=None, return_residual=False):
    """`jax.nn.dot_product_attention` by its signature and rules, where cuflash has them.

    Args:
        query: (batch, T, N, H) or (T, N, H); key, value: (batch, S, K, H) or (S, K, H), N a multiple of K. As in `attention`.
        bias, mask: None.
        scale: ``H ** -0.5`` by default.
        is_causal: key j is visible to query i iff ``j <= i``: counted from the top left, unlike everywhere else in cuflash.
        query_seq_lengths, key_value_seq_lengths: None or (batch,) int32: how many rows take part. The others of out are 0.
        local_window_size: None, an integer or (left, right): ``i - left <= j <= i + right``. With lengths only where one array
            is given for both and T is S, or with is_causal, query_seq_lengths alone and T at most S.
        implementation: None.
        return_residual: also return the natural logarithm of the sum of exponentials, (batch, T, N) in key's dtype, without
            gradient.

    Returns:
        out, shaped as query, with ``return_residual`` (out, residual). A query that sees no key has 0 and -inf, where JAX has
        the mean of value.

    Raises:
        NotImplementedError: bias, mask, an implementation of JAX's own, or a window with lengths that it does not go with.
        As `attention`.
    """
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            raise NotImplementedError(f"{name} is not supported by cuflash: use is_causal, local_window_size and the lengths "
                                      "where they say the same, or jax.nn.dot_product_attention")
    if implementation is not None:
        raise NotImplementedError(f"implementation must be None, which is cuflash; got {implementation!r}: "
                                  "jax.nn.dot_product_attention has xla and cudnn")
    problem.check_flag("is_causal", is_causal)
    problem.check_flag("return_residual", return_residual)
    given = _arrays({"q": query, "k": key, "v": value})
    _, views = jax_ffi.state(Call("attention", ("q", "k", "v"), (("softmax_scale", scale),), None), _described(given))
    was_3d = views["q"].was_3d
    q, k, v = (x[None] if was_3d else x for x in given.values())
    same = query_seq_lengths is not None and query_seq_lengths is key_value_seq_lengths
    lengths = _arrays({"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths},
                      optional=("query_seq_lengths", "key_value_seq_lengths"))
    for name, x in lengths.items():
        if x.shape != q.shape[:1] or x.dtype not in (jnp.int32, jnp.int64):
            raise ValueError(f"{name} must be int32 of shape {q.shape[:1]}, the batch; got {x.dtype} of shape {x.shape}")
    left, right = _local_window(local_window_size)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if lengths:
        used = lengths.get("query_seq_lengths"), lengths.get("key_value_seq_lengths")
        out, lse = _with_lengths(q, k, v, *used, same, left, right, scale)
    else:
        out, lse = _top_left(q, k, v, left, right, scale)
    out = out[0] if was_3d else out
    if not return_residual:
        return out
    residual = jax.lax.stop_gradient(lse.swapaxes(1, 2)).astype(k.dtype)
    return out, residual[0] if was_3d else residual


def _local_window(size) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    if isinstance(size, numbers.Integral) and not isinstance(size, bool):
        size = size, size
    if (not isinstance(size, tuple) or len(size) != 2
            or not all(isinstance(side, numbers.Integral) and not isinstance(side, bool) and side >= 0 for side in size)):
        raise ValueError(f"local_window_size must be None, an integer of 0 or more, or a pair of them; got {size!r}")
    return int(size[0]), int(size[1])


def _top_left(q, k, v, left, right, scale):
    """(out, lse) where key j is visible to query i iff ``i - left <= j <= i + right``."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    # The window of `attention` is counted from the bottom right, by seqlen_k - seqlen_q further, and no side of it is negative:
    # keys that no query sees, and queries that see no key, are left out.
    keys = seqlen_k if right is None else min(seqlen_k, seqlen_q + right)
    queries = seqlen_q if left is None else min(seqlen_q, keys + left)
    shift = keys - queries
    window = None if left is None else max(0, left + shift), None if right is None else max(0, right - shift)
    out, lse = attention(q[:, :queries], k[:, :keys], v[:, :keys], window=window, softmax_scale=scale, return_lse=True)
    unseen = seqlen_q - queries
    return (jnp.pad(out, ((0, 0), (0, unseen), (0, 0), (0, 0))),
            jnp.pad(lse, ((0, 0), (0, 0), (0, unseen)), constant_values=-jnp.inf))


def _with_lengths(q, k, v, used_q, used_k, same: bool, left, right, scale):
    """As _top_left, with lengths: as packed sequences, of each of which the first rows are used."""
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    ends = [np.arange(batch + 1, dtype=np.int32) * rows for rows in (seqlen_q, seqlen_k)]
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    lengths = [jnp.full(batch, rows, jnp.int32) if used is None else jnp.clip(used, 0, rows).astype(jnp.int32)
               for used, rows in ((used_q, seqlen_q), (used_k, seqlen_k))]

    def attend(ends, used, **options):
        out, lse = attention_varlen(*packed, *ends, seqused_q=used[0], seqused_k=used[1], softmax_scale=scale, return_lse=True,
                                    **options)
        return (out.reshape(batch, seqlen_q, *out.shape[1:]),
                lse.reshape(lse.shape[0], batch, seqlen_q).swapaxes(0, 1))

    if left is None and right is None:
        return attend(ends, lengths)
    if same and seqlen_q == seqlen_k:
        return attend(ends, lengths, window=(left, right))
    if used_k is None and seqlen_q <= seqlen_k and right == 0:
        return attend(ends, [lengths[0]] * 2, window=(left, right))     # no query sees a key behind the last one
    if left is not None or right != 0:
        raise NotImplementedError(
            "local_window_size is not supported with key_value_seq_lengths, unless the same array is given as "
            "query_seq_lengths and there are as many keys as queries: use jax.nn.dot_product_attention")
    # Causal: rows before the last key are a square, those behind it see all keys.
    square = jnp.minimum(*lengths)
    first = attend(ends, [square] * 2, window=(None, 0))
    # The rows behind are sequences of their own; those before have none of the keys here.
    starts = ends[0][:-1]
    rows = jnp.concatenate([jnp.stack([starts, starts + square], 1).reshape(-1), jnp.asarray(ends[0][-1:])])
    keys = np.concatenate([np.repeat(ends[1][:-1], 2), ends[1][-1:]])
    zero = jnp.zeros_like(square)
    used = [jnp.stack(pair, 1).reshape(-1) for pair in ((square, lengths[0] - square), (zero, lengths[1]))]
    behind = attend((rows, keys), used)
    in_square = jnp.arange(seqlen_q) < square[:, None]
    return jnp.where(in_square[..., None, None], first[0], behind[0]), jnp.where(in_square[:, None], first[1], behind[1])


# ---------------------------------------------------------------------------------------------------------- arrays, options

def _arrays(given: dict, optional=()) -> dict:
    """The arrays by name, those not given left out, NumPy's as JAX's."""
    found = {}
    for name, x in given.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{name} must be a JAX or NumPy array; got {type(x).__name__}")
        found[name] = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return found


def _described(given: dict) -> list[Array]:
    return [Array(name, x.dtype.name, x.shape) for name, x in given.items()]


def _call(operation: str, given: dict, options: dict) -> Call:
    """The call, checked, its options in one form each."""
    kinds = tuple((name, x.dtype, x.shape) for name, x in given.items())
    window = options["window"]
    # With the types of options: 1 equals True and 1.0, and must still be refused where they are not meant.
    types = (*map(type, options.values()), *(map(type, window) if type(window) is tuple else ()))
    values = tuple(options.items())
    try:
        hash(values)
    except TypeError:           # a list as window, or what is refused below
        return _checked.__wrapped__(operation, kinds, values, types, config.forced_tier())
    return _checked(operation, kinds, values, types, config.forced_tier())


@functools.lru_cache(4096)
def _checked(operation: str, kinds: tuple, options: tuple, types: tuple, tier: str | None) -> Call:
    for name, _, shape in kinds:
        if not all(isinstance(size, int) for size in shape):
            raise NotImplementedError(f"{name} has a symbolic shape, {shape}: cuflash chooses its kernels by shapes; export with "
                                      "numbers")
    call = Call(operation, tuple(name for name, _, _ in kinds), options, tier)
    stated, _ = jax_ffi.state(call, [Array(name, dtype.name, shape) for name, dtype, shape in kinds])
    options = dict(options)
    options |= {"window": problem._window(options["window"]), "causal": bool(options["causal"]),
                "softmax_scale": stated.softmax_scale, "softcap": stated.softcap, "return_lse": stated.return_lse}
    if "num_splits" in options:
        options["num_splits"] = stated.num_splits
    return call._replace(options=tuple(options.items()))


def _with(call: Call, **options) -> Call:
    return call._replace(options=tuple((dict(call.options) | options).items()))


# ---------------------------------------------------------------------------------------------------------------- gradients

def _differentiable(operation: str, given: dict, options: dict, return_lse, deterministic):
    problem.check_flag("deterministic", deterministic)
    call = _call(operation, given, options | {"return_lse": bool(return_lse)})
    results = _run_attend(call, bool(deterministic), tuple(given.values()))
    return results if return_lse else results[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(call: Call, deterministic: bool, tensors: tuple) -> tuple:
    return _batched(call)(*tensors)


def _attend_forward(call: Call, deterministic: bool, tensors: tuple):
    tensors = tuple(x.value for x in tensors)
    results = _undifferentiable(_with(call, return_lse=True), tensors)
    return results if dict(call.options)["return_lse"] else results[:1], (tensors, *results)


def _attend_backward(call: Call, deterministic: bool, kept, cotangents):
    tensors, out, lse = kept
    dout, dlse = (*cotangents, None)[:2]
    if isinstance(dout, _SymbolicZero):
        dout = jnp.zeros_like(out)
    if isinstance(dlse, _SymbolicZero):
        dlse = None
    given = dict(zip(call.operands, tensors)) | {"out": out, "lse": lse, "dout": dout}
    if dlse is not None:
        given["dlse"] = dlse
    operation = call.operation + "_backward"
    given = {name: given[name] for name in jax_ffi.OPERATIONS[operation].arrays if name in given}
    options = {name: value for name, value in call.options if name != "return_lse"} | {"deterministic": deterministic}
    backward = Call(operation, tuple(given), tuple(options.items()), call.tier)
    gradients = [jax.sharding.reshard(x, jax.typeof(of).sharding) if jax.typeof(x).sharding != jax.typeof(of).sharding else x
                 for x, of in zip(_undifferentiable(backward, tuple(given.values())), tensors)]
    return ((*gradients, *(None,) * (len(tensors) - 3)),)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _undifferentiable(call: Call, tensors: tuple) -> tuple:
    return _batched(call)(*_alike(call, tensors))


def _refuse_derivative(call: Call, tensors: tuple):
    if call.operation != "attention_with_kvcache":
        raise NotImplementedError("cuflash.jax has no second derivatives: the gradients of attention and attention_varlen "
                                  "cannot be differentiated again; use jax.nn.dot_product_attention where they are needed")
    raise NotImplementedError(f"{call.operation} has no gradient: attention and attention_varlen have; use "
                              "jax.lax.stop_gradient on its arrays where none is wanted")


_undifferentiable.defvjp(_refuse_derivative, lambda *_: None)


# What is called from Python. Compiled, so that a call that is not traced takes JAX's quick way.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_attend(call: Call, deterministic: bool, tensors: tuple) -> tuple:
    return _attend(call, deterministic, _alike(call, tensors))


@functools.partial(jax.jit, static_argnums=0)
def _run_undifferentiable(call: Call, tensors: tuple) -> tuple:
    return _undifferentiable(call, tensors)


def _alike(call: Call, tensors: tuple) -> tuple:
    """The arrays, each varying over all axes of shard_map over which one of them does, and on a mesh with explicit axes sharded
    as they are computed on. JAX takes gradients back through both.
    """
    kinds = [jax.typeof(x).manual_axis_type for x in tensors]
    over = frozenset().union(*(kind.varying for kind in kinds))
    tensors = tuple(jax.lax.pcast(x, tuple(over - kind.varying), to="varying") if over - kind.varying else x
                    for x, kind in zip(tensors, kinds))
    avals = [jax.typeof(x) for x in tensors]
    if not any(entry is not None for aval in avals for entry in aval.sharding.spec):
        return tensors
    axes = _axes_of(call)
    if len(avals[0].shape) < len(axes["q"]):    # a batch of one without its axis
        axes = {name: pattern.removeprefix("b") for name, pattern in axes.items()}
    split = _split(call, avals, axes)
    wanted = [_spec(axes[name], split) for name in call.operands]
    return tuple(x if aval.sharding.spec == spec else jax.sharding.reshard(x, NamedSharding(aval.sharding.mesh, spec))
                 for x, aval, spec in zip(tensors, avals, wanted))


# ---------------------------------------------------------------------------------------------------------------------- vmap

@functools.lru_cache(4096)
def _batched(call: Call):
    """Function of the arrays of a call: the results, in a tuple."""
    @jax.custom_batching.custom_vmap
    def run(*tensors):
        tensors, had_batch = _with_batch(call, tensors)
        results = _partitioned(call, tensors)(*tensors)
        return tuple(results) if had_batch else tuple(x[0] for x in results)

    @run.def_vmap
    def fold(size, mapped, *tensors):
        folded_call, folded, unfold = _fold(call, size, mapped, tensors)
        results = _batched(folded_call)(*folded)
        return tuple(unfold(name, x) for name, x in zip(_result_names(call), results)), (True,) * len(results)

    return run


def _with_batch(call: Call, tensors: tuple) -> tuple[tuple, bool]:
    """(the arrays with a batch axis, whether they had it). Packed sequences have none."""
    if "varlen" in call.operation or tensors[0].ndim == 4:
        return tensors, True
    return tuple(x[None] for x in tensors), False


def _result_names(call: Call) -> list[str]:
    names = list(jax_ffi.OPERATIONS[call.operation].written)
    if dict(call.options).get("return_lse"):
        names.append("lse")
    return names + ["k_cache", "v_cache"] * call.appends


def _fold(call: Call, size: int, mapped, tensors: tuple):
    """(call, arrays, function of a result's name and a result) with the axis of vmap folded into the batch.

    ``mapped`` says which arrays have that axis, as their first.
    """
    given = dict(zip(call.operands, zip(tensors, mapped)))
    if call.operation == "attention_with_kvcache":
        given, unfold = _fold_cache(call, size, given)
        return call._replace(operands=tuple(given)), tuple(given.values()), unfold
    given = {name: x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)) for name, (x, is_mapped) in given.items()}
    if "varlen" in call.operation:
        rows = {name: given["k" if name in ("dk", "dv") else "q"].shape[1] for name in _result_names(call)}
        given = _fold_packed(size, given)

        def unfold(name, x):
            if name == "lse":
                return x.reshape(x.shape[0], size, rows[name]).swapaxes(0, 1)
            return x.reshape(size, rows[name], *x.shape[1:])
        return call._replace(operands=tuple(given)), tuple(given.values()), unfold
    if given["q"].ndim == 4:        # without a batch axis: it is one
        return call, tuple(given.values()), lambda name, x: x
    batch = given["q"].shape[1]
    return call, tuple(map(_merge_axes, given.values())), lambda name, x: x.reshape(size, batch, *x.shape[1:])


def _merge_axes(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _fold_packed(size: int, given: dict) -> dict:
    """Into more sequences. The rows that no sequence covers are one of which nothing is used."""
    folded = {}
    for name, x in given.items():
        if name in ("lse", "dlse"):
            folded[name] = x.swapaxes(0, 1).reshape(x.shape[1], -1)
        elif not name.startswith(("cu_seqlens", "seqused")):
            folded[name] = _merge_axes(x)
    for side in "qk":
        ends, used = given[f"cu_seqlens_{side}"], given.get(f"seqused_{side}")
        rows = given[side].shape[1]
        used = ends[:, 1:] - ends[:, :-1] if used is None else used.astype(ends.dtype)
        first = jnp.arange(size, dtype=ends.dtype)[:, None] * rows
        folded[f"cu_seqlens_{side}"] = jnp.pad((ends + first).reshape(-1), (0, 1), constant_values=size * rows)
        folded[f"seqused_{side}"] = jnp.pad(used, ((0, 0), (0, 1))).reshape(-1)
    operation = "attention_varlen_backward" if "dout" in given else "attention_varlen"
    return {name: folded[name] for name in jax_ffi.OPERATIONS[operation].arrays if name in folded}


def _fold_cache(call: Call, size: int, given: dict):
    """Into more requests, and caches that differ into more rows or pages; of one cache for all the rows are named."""
    caches_mapped = given["k_cache"][1] or given["v_cache"][1] or call.appends
    folded = {}
    for name, (x, is_mapped) in given.items():
        if name in ("k_cache", "v_cache") and not caches_mapped:
            folded[name] = x
        else:
            folded[name] = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
    (_, batch), slots = folded["q"].shape[:2], given["k_cache"][0].shape[int(given["k_cache"][1])]
    index = "block_table" if "block_table" in given else "cache_batch_idx"
    if index not in given and not caches_mapped:
        folded[index] = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32), (size, batch))
    elif index in given and caches_mapped:
        x = folded[index]
        # What is out of range stays so, and is cut by the kernels as without vmap: no other one's rows are named.
        first = slots * jnp.arange(size, dtype=x.dtype).reshape(size, *(1,) * (x.ndim - 1))
        folded[index] = jnp.clip(x, 0, max(0, slots - 1)) + first
    folded = {name: folded[name] if name in ("k_cache", "v_cache") and not caches_mapped else _merge_axes(folded[name])
              for name in jax_ffi.OPERATIONS[call.operation].arrays if name in folded}
    firsts = {"k_cache": slots, "v_cache": slots}
    return folded, lambda name, x: x.reshape(size, firsts.get(name, batch), *x.shape[1:])


# ----------------------------------------------------------------------------------------------------------------- sharding

def _axes_of(call: Call) -> dict[str, str]:
    """The axes of each array and result by letters. Work is split along b, the batch, g, the key heads, and r, the query heads
    of each; "h" is both. Nothing is split along the others.
    """
    lse, q, k, v, out = "bhs", "bshd", "btgd", "btge", "bshe"
    if "varlen" in call.operation:
        lse, q, k, v, out = "hs", "shd", "tgd", "tge", "she"
    axes = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": out, "dlse": lse, "dq": q, "dk": k, "dv": v,
            "cu_seqlens_q": "n", "cu_seqlens_k": "n", "seqused_q": "m", "seqused_k": "m"}
    if call.operation == "attention_with_kvcache":
        named = "cache_batch_idx" in call.operands or "block_table" in call.operands
        rows, batch = ("c" if named else "b"), ("x" if named and call.appends else "b")
        axes |= {"q": f"{batch}shd", "out": f"{batch}she", "lse": f"{batch}hs", "k": f"{batch}ngd", "v": f"{batch}nge",
                 "k_cache": f"{rows}tgd", "v_cache": f"{rows}tge", "cache_seqlens": batch, "cache_batch_idx": batch,
                 "block_table": f"{batch}m"}
    return axes


def _heads_of(call: Call, operands) -> tuple[int, int]:
    """(key heads, query heads of each)."""
    keys = call.operands.index("k_cache" if call.operation == "attention_with_kvcache" else "k")
    heads_q, heads_k = operands[0].shape[-2], operands[keys].shape[-2]
    return heads_k, heads_q // heads_k if heads_k else 1


def _split(call: Call, operands, axes: dict[str, str]) -> dict[str, tuple]:
    """The axes of the mesh along which b, g and r are split, where ``operands`` are sharded so and it comes out even.

    ``axes``: those of _axes_of.
    """
    mesh, (heads_k, group) = operands[0].sharding.mesh, _heads_of(call, operands)

    def given(name, letter):
        spec, at = operands[call.operands.index(name)].sharding.spec, axes[name].index(letter)
        entry = spec[at] if at < len(spec) else None
        return tuple(entry) if isinstance(entry, tuple) else () if entry is None else (entry,)

    def parts(names):
        return math.prod(mesh.shape[name] for name in names)

    def evenly(names, size):
        """The first of the axes that divide the size."""
        count = next(count for count in range(len(names), -1, -1) if size % parts(names[:count]) == 0)
        return names[:count]

    split = {letter: evenly(given("q", letter), operands[0].shape[0]) for letter in axes["q"] if letter == "b"}
    queries = given("q", "h")
    split["g"] = evenly(given(next(name for name in call.operands if "g" in axes[name]), "g") or queries, heads_k)
    rest = queries[len(split["g"]):]
    if call.operation.endswith("_backward") and jax.sharding.AxisType.Explicit in mesh.axis_types:
        rest = ()           # the sum over r needs JAX in the part of a device, which XLA refuses there
    if parts(split["g"]) == heads_k and queries[:len(split["g"])] == split["g"]:
        split["r"] = evenly(rest, group)
    return split


def _spec(pattern: str, split: dict[str, tuple]) -> PartitionSpec:
    """How an array is sharded, by the letters of its axes."""
    entries = (split.get("g", ()) + split.get("r", ()) if letter == "h" else split.get(letter, ()) for letter in pattern)
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in entries))


def _partitioned(call: Call, tensors: tuple):
    """The primitive, which XLA's partitioner splits along batch and heads."""
    return _partitioned_by(call, _heads_of(call, tensors)[1])


@functools.lru_cache(4096)
def _partitioned_by(call: Call, group: int):
    axes, results = _axes_of(call), _result_names(call)

    def partition(mesh, operand_shapes, result_shapes):
        split = _split(call, operand_shapes, axes)
        shardings = [tuple(NamedSharding(mesh, _spec(axes[name], split)) for name in names) for names in (results, call.operands)]

        def local(*tensors):
            found = _primitive.bind(*tensors, call=call)
            if not split.get("r"):
                return tuple(found)
            return tuple(jax.lax.psum(x, split["r"]) if name in ("dk", "dv") else x for name, x in zip(results, found))

        return mesh, local, *shardings

    def rule(names):
        letters = {"h": "(g r)" if group > 1 else "g"}
        return ", ".join(" ".join(letters.get(letter, letter) for letter in axes[name]) for name in names)

    function = custom_partitioning(lambda *tensors: tuple(_primitive.bind(*tensors, call=call)))
    whole = [letter for letter in dict.fromkeys("".join(axes[name] for name in (*call.operands, *results)))   # in that order
             if letter not in "bgh"]
    function.def_partition(partition, sharding_rule=f"{rule(call.operands)} -> {rule(results)}",
                           need_replication_factors=tuple(whole), **({"r": group} if group > 1 else {}))
    return function


# ---------------------------------------------------------------------------------------------------------------- primitive

_primitive = Primitive("cuflash")
_primitive.multiple_results = True


@_primitive.def_abstract_eval
def _abstract(*avals, call: Call):
    results = jax_ffi.results_of(call, [Array(name, x.dtype.name, x.shape) for name, x in zip(call.operands, avals)])
    like = dict(zip(call.operands, avals))
    axes = _axes_of(call)
    split = _split(call, avals, axes)           # of a mesh whose axes are explicit
    return [like[name] if name in like else avals[0].update(
        shape=shape, dtype=np.dtype(jnp.dtype(dtype)), weak_type=False,
        sharding=avals[0].sharding.update(spec=_spec(axes[name], split))) for name, dtype, shape in results]


def _lower(ctx, *operands, call: Call, on_gpu: bool):
    given = [Array(name, x.dtype.name, x.shape) for name, x in zip(call.operands, ctx.avals_in)]
    jax_ffi.PLATFORMS.add("gpu" if on_gpu else "cpu")
    results = jax_ffi.results_of(call, given)
    scratch = jax_ffi.scratch_bytes(call, given) if on_gpu else 0
    avals = list(ctx.avals_out)
    if scratch:
        avals.append(avals[0].update(shape=(scratch,), dtype=np.dtype(np.uint8), sharding=avals[0].sharding.update(
            spec=PartitionSpec(None))))
    aliases = {place: len(results) - 2 + (name == "v_cache") for place, name in enumerate(call.operands)
               if call.appends and name in ("k_cache", "v_cache")}
    rule = jax.ffi.ffi_lowering(jax_ffi.TARGET, operand_output_aliases=aliases)
    found = rule(ctx.replace(avals_out=avals), *operands, call=jax_ffi.encode(call, given, results, scratch))
    return list(found)[:len(results)]


jax_ffi.register()
mlir.register_lowering(_primitive, functools.partial(_lower, on_gpu=False), platform="cpu")
mlir.register_lowering(_primitive, functools.partial(_lower, on_gpu=True), platform="cuda")


@atexit.register
def _finish() -> None:
    """Wait for what is queued: XLA's threads need the interpreter for it, which is about to end."""
    for platform in jax_ffi.PLATFORMS:
        try:
            devices = jax.local_devices(backend=platform)
        except RuntimeError:
            continue                        # compiled for devices that are not here
        for device in devices:
            with contextlib.suppress(Exception):        # of a call that failed, whose owner did not ask
                jax.device_put(0, device).block_until_ready()
        for x in jax.live_arrays(platform):
            with contextlib.suppress(Exception):
                x.block_until_ready()
    if jax_ffi.PLATFORMS:
        jax_ffi.wait_until_quiet()          # results may have been dropped
