"""Attention on the CPU: NumPy tiles, BLAS products, memory that never grows with seqlen_q * seqlen_k.

The recurrence
--------------
A tile of queries walks over the keys it can see, tile by tile, and keeps three numbers a row: the largest
logit so far ``m``, the sum of weights ``l`` and the weighted sum of values ``acc``, both measured from ``m``.
For the logits ``s`` and values ``v`` of the next tile of keys::

    m_new = max(m, max(s))
    p     = exp(s - m_new)
    alpha = exp(m - m_new)                   # moves what is stored from the old maximum to the new one
    l     = alpha * l   + sum(p)
    acc   = alpha * acc + p @ v
    m     = m_new

and once, after the last tile, ``out = acc / l`` and ``lse = m + log(l)``. Before the first tile m is -inf,
``l = 0`` and ``acc = 0``. This is the online softmax of Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018), with the output left unnormalised as in Dao, "FlashAttention-2" (2023).

The trap
--------
FlashAttention (Dao et al. 2022, Algorithm 1) keeps the *normalised* output ``o = acc / l`` instead, and has
to undo the old division at every step::

    o = (l * alpha * o + p @ v) / l_new      # l * o is the old acc, so this is right

A widely copied snippet mixes the two: it never divides inside the loop, and still multiplies by the old sum::

    acc = l * alpha * acc + p @ v            # WRONG: acc already holds l * o
    out = acc / l                            # (after the loop)

All tiles but the newest then weigh ``l`` times too much. With one tile of keys the result is right, and with
``l`` near 1 it is nearly right, so a small test lets it pass. ``tests/test_cpu.py`` runs both side by side.

What else holds
---------------
* ``m`` is the true maximum. Where a row has seen nothing, ``m`` is -inf and 0 is subtracted in its place, so
  that ``exp(-inf - -inf)`` never arises; a finite stand-in would lose rows whose logits lie below it.
* Only key tiles that some row of the query tile sees are visited, and only those that not all rows see in
  full are masked.
* A hidden logit is replaced by -inf, whatever it was. A hidden value would still give ``0 * nan``, so a
  masked tile with values that are not finite adds those key by key, to the rows that see them.
* The heads that share a key head are rows of one product: row ``r`` of a tile is query ``r // group``, head
  ``r % group``. Short sequences are taken several heads and batches at a time.
* float16 and bfloat16 are computed in float32 (weights included, which is more accurate than rounding them).
"""

from __future__ import annotations

import numpy as np

from .problem import Problem

TILE_ROWS = 1024         # queries x heads of a group; half of it where a mask leaves part of a tile unused
TILE_KEYS = 4096         # with fewer, the threads of BLAS meet more often: a wait each time, on busy cores
TILE_ELEMENTS = 2**22    # the logits of a tile, and its K and V: 16 MiB of float32 each
HEADS_ELEMENTS = 2**20   # the logits of small tiles of several heads taken at once: 4 MiB, a shared cache
CACHE_ELEMENTS = 2**17   # the logits that the softmax makes its passes over at a time: 512 KiB, a core's own


