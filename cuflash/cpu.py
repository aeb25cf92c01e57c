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

The backward
------------
``backward`` walks the same way and computes the weights of a tile again, from the logits and lse. With the
row sums ``delta = sum(dout * out) - dlse``::

    p  = exp(s - lse)
    ds = p * (dout @ v.T - delta)            # times 1 - tanh^2 with a softcap
    dv += p.T @ dout
    dk += ds.T @ (scale * q)
    dq += scale * ds @ k

* p and ds of hidden pairs, and of rows whose lse is -inf, are replaced by 0, whatever they were. A query,
  dout or key that is not finite would still give ``0 * nan``, so masked tiles that have one add it apart.
* dk and dv of a head are summed over its group in one product, in the order of the tiles: no bit depends on
  other heads, on the batch, or on how the arrays are laid out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .problem import Problem

TILE_ROWS = 1024         # queries x heads of a group; half of it where a mask leaves part of a tile unused
TILE_KEYS = 4096         # with fewer, the threads of BLAS meet more often: a wait each time, on busy cores
BACKWARD_ROWS = 1024     # the same of the backward, which makes five products of a tile
BACKWARD_KEYS = 1024     # and takes two tiles of logits at once, in a cache that the cores share
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
    queries, keys = _tile(problem, TILE_ROWS, TILE_KEYS)
    rows = queries * group
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


