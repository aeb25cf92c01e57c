"""attention_with_kvcache: few queries on a cache of keys and values, contiguous or in pages."""

from __future__ import annotations

import numbers

from . import cpu, problem
from .attention import FORWARD_OPTIONS, Operation, perform, scratch_bytes
from .launch import Prepared


def attention_with_kvcache(q, k_cache, v_cache, *, k=None, v=None, cache_seqlens=None, cache_batch_idx=None, block_table=None,
                           causal=True, window=None, softmax_scale=None, softcap=0.0, num_splits=0, return_lse=False, out=None,
                           workspace=None, validate=False):
    """Exact attention of few queries to the keys and values that a cache holds of each request, new ones appended first.

    Flash-Decoding (Dao et al. 2023): the keys of a request are parted among the GPU's blocks, and the parts are joined by their
    lse. Query heads that share a key head are computed together, so that the cache is read once.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), always with 4 axes; kinds of arrays, dtypes and strides as in `attention`.
        k_cache: (batch, max_seqlen, heads_k, head_dim), or with ``block_table`` pages (num_pages, page_size, heads_k, head_dim),
            page_size 1 or more; heads_q is a multiple of heads_k. Any strides with a last one of 1.
        v_cache: the same of the values, of head_dim_v. head_dim is 1 to 576 here, head_dim_v 1 to 512. It may be
            ``k_cache[..., :head_dim_v]``, as in multi-head latent attention: it is then read once.
        k, v: None, or (batch, seqlen_new, heads_k, head_dim) and (.., head_dim_v): keys and values that are written into the
            caches, behind those that are there, and are attended to like them. If v_cache is the first columns of k_cache, v must
            be ``k[..., :head_dim_v]``. They share no memory with the caches, nor do k_cache and v_cache otherwise. Not for JAX,
            whose arrays are immutable.
        cache_seqlens: how many keys each request has in the cache before the call: (batch,) int32 or int64, contiguous, on the
            device of q; an integer, the same for all; or None: as many as there is room for, which is not for k and v.
        cache_batch_idx: None or (batch,) int32 or int64: which of the cache's first axis is a request's, which may then be longer
            or shorter than the batch. With k and v none may be named twice. Not with ``block_table``.
        block_table: None or (batch, max_pages) int32, on the device of q, its last axis contiguous: the pages that hold the keys
            of each request, in order; requests may share them. What stands behind a request's last page is never read.
        causal, window: as in `attention`, counted from the bottom right of the keys of each request, new ones included: with
            ``causal`` the last query sees all of them. Causal is the default here.
        softmax_scale, softcap, return_lse: as in `attention`.
        num_splits: 0: all key tiles of the call are shared out evenly, whatever request they belong to. 1 to 4096: the keys of
            each request are parted into so many, by its own length alone: its result then has the same bits whatever else is in
            the batch. With 1 nothing is parted, and there is no scratch. The results of all are right, within rounding.
        out: array to write the result into, as in `attention`; it shares no memory with the caches either.
        workspace: scratch memory to use: a contiguous uint8 array with 1 axis on the device of q, aligned to 16 bytes, of
            `kvcache_workspace_bytes` or more, whatever it holds; one at a time may use it. With it and ``out`` a call allocates
            nothing but lse, if asked for. Not for JAX.
        validate: read lengths, indices and pages and raise if they do not describe the caches, or leave no room for k and v. On a
            GPU they are copied to the host for it, which waits for all that is queued. On the CPU they are always read.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), in q's dtype and framework, on its device; with ``return_lse`` (out, lse),
        lse (batch, heads_q, seqlen_q) float32 (float64 for float64 inputs). A query that sees no key has out 0 and lse -inf. What
        the cache holds behind a request's keys, and what is masked, has no influence, NaN and Inf included.

    On a GPU the work is queued on the framework's current stream as in `attention`, nothing is copied to the host and nothing
    waits: a CUDA graph captures the call once one such call has been made, and takes whatever lengths, indices and pages stand
    in the same arrays when it is replayed. They are cut to what exists, so that wrong ones give wrong results but never lead
    outside of the caches: tokens of k and v for which there is no room are dropped. An integer as cache_seqlens is checked on the
    host, needs no other kernel when it changes, and stays what it was in a graph. Sums are float32 (float64 for float64).

    Memory: out, lse if asked for, and unless ``num_splits`` is 1 scratch of ``4 * parts * rows * (padded_head_dim_v + 1)``
    bytes (8 for float64) for the results of parts: rows is 1 to 64, up to ``seqlen_q * heads_q / heads_k`` in a power of 2 or
    16, 32 or 64; padded_head_dim_v is head_dim_v in whole groups of 32, or up to 128 more above 64; there are 2 parts for each
    block of the launch, of which a multiprocessor has 1 to 4; latent attention on Hopper takes 40 bytes more a block. With
    ``num_splits`` above 1 there are ``num_splits * batch * heads_k * row_tiles``, row_tiles being ``seqlen_q * heads_q /
    heads_k / rows`` rounded up. On the CPU tiles of a fixed size, and the keys and values of one request where they lie in
    pages.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, says what came and what is allowed.
        NotImplementedError, RuntimeError: as `attention`.
    """
    lengths, number = _lengths(cache_seqlens, q)
    return perform(_DECODE, (q, k_cache, v_cache, k, v, lengths, cache_batch_idx, block_table, workspace, out),
                   (causal, window, softmax_scale, softcap, return_lse, num_splits), validate, number)