def attention(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray,
              out: np.ndarray) -> np.ndarray | None:
    """Attention of a checked problem, written to ``out``.

    q is (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim), v (batch, seqlen_k,
    heads_k, head_dim_v) and out (batch, seqlen_q, heads_q, head_dim_v), all of ``problem.dtype`` (bfloat16 is
    that of ml_dtypes) and with any strides; ``out`` shares no memory with the others and is written whole.

    Returns the natural logarithm of each row's sum of exponentials, (batch, heads_q, seqlen_q) in float32
    (float64 for float64), or None unless ``problem.return_lse``.

    Scratch, in elements of float32 (float64 for float64): at most 4 * TILE_ELEMENTS, plus seqlen_k *
    (head_dim + head_dim_v), K and V of one head, where several query tiles read them and they are not packed.
    """
    accumulate = np.dtype("float64" if problem.dtype == "float64" else "float32")
    lse = None
    if problem.return_lse:
        lse = np.full((problem.batch, problem.heads_q, problem.seqlen_q), -np.inf, accumulate)
    if problem.is_empty:
        return lse
    if problem.seqlen_k == 0:
        out[...] = 0
        return lse

    group = problem.heads_q // problem.heads_k
    dims = problem.head_dim + problem.head_dim_v
    masked = [side for side in (problem.window_left, problem.window_right) if side is not None]
    queries = min(problem.seqlen_q, max(1, TILE_ROWS // group // (2 if masked else 1)))
    keys = min(problem.seqlen_k, TILE_KEYS)
    if len(masked) == 2:
        # A tile of queries visits the keys of all their windows: the more queries, the less each one sees.
        width = sum(masked) + 1
        queries = min(queries, max(64, width // 8))
        keys = min(keys, queries + width - 1)
    rows = queries * group
    keys = min(keys, max(1, TILE_ELEMENTS // max(rows, dims)))
    at_once = max(1, min(HEADS_ELEMENTS // (rows * max(keys, dims)), TILE_ELEMENTS // (keys * dims)))
    # With one query tile, K and V are read once and converted tile by tile; with several, all at once before.
    convert = queries < problem.seqlen_q and not (_is_operand(k, accumulate) and _is_operand(v, accumulate))
    if convert:
        at_once = min(at_once, max(1, TILE_ELEMENTS // (problem.seqlen_k * dims)))
    heads = min(problem.heads_k, at_once)
    batches = min(problem.batch, max(1, at_once // problem.heads_k))
    buffer = np.empty(batches * heads * rows * keys, accumulate)

    with np.errstate(all="ignore"):          # inf and nan are results here, not accidents
        for b in _slices(problem.batch, batches):
            for h in _slices(problem.heads_k, heads):
                k_heads, v_heads = k[b, :, h].swapaxes(1, 2), v[b, :, h].swapaxes(1, 2)
                if convert:
                    k_heads, v_heads = _operand(k_heads, accumulate), _operand(v_heads, accumulate)
                q_heads = slice(h.start * group, h.stop * group)
                for i in _slices(problem.seqlen_q, queries):
                    q_rows = _rows(q[b, i, q_heads], group, accumulate)
                    acc, row_max, row_sum = _attend(problem, i, q_rows, k_heads, v_heads, keys, buffer)
                    acc /= row_sum
                    np.copyto(acc, 0, where=row_sum == 0)       # nothing seen, or nothing but logits of -inf
                    out[b, i, q_heads] = _unrows(acc, group)
                    if lse is not None:
                        np.log(row_sum, out=row_sum)
                        row_sum += row_max
                        lse[b, q_heads, i] = _unrows(row_sum, group)[..., 0].swapaxes(1, 2)
    return lse


def _slices(length: int, step: int):
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _is_operand(x: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the matrices (seqlen, dim) of x (batch, seqlen, heads, dim) are packed.

    BLAS would read others too, but some versions round differently then, and no result may depend on strides.
    """
    return x.dtype == dtype and x.strides[3] == x.itemsize and x.strides[1] == x.shape[3] * x.itemsize


def _operand(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x (batch, heads, seqlen, dim), or a copy of it, with packed matrices."""
    if _is_operand(x.swapaxes(1, 2), dtype):
        return x
    return x.astype(dtype, order="C")


def _rows(q: np.ndarray, group: int, dtype: np.dtype) -> np.ndarray:
    """(batch, queries, heads_q, dim) -> a copy (batch, heads_k, queries * group, dim)."""
    batch, queries, heads_q, dim = q.shape
    q = q.reshape(batch, queries, heads_q // group, group, dim).transpose(0, 2, 1, 3, 4)
    return q.astype(dtype, order="C").reshape(batch, heads_q // group, queries * group, dim)


def _unrows(rows: np.ndarray, group: int) -> np.ndarray:
    """(batch, heads_k, queries * group, dim) -> (batch, queries, heads_q, dim)."""
    batch, heads_k, length, dim = rows.shape
    rows = rows.reshape(batch, heads_k, length // group, group, dim).transpose(0, 2, 1, 3, 4)
    return rows.reshape(batch, length // group, heads_k * group, dim)


def _attend(problem: Problem, i: slice, q, k, v, tile_keys: int, buffer):
    """Walk the queries ``i`` over the keys they see.

    q is (batch, heads_k, rows, head_dim) in the dtype of ``buffer`` and is overwritten; k and v are (batch,
    heads_k, seqlen_k, dim). Returns acc (batch, heads_k, rows, head_dim_v) and the rows' maximum and sum,
    (batch, heads_k, rows, 1).
    """
    q *= q.dtype.type(problem.softmax_scale)
    lead, rows, queries = q.shape[:2], q.shape[2], i.stop - i.start
    acc = np.zeros((*lead, rows, v.shape[-1]), q.dtype)
    product = np.empty_like(acc)
    row_sum = np.zeros((lead[0] * lead[1] * rows, 1), q.dtype)
    row_max = np.full_like(row_sum, -np.inf)
    seen, by_all = _key_ranges(problem, i)
    for start in range(seen.start, seen.stop, tile_keys):
        j = slice(start, min(start + tile_keys, seen.stop))
        keys = j.stop - j.start
        logits = buffer[:lead[0] * lead[1] * rows * keys].reshape(*lead, rows, keys)
        np.matmul(q, _operand(k[:, :, j], q.dtype).swapaxes(-1, -2), out=logits)
        if problem.softcap:
            _softcap(logits, problem.softcap)
        edges = _edges(j, by_all)
        for edge in edges:
            hidden = _hidden(problem, i, np.arange(edge.start, edge.stop))
            by_query = logits.reshape(*lead, queries, -1, keys)[..., edge.start - start:edge.stop - start]
            np.copyto(by_query, -np.inf, where=hidden[:, None, :])
        acc *= _softmax_step(logits.reshape(-1, keys), row_max, row_sum).reshape(*lead, rows, 1)
        values = _operand(v[:, :, j], q.dtype)
        bad = [key for edge in edges for key in _not_finite(values, edge.start - start, edge.stop - start)]
        if bad:
            hidden = _hidden(problem, i, start + np.array(bad))
            acc += _weighted_apart(logits, values, bad, hidden, product)
        else:
            acc += np.matmul(logits, values, out=product)
    shape = (*lead, rows, 1)
    return acc, row_max.reshape(shape), row_sum.reshape(shape)


def _softmax_step(logits, row_max, row_sum) -> np.ndarray:
    """Turn logits (rows, keys) into weights, update row_max and row_sum (rows, 1); all in place.

    Returns alpha (rows, 1), which scales what was summed with the old maximum.
    """
    alpha = np.empty_like(row_max)
    for r in _slices(len(logits), max(1, CACHE_ELEMENTS // logits.shape[1])):
        block = logits[r]
        new_max = np.maximum(row_max[r], block.max(axis=1, keepdims=True))
        base = np.where(new_max == -np.inf, block.dtype.type(0), new_max)
        block -= base
        np.exp(block, out=block)
        alpha[r] = np.exp(row_max[r] - base)
        row_max[r] = new_max
        row_sum[r] = alpha[r] * row_sum[r] + block.sum(axis=1, keepdims=True)
    return alpha


def _key_ranges(problem: Problem, i: slice) -> tuple[slice, slice]:
    """The keys that some query of ``i`` sees, and those that all of them see (none where start >= stop)."""
    shift, seqlen_k = problem.seqlen_k - problem.seqlen_q, problem.seqlen_k
    first, last = i.start + shift, i.stop - 1 + shift
    left, right = problem.window_left, problem.window_right
    if left is None:
        starts = 0, 0
    else:
        starts = max(0, first - left), last - left
    if right is None:
        stops = seqlen_k, seqlen_k
    else:
        stops = min(seqlen_k, last + right + 1), first + right + 1
    return slice(starts[0], stops[0]), slice(starts[1], stops[1])


def _edges(j: slice, by_all: slice) -> list[slice]:
    """The parts of the key tile ``j`` that not all queries see."""
    left = slice(j.start, max(j.start, min(j.stop, by_all.start)))
    right = slice(max(left.stop, by_all.stop), j.stop)
    return [edge for edge in (left, right) if edge.start < edge.stop]


def _hidden(problem: Problem, i: slice, keys: np.ndarray) -> np.ndarray:
    """(queries, keys) of bool: True where a query of ``i`` does not see the key."""
    shift = problem.seqlen_k - problem.seqlen_q
    diagonal = np.arange(i.start + shift, i.stop + shift)[:, None]
    hidden = np.zeros((diagonal.size, keys.size), bool)
    if problem.window_left is not None:
        hidden |= keys < diagonal - problem.window_left
    if problem.window_right is not None:
        hidden |= keys > diagonal + problem.window_right
    return hidden


def _softcap(logits: np.ndarray, cap: float) -> None:
    # Kept inside the dtype: a cap of 1e300 must be no cap, not inf * tanh(0), and one of 1e-60 not 0 / 0.
    limits = np.finfo(logits.dtype)
    cap = logits.dtype.type(min(max(cap, float(limits.tiny)), float(limits.max)))
    logits /= cap
    np.tanh(logits, out=logits)
    logits *= cap


def _not_finite(v: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The keys from start to stop whose values v (batch, heads, keys, dim) are not all finite."""
    return start + np.flatnonzero(~np.isfinite(v[:, :, start:stop]).all(axis=(0, 1, 3)))


def _weighted_apart(weights, v, keys, hidden, product) -> np.ndarray:
    """weights @ v, in ``product``; what is not finite in v[:, :, keys] reaches only the queries that see it.

    hidden is (queries, keys); the rows of weights are queries x heads of a group.
    """
    values = v[:, :, keys]
    finite = np.isfinite(values)
    v = v.copy()
    v[:, :, keys] = np.where(finite, values, 0)
    np.matmul(weights, v, out=product)
    by_query = product.reshape(*product.shape[:2], len(hidden), -1, product.shape[3])
    weights = weights.reshape(*by_query.shape[:4], -1)
    rest = np.where(finite, 0, values)
    for n, key in enumerate(keys):
        sees = ~hidden[:, n]
        by_query[:, :, sees] += weights[..., key, None][:, :, sees] * rest[:, :, None, None, n]
    return product