def backward(problem: Problem, dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray,
             lse: np.ndarray, dlse: np.ndarray | None, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> None:
    """The gradients of q, k and v, written to ``dq``, ``dk`` and ``dv``.

    q, k, v, out and lse are those of `attention` on the same problem; dout has the shape of out, dq, dk and dv
    those of q, k and v, all of ``problem.dtype`` and with any strides. lse and dlse, the gradient of lse or
    None, are (batch, heads_q, seqlen_q) in float32 (float64 for float64). The gradients share no memory with
    the rest, are written whole, and have the same bits each time.

    Dao et al. 2022, Algorithm 4, with the loops of Dao 2023, Algorithm 2, exchanged: the weights are computed
    again, tile by tile, from lse; dq of a tile of queries is summed while it walks over the keys, dk and dv in
    float32 for all keys of a head.

    Scratch, in elements of float32 (float64 for float64): at most 8 * TILE_ELEMENTS, plus twice seqlen_k *
    (head_dim + head_dim_v): K and V of one head where several query tiles read them, and their gradients.
    """
    accumulate = np.dtype("float64" if problem.dtype == "float64" else "float32")
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q):
        for gradient in (dq, dk, dv):
            gradient[...] = 0
        return

    group = problem.heads_q // problem.heads_k
    dims = problem.head_dim + problem.head_dim_v
    queries, keys = _tile(problem, BACKWARD_ROWS, BACKWARD_KEYS)
    rows = queries * group
    at_once = max(1, min(HEADS_ELEMENTS // (rows * max(keys, dims)), TILE_ELEMENTS // (problem.seqlen_k * dims)))
    convert = queries < problem.seqlen_q and not (_is_operand(k, accumulate) and _is_operand(v, accumulate))
    heads = min(problem.heads_k, at_once)
    batches = min(problem.batch, max(1, at_once // problem.heads_k))
    buffers = np.empty((2, batches * heads * rows * keys), accumulate)

    with np.errstate(all="ignore"):
        for b in _slices(problem.batch, batches):
            for h in _slices(problem.heads_k, heads):
                k_heads, v_heads = k[b, :, h].swapaxes(1, 2), v[b, :, h].swapaxes(1, 2)
                if convert:
                    k_heads, v_heads = _operand(k_heads, accumulate), _operand(v_heads, accumulate)
                dk_heads, dv_heads = np.zeros(k_heads.shape, accumulate), np.zeros(v_heads.shape, accumulate)
                q_heads = slice(h.start * group, h.stop * group)
                for i in _slices(problem.seqlen_q, queries):
                    q_rows, dout_rows = (_rows(x[b, i, q_heads], group, accumulate) for x in (q, dout))
                    lse_rows = _rows(lse[b, q_heads, i, None].swapaxes(1, 2), group, accumulate)
                    delta = _rows(out[b, i, q_heads], group, accumulate)
                    delta *= dout_rows
                    delta = delta.sum(axis=-1, keepdims=True)
                    if dlse is not None:
                        delta -= _rows(dlse[b, q_heads, i, None].swapaxes(1, 2), group, accumulate)
                    dq_rows = _pull(problem, i, q_rows, dout_rows, lse_rows, delta, k_heads, v_heads,
                                    dk_heads, dv_heads, keys, buffers)
                    dq[b, i, q_heads] = _unrows(dq_rows, group)
                dk[b, :, h], dv[b, :, h] = dk_heads.swapaxes(1, 2), dv_heads.swapaxes(1, 2)


def attention_varlen(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_seqlens_q: np.ndarray,
                     cu_seqlens_k: np.ndarray, seqused_q: np.ndarray | None, seqused_k: np.ndarray | None,
                     out: np.ndarray) -> np.ndarray | None:
    """`attention` of each sequence of a packed batch, written to ``out``.

    q is (total_q, heads_q, head_dim), k (total_k, heads_k, head_dim), v (total_k, heads_k, head_dim_v) and out
    (total_q, heads_q, head_dim_v); ``problem.batch`` is the number of sequences, ``problem.seqlen_q`` total_q and
    ``problem.seqlen_k`` total_k. Sequence n has the rows from cu_seqlens_q[n] to cu_seqlens_q[n + 1] of q, and
    likewise of k and v; where seqused_q and seqused_k (batch,) are given, the first so many of them. The mask
    counts these lengths. The four are arrays of integers that describe the tensors: not checked here.

    Returns lse (heads_q, total_q), or None unless ``problem.return_lse``. Rows of no sequence get 0, and -inf in
    lse. A sequence has the same bits as by itself in `attention`.

    Scratch: that of `attention` for the longest sequence, and HEADS_ELEMENTS of each of its arrays, since short
    sequences of equal lengths are gathered.
    """
    accumulate = np.dtype("float64" if problem.dtype == "float64" else "float32")
    out[...] = 0
    lse = np.full((problem.heads_q, problem.seqlen_q), -np.inf, accumulate) if problem.return_lse else None
    for dense, rows, keys in _sequences(problem, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        result = out[rows] if isinstance(rows, tuple) else np.empty((*rows.shape, *out.shape[1:]), out.dtype)
        of_rows = attention(dense, q[rows], k[keys], v[keys], result)
        if not isinstance(rows, tuple):
            out[rows] = result
        if lse is not None:
            lse[_of_heads(rows)] = of_rows.swapaxes(0, 1)
    return lse


def backward_varlen(problem: Problem, dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
                    out: np.ndarray, lse: np.ndarray, cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray,
                    seqused_q: np.ndarray | None, seqused_k: np.ndarray | None, dlse: np.ndarray | None,
                    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> None:
    """`backward` of each sequence of a packed batch, written to ``dq``, ``dk`` and ``dv``.

    The batch is laid out as in `attention_varlen`, with dout and dlse like its out and lse. Rows of no sequence
    get 0. Scratch and bits: as there.
    """
    gradients = dq, dk, dv
    for gradient in gradients:
        gradient[...] = 0
    for dense, rows, keys in _sequences(problem, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        of_rows = [x if x is None else x[_of_heads(rows)].swapaxes(0, 1) for x in (lse, dlse)]
        places = rows, keys, keys
        if isinstance(rows, tuple):
            results = [gradient[place] for gradient, place in zip(gradients, places)]
        else:
            results = [np.empty((*place.shape, *gradient.shape[1:]), gradient.dtype)
                       for gradient, place in zip(gradients, places)]
        backward(dense, dout[rows], q[rows], k[keys], v[keys], out[rows], *of_rows, *results)
        if not isinstance(rows, tuple):
            for gradient, place, result in zip(gradients, places, results):
                gradient[place] = result


def attention_with_kvcache(problem: Problem, q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray,
                           k: np.ndarray | None, v: np.ndarray | None, cache_seqlens: np.ndarray | int | None,
                           cache_batch_idx: np.ndarray | None, block_table: np.ndarray | None,
                           out: np.ndarray) -> np.ndarray | None:
    """`attention` of each request on its keys in the caches, written to ``out``; k and v go into them first.

    q is (batch, seqlen_q, heads_q, head_dim) and out (batch, seqlen_q, heads_q, head_dim_v). k_cache and v_cache
    are (cache_batch, max_seqlen, heads_k, dim), where request b has row cache_batch_idx[b], by default b; or, with
    block_table (batch, max_pages), pages (num_pages, page_size, heads_k, dim). cache_seqlens says how many keys a
    request has there, None that all is full; k and v (batch, seqlen_new, heads_k, dim) are written behind them.
    The mask counts the keys of each request. Lengths and the table, as far as it is read, are in range and leave
    room for k and v: not checked here.

    Returns lse (batch, heads_q, seqlen_q), or None unless ``problem.return_lse``. A request has the same bits
    whatever else is in the batch.

    Scratch: that of `attention`, and a copy of the keys and values of one request where they lie in pages.
    """
    accumulate = np.dtype("float64" if problem.dtype == "float64" else "float32")
    batch, rows = q.shape[0], k_cache.shape[1]
    cached = np.broadcast_to(np.asarray(problem.seqlen_k if cache_seqlens is None else cache_seqlens, np.int64), batch)
    if k is not None:
        # All before any is read: requests may share pages.
        for b in range(batch):
            keys = cached[b] + np.arange(k.shape[1])
            if block_table is not None:
                places = block_table[b, keys // rows], keys % rows
            else:
                places = b if cache_batch_idx is None else cache_batch_idx[b], keys
            k_cache[places], v_cache[places] = k[b], v[b]
        cached = cached + k.shape[1]

    out[...] = 0
    lse = np.full((batch, problem.heads_q, problem.seqlen_q), -np.inf, accumulate) if problem.return_lse else None
    stated = {field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)}
    for b in np.flatnonzero(cached):
        seqlen_k = int(cached[b])
        one = Problem(**stated | _sizes(problem, 1, problem.seqlen_q, seqlen_k))
        if block_table is not None:
            pages = block_table[b, :-(-seqlen_k // rows)]
            keys, values = (x[pages].reshape(1, -1, *x.shape[2:])[:, :seqlen_k] for x in (k_cache, v_cache))
        else:
            row = b if cache_batch_idx is None else cache_batch_idx[b]
            keys, values = (x[row, None, :seqlen_k] for x in (k_cache, v_cache))
        of_request = attention(one, q[b, None], keys, values, out[b, None])
        if lse is not None:
            lse[b] = of_request[0]
    return lse


def _sequences(problem: Problem, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    """The sequences of a packed batch that have queries and keys: (dense problem, rows of q, rows of k and v).

    Either a single one, whose rows are an index (None, slice) that makes a view; or several short ones of equal
    lengths, whose rows are an array (sequences, seqlen) that gathers them.
    """
    if 0 in (problem.batch, problem.heads_q):
        return
    starts, lengths = [], []
    for cu_seqlens, seqused in ((cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k)):
        cu_seqlens = np.asarray(cu_seqlens).astype(np.int64)
        length = np.diff(cu_seqlens)
        if seqused is not None:
            length = np.clip(np.asarray(seqused).astype(np.int64), 0, length)
        starts.append(cu_seqlens[:-1])
        lengths.append(length)
    wanted = np.flatnonzero((lengths[0] > 0) & (lengths[1] > 0))
    order = wanted[np.lexsort((lengths[1][wanted], lengths[0][wanted]))]       # stable: as they lie in memory
    ends = np.flatnonzero((np.diff(lengths[0][order]) != 0) | (np.diff(lengths[1][order]) != 0)) + 1
    dims = problem.head_dim + problem.head_dim_v
    for equal in np.split(order, ends) if order.size else ():
        seqlen_q, seqlen_k = (int(length[equal[0]]) for length in lengths)
        at_once = max(1, HEADS_ELEMENTS // (dims * max(seqlen_q * problem.heads_q, seqlen_k * problem.heads_k)))
        for part in _slices(equal.size, at_once):
            some = equal[part]
            if some.size == 1:
                rows, keys = ((None, slice(int(start[some[0]]), int(start[some[0]]) + seqlen))
                              for start, seqlen in zip(starts, (seqlen_q, seqlen_k)))
            else:
                rows, keys = (start[some, None] + np.arange(seqlen)
                              for start, seqlen in zip(starts, (seqlen_q, seqlen_k)))
            yield dataclasses.replace(problem, **_sizes(problem, some.size, seqlen_q, seqlen_k)), rows, keys


def _sizes(problem: Problem, batch: int, seqlen_q: int, seqlen_k: int) -> dict:
    """Fields of the problem of sequences that long, with its mask."""
    left, right = problem.window_left, problem.window_right
    return {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,     # a side that hides nothing is none:
            "window_left": None if left is None or left >= seqlen_k - 1 else left,      # it would change the tiles
            "window_right": None if right is None or right >= seqlen_q - 1 else right}


def _of_heads(rows):
    """The index of (heads, sequences, seqlen) of an array (heads, total) for what rows is of (total, ...)."""
    return (slice(None), *rows) if isinstance(rows, tuple) else (slice(None), rows)


def _tile(problem: Problem, rows: int, keys: int) -> tuple[int, int]:
    """Queries and keys of a tile of about so many rows (queries x heads of a group) and keys."""
    group = problem.heads_q // problem.heads_k
    masked = [side for side in (problem.window_left, problem.window_right) if side is not None]
    queries = min(problem.seqlen_q, max(1, rows // group // (2 if masked else 1)))
    keys = min(problem.seqlen_k, keys)
    if len(masked) == 2:
        # A tile of queries visits the keys of all their windows: the more queries, the less each one sees.
        width = sum(masked) + 1
        queries = min(queries, max(64, width // 8))
        keys = min(keys, queries + width - 1)
    dims = problem.head_dim + problem.head_dim_v
    return queries, min(keys, max(1, TILE_ELEMENTS // max(queries * group, dims)))


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
    cap = _cap_of(logits.dtype, cap)
    logits /= cap
    np.tanh(logits, out=logits)
    logits *= cap


def _softcap_slope(logits: np.ndarray, cap: float) -> np.ndarray:
    """_softcap, and the derivative of its result by what the logits were."""
    cap = _cap_of(logits.dtype, cap)
    logits /= cap
    np.tanh(logits, out=logits)
    slope = logits * logits
    np.subtract(1, slope, out=slope)
    logits *= cap
    return slope


def _cap_of(dtype: np.dtype, cap: float):
    """The cap inside the dtype: one of 1e300 must be no cap, not inf * tanh(0), and one of 1e-60 not 0 / 0."""
    limits = np.finfo(dtype)
    return dtype.type(min(max(cap, float(limits.tiny)), float(limits.max)))


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


def _pull(problem: Problem, i: slice, q, dout, lse, delta, k, v, dk, dv, tile_keys: int, buffers) -> np.ndarray:
    """Walk the queries ``i`` over the keys they see; add to their dk and dv, return dq of the queries.

    q and dout are (batch, heads_k, rows, dim) and lse and delta (batch, heads_k, rows, 1), in the dtype of
    ``buffers`` and all but lse overwritten; k, v, dk and dv are (batch, heads_k, seqlen_k, dim).
    """
    scale = q.dtype.type(problem.softmax_scale)
    q *= scale
    dead = (lse == -np.inf)[..., 0]             # rows without weights: nothing passes, whatever they hold
    some_dead = dead.any()
    if some_dead:
        q[dead], dout[dead], delta[dead] = 0, 0, 0
    lead, rows, queries = q.shape[:2], q.shape[2], i.stop - i.start
    group, heads = rows // queries, lead[0] * lead[1]
    dq = np.zeros_like(q)
    seen, by_all = _key_ranges(problem, i)
    finite = None                               # whether q and dout are, which only masked tiles ask
    for start in range(seen.start, seen.stop, tile_keys):
        j = slice(start, min(start + tile_keys, seen.stop))
        keys = j.stop - j.start
        weights, ds = (buffer[:heads * rows * keys].reshape(*lead, rows, keys) for buffer in buffers)
        k_tile = _operand(k[:, :, j], q.dtype)
        np.matmul(q, k_tile.swapaxes(-1, -2), out=weights)
        np.matmul(dout, _operand(v[:, :, j], q.dtype).swapaxes(-1, -2), out=ds)
        _gradient_step(weights.reshape(-1, keys), ds.reshape(-1, keys), lse.reshape(-1, 1), delta.reshape(-1, 1),
                       problem.softcap)
        edges = _edges(j, by_all)
        for edge in edges:
            hidden = _hidden(problem, i, np.arange(edge.start, edge.stop))[:, None, :]
            for x in (weights, ds):
                by_query = x.reshape(*lead, queries, group, keys)[..., edge.start - start:edge.stop - start]
                np.copyto(by_query, 0, where=hidden)
        if some_dead:
            weights[dead], ds[dead] = 0, 0
        if edges and finite is None:
            finite = np.isfinite(q).all() and np.isfinite(dout).all()
        weights_t, ds_t = weights.swapaxes(-1, -2), ds.swapaxes(-1, -2)
        if edges and not (finite and np.isfinite(k_tile).all()):
            hidden = np.repeat(_hidden(problem, i, np.arange(j.start, j.stop)), group, axis=0)
            dv[:, :, j] += _product_apart(weights_t, dout, hidden.T)
            dk[:, :, j] += _product_apart(ds_t, q, hidden.T)
            dq += _product_apart(ds, k_tile, hidden)
        else:
            dv[:, :, j] += np.matmul(weights_t, dout)
            dk[:, :, j] += np.matmul(ds_t, q)
            dq += np.matmul(ds, k_tile)
    dq *= scale
    if some_dead:
        dq[dead] = 0
    return dq


def _gradient_step(logits, ds, lse, delta, softcap: float) -> None:
    """Turn logits (rows, keys) into weights, and ds, which holds dout v^T, into the gradient of q k^T.

    All in place; lse and delta are (rows, 1). What is hidden comes out as anything.
    """
    for r in _slices(len(logits), max(1, CACHE_ELEMENTS // 2 // logits.shape[1])):
        weights, block = logits[r], ds[r]
        block -= delta[r]
        if softcap:
            block *= _softcap_slope(weights, softcap)
        weights -= lse[r]
        np.exp(weights, out=weights)
        block *= weights


def _product_apart(a, b, hidden) -> np.ndarray:
    """a @ b of a (batch, heads, m, n), 0 where hidden (m, n), and b (batch, heads, n, dim).

    What is not finite in a row of b reaches only the rows of a that do not hide it.
    """
    finite = np.isfinite(b)
    product = np.matmul(a, np.where(finite, b, b.dtype.type(0)))
    for x, h, n in zip(*np.nonzero(~finite.all(axis=-1))):
        sees = ~hidden[:, n]
        product[x, h, sees] += a[x, h, sees, n, None] * np.where(finite[x, h, n], b.dtype.type(0), b[x, h, n])
    return product