def kvcache_workspace_bytes(q, k_cache, v_cache, *, k=None, v=None, cache_seqlens=None, cache_batch_idx=None, block_table=None,
                            causal=True, window=None, softmax_scale=None, softcap=0.0, num_splits=0, return_lse=False, out=None
                            ) -> int:
    """The bytes of the workspace of `attention_with_kvcache` with the same arrays and options; 0 on the CPU.

    They depend on shapes, dtypes and options and on the GPU, not on lengths. Nothing is compiled or launched.

    Raises:
        What `attention_with_kvcache` raises.
    """
    lengths, number = _lengths(cache_seqlens, q)
    return scratch_bytes(_DECODE, (q, k_cache, v_cache, k, v, lengths, cache_batch_idx, block_table, None, out),
                         (causal, window, softmax_scale, softcap, return_lse, num_splits), number)


def _lengths(cache_seqlens, q) -> tuple:
    """(the array of lengths, the number that stands for one), either None."""
    if type(cache_seqlens) is type(q):
        return cache_seqlens, None      # the usual case: whether it is a number takes longer to find out
    return (None, cache_seqlens) if isinstance(cache_seqlens, numbers.Number) else (cache_seqlens, None)


def _run(door, call: Prepared, given, pointers, number):
    workspace, out = given[8], given[9]
    cached = problem.fixed_length(call.problem, number)
    if out is None:
        out = call.makers[0]()
    lse = call.make_lse and call.make_lse()
    if call.launch is not None:
        stream = door.stream(call.device_id)
        partial_out = partial_lse = 0
        if call.scratch_bytes:
            scratch, held = door.scratch(call.scratch_bytes, given[0], stream) if workspace is None else (pointers[8], None)
            partial_out, partial_lse = scratch, scratch + call.scratch_offsets["partial_lse"]
        q, k_cache, v_cache, k, v, lengths, index, table, *_ = pointers
        call.launch(stream, cached, q, k_cache, v_cache, door.ptr(out), 0 if lse is None else door.ptr(lse), k, v, lengths, index,
                    table, partial_out, partial_lse)
    return out if lse is None else (out, lse)


_CONTENTS = ("cache_seqlens", "cache_batch_idx", "block_table")
_COMPUTED = ("q", "k_cache", "v_cache", "k", "v", *_CONTENTS, "out")
_DECODE = Operation(
    "attention_with_kvcache", ("q", "k_cache", "v_cache", "k", "v", *_CONTENTS, "workspace", "out"),
    (*FORWARD_OPTIONS, "num_splits"),
    ("k", "v", *_CONTENTS, "workspace", "out"), ("out",), problem.check_attention_with_kvcache, _run,
    lambda stated, x: cpu.attention_with_kvcache(stated, *(x[name] for name in _COMPUTED)),
    _CONTENTS, lambda stated, x: problem.check_cache_lengths(stated, *(x[name] for name in _CONTENTS)),
    number="cache_seqlens", starts=lambda pointers: (pointers[1] == pointers[2], pointers[3] == pointers[4]),
    only_mutable=("k", "v", "workspace"))
