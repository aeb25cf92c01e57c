"""Decoding on every backend: lengths, pages, appending, splits, and that nothing outside of the caches is touched."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    BAND,
    DTYPES,
    EDGES,
    FEW,
    MARKS,
    PLAIN,
    POISON,
    TIERS,
    Layout,
    Placed,
    PlacedDecoding,
    assert_right_kvcache,
    assert_same,
    backend_named,
    check_kvcache,
    compute_kvcache,
    decoding,
    fitting,
    fresh_process_state,
    judge_of,
    normal,
    on,
    on_pairs,
    place,
    spin,
)
from test_interop import device_of, forced, from_torch, on_device, to_torch
from test_layout import needs_memory

import cuflash
from cuflash import config, jit, oracle

# decode_sm90 is for multi-head latent attention: values that are the first columns of the keys. decode_rows_sm90, here the
# backend sm90_rows, is for more than 32 query rows a key head.
LATENT = dict(heads_q=16, heads_k=1, head_dim=576, head_dim_v=512, values_are_keys=True)
SOME = ("cpu-float32", "simt-float32", "sm80-float16", "sm80-bfloat16", "sm90-bfloat16", "sm90_rows-bfloat16")
ON_GPU = ("simt-float32", "sm80-float16", "sm90-bfloat16", "sm90_rows-float16")
EVERY = (*FEW, "sm90_rows-float16", "sm90_rows-bfloat16")


def draw(backend, dtype, lengths, **sizes):
    """A call of sizes that the backend's kernel takes."""
    if backend.name == "sm90":
        sizes |= LATENT
    elif backend.name == "sm90_rows":
        sizes |= many_heads(**sizes)
    return decoding(dtype, lengths, **sizes)


def many_heads(seqlen_q=1, heads_q=4, heads_k=2, **_):
    """As many times the query heads as make more than 32 rows of a key head."""
    if seqlen_q == 0 or heads_q == 0:
        pytest.skip("another kernel's")
    return dict(heads_q=heads_q * -(-33 // (seqlen_q * heads_q // heads_k)))


def wide(call):
    """The same call with lengths and indices of 64 bits."""
    names = ("cache_seqlens", "cache_batch_idx")
    return dataclasses.replace(call, **{name: x.astype("int64") for name in names if (x := getattr(call, name)) is not None})


# name -> (lengths in the cache, sizes, options). What of a cache is not a request's is NaN.
CASES = {
    "one request": ((130,), {}, {}),
    "one query each": ((300, 1, 65), {}, {}),
    "at tile edges": (EDGES, dict(heads_q=2, heads_k=1), {}),
    "skewed": ((3000, 0, 1, 64, 65, 700, 3), {}, {}),
    "one long behind many": ((*range(40), 700), {}, {}),
    "lengths of 0": ((0, 5, 0, 1), dict(seqlen_q=2), {}),
    "no keys at all": ((0, 0), {}, {}),
    "full": ((128, 128), dict(capacity=128), {}),
    "5 queries": ((300, 1, 65), dict(seqlen_q=5), {}),
    "17 queries": ((300, 20, 65), dict(seqlen_q=17), {}),
    "100 queries": ((300, 129, 3), dict(seqlen_q=100), {}),
    "not causal": ((300, 7), dict(seqlen_q=5), dict(causal=False)),
    "window": ((300, 20, 5), dict(seqlen_q=17), dict(window=(40, 0))),
    "window, one query": ((300, 20, 0), {}, dict(window=(40, None))),
    "window to both sides": ((300, 20, 5), dict(seqlen_q=17), dict(window=(40, 3), causal=False)),
    "softcap, scale": ((300, 20), dict(seqlen_q=5), dict(softcap=2.0, softmax_scale=0.4)),
    "scale below 0": ((300, 20), {}, dict(softmax_scale=-0.2)),
    "scale 0": ((300, 20), {}, dict(softmax_scale=0.0)),
    "pages of 16": ((300, 1, 0, 65), dict(page_size=16), {}),
    "pages of 1": ((100, 1, 0, 65), dict(page_size=1), {}),
    "pages, 5 queries": ((300, 3, 65), dict(page_size=16, seqlen_q=5), {}),
    "a page for all": ((300, 1, 65), dict(page_size=512), {}),
    "shared pages": ((300, 70, 65), dict(page_size=16, shared=4), {}),
    "other rows": ((300, 1, 0, 65), dict(by_index=True), {}),
    "appended": ((300, 0, 63), dict(new=1), {}),
    "5 appended": ((300, 0, 63), dict(new=5, seqlen_q=5), {}),
    "more appended than asked": ((300, 0, 63), dict(new=70, seqlen_q=5), {}),
    "appended to other rows": ((300, 0, 63), dict(new=5, seqlen_q=5, by_index=True), {}),
    "appended up to the end": ((123, 3, 0), dict(new=5, seqlen_q=5, capacity=128), {}),
    "5 appended across pages": ((300, 0, 62), dict(new=5, seqlen_q=5, page_size=16), {}),
    "appended to shared pages": ((70, 64, 65), dict(new=5, seqlen_q=5, page_size=16, shared=4), {}),
    "groups of 7": ((300, 20), dict(heads_q=14, seqlen_q=5), {}),
    "groups of 1": ((300, 20), dict(heads_q=2, seqlen_q=5), {}),
    "no requests": ((), {}, {}),
    "no queries": ((20, 3), dict(seqlen_q=0, new=2), {}),
    "no heads": ((20, 3), dict(heads_q=0, heads_k=0), {}),
}


@on_pairs(*EVERY)
@pytest.mark.parametrize("case", CASES)
def test_named_case(backend, dtype, case):
    lengths, sizes, options = CASES[case]
    call = draw(backend, dtype, lengths, **sizes)
    first = check_kvcache(backend, call, **options)
    backend.wash()
    again = compute_kvcache(backend, wide(call), out=PLAIN, **options)
    assert_same(backend, again, first, "int64 lengths, into an array of ours")


@on_pairs("simt-float16", "simt-bfloat16", "cpu-float16", "cpu-bfloat16", "cpu-float64")
@pytest.mark.parametrize("case", ["one query each", "5 appended across pages", "window"])
def test_named_case_of_other_dtypes(backend, dtype, case):
    lengths, sizes, options = CASES[case]
    check_kvcache(backend, draw(backend, dtype, lengths, **sizes), **options)


# Of keys and values, where values have memory of their own.
HEAD_DIMS = ((1, 1), (8, 24), (33, 20), (65, 40), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 64), (256, 256))


@on_pairs(
    "cpu-float32", "simt-float32", "simt-float16", "sm80-float16", "sm80-bfloat16", "sm90_rows-float16", "sm90_rows-bfloat16"
)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(backend, dtype, dims):
    for sizes in (dict(seqlen_q=2), dict(page_size=16, new=2, seqlen_q=2)):
        call = draw(backend, dtype, (130, 3), head_dim=dims[0], head_dim_v=dims[1], **sizes)
        named = {name: x for name in ("q", "k_cache", "v_cache", "k", "v") if (x := getattr(call, name)) is not None}
        layouts = dict(zip(named, fitting(backend, *named.values()), strict=True))
        check_kvcache(backend, call, layouts, out=Layout(pad=(0, 0, 0, 1)))


@on_pairs("cpu-float32", "simt-float32", "simt-float16", "simt-float64")
@pytest.mark.parametrize("dims", [(300, 1), (576, 512), (1, 512)], ids=str)
def test_wide_head_dims(backend, dtype, dims):
    check_kvcache(backend, decoding(dtype, (130, 3), head_dim=dims[0], head_dim_v=dims[1], seqlen_q=2, new=2))


@on_pairs("cpu-float32", "simt-float32", "simt-float16", "sm80-float16", "sm90-float16", "sm90-bfloat16", "sm90_rows-bfloat16")
@pytest.mark.parametrize("dims", [(576, 512), (512, 512), (264, 264), (320, 296), (128, 64), (128, 128)], ids=str)
def test_values_that_are_keys(backend, dtype, dims):
    """The first columns of keys, or all of them; appended once."""
    if backend.name == "sm90" and min(dims) <= 256 or backend.name in ("sm80", "sm90_rows") and max(dims) > 256:
        pytest.skip("another kernel's")
    seqlen_q = 3 if backend.name == "sm90_rows" else 2
    sizes = dict(heads_q=16, heads_k=1, head_dim=dims[0], head_dim_v=dims[1], values_are_keys=True, seqlen_q=seqlen_q)
    for more in ({}, dict(page_size=64, new=2)):
        check_kvcache(backend, decoding(dtype, (130, 0, 70), **sizes, **more))


@on_pairs("cpu-float32", "simt-float32", "sm90-bfloat16")
@pytest.mark.parametrize("heads, seqlen_q", [(128, 1), (16, 4), (1, 1), (65, 2)])
def test_latent_heads(backend, dtype, heads, seqlen_q):
    """As many as a model has, or few of them."""
    sizes = LATENT | dict(heads_q=heads)
    check_kvcache(backend, decoding(dtype, (300, 65, 0), seqlen_q=seqlen_q, page_size=64, **sizes))


# ------------------------------------------------------------------------------------------------------------
# Splits


@on_pairs(*SOME)
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 130, 4096])
def test_any_number_of_splits(backend, dtype, seqlen_k, seqlen_q):
    """More than there are tiles, too: the empty ones do not matter."""
    call = draw(backend, dtype, (seqlen_k, seqlen_k // 2), seqlen_q=seqlen_q)
    judge = judge_of(call)
    for num_splits in (0, 1, 2, 3, 7, 64, 1000):
        result = compute_kvcache(backend, call, num_splits=num_splits)
        assert_right_kvcache(*result, call, num_splits=num_splits, judge=judge)


@on_pairs("cpu-float32", "simt-float32", "sm80-bfloat16")
def test_many_splits_of_a_long_sequence(backend, dtype):
    call = decoding(dtype, (4096,), heads_q=16, heads_k=8, head_dim=128)
    judge = judge_of(call)
    for num_splits in (1, 16, 32, 128):
        result = compute_kvcache(backend, call, num_splits=num_splits)
        assert_right_kvcache(*result, call, num_splits=num_splits, judge=judge)


@on_pairs(*SOME)
@pytest.mark.parametrize("sizes", [{}, dict(page_size=16), dict(seqlen_q=5, new=5)], ids=str)
def test_splits_of_requests_without_keys(backend, dtype, sizes):
    call = draw(backend, dtype, (0, 5, 0, 1), **sizes)
    judge = judge_of(call)
    for num_splits in range(9):
        out, lse = compute_kvcache(backend, call, num_splits=num_splits)
        assert_right_kvcache(out, lse, call, num_splits=num_splits, judge=judge)
        if "new" not in sizes:
            assert (out[::2] == 0).all() and (lse[::2] == -np.inf).all()


@on_pairs(*EVERY)
@pytest.mark.parametrize("num_splits", [1, 7])
@pytest.mark.parametrize("sizes", [{}, dict(page_size=16), dict(seqlen_q=5, new=5)], ids=str)
def test_a_fixed_number_of_splits_gives_a_request_its_bits(backend, dtype, num_splits, sizes):
    """Alone, in the batch and in the batch turned round: what else there is changes nothing."""
    call = draw(backend, dtype, (300, 1, 65, 1000, 64, 17), **sizes)
    out, lse = check_kvcache(backend, call, num_splits=num_splits)
    for requests in ([0], [1], [3], [5], [5, 4, 3, 2, 1, 0], [3, 0]):
        some = compute_kvcache(backend, call.only(requests), num_splits=num_splits)
        assert_same(backend, some, (out[requests], lse[requests]), f"requests {requests}")


@on_pairs(*SOME)
def test_shares_of_any_batch_are_right(backend, dtype):
    """num_splits=0: bits may depend on the batch, by no more than rounding."""
    call = draw(backend, dtype, (300, 1, 65, 1000, 64, 17, *range(1, 2000, 160)))
    out, lse = check_kvcache(backend, call)
    alone, alone_lse = check_kvcache(backend, call.only([0]))
    np.testing.assert_allclose(alone_lse, lse[:1], rtol=1e-5, atol=1e-5)
    tolerance = 4 * float(oracle.ROUNDOFF[dtype] + 1e-6)
    np.testing.assert_allclose(alone.astype(float), out[:1].astype(float), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------
# Many requests


def plain_attention(call):
    """(out, lse) of one query each on rows of a cache, of all requests at once, in float64."""
    lengths = np.array([call.cached(b) for b in range(call.batch)])
    group = call.q.shape[2] // call.k_cache.shape[2]
    q = call.q[:, 0].astype(np.float64)
    seen = np.arange(call.k_cache.shape[1]) < lengths[:, None]
    k, v = (np.where(seen[..., None, None], x.astype(np.float64), 0) for x in (call.k_cache, call.v_cache))
    logits = np.einsum("bhd,bkhd->bhk", q, np.repeat(k, group, axis=2)) * q.shape[2] ** -0.5
    weights = np.exp(logits) * seen[:, None]
    sums = weights.sum(axis=2)
    with np.errstate(divide="ignore"):
        lse = np.log(sums)
    out = np.einsum("bhk,bkhd->bhd", weights, np.repeat(v, group, axis=2)) / np.where(sums == 0, 1, sums)[..., None]
    return out[:, None], lse[..., None]


@on_pairs(*SOME)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_more_requests_than_blocks(backend, dtype, num_splits):
    """1000 of 0 to 40 keys: many to a block, and the judge looks closely at some."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, 41, 1000)
    lengths[::11] = 0
    call = draw(backend, dtype, lengths, heads_q=8, heads_k=2, head_dim=32)
    out, lse = compute_kvcache(backend, call, num_splits=num_splits)
    expected, expected_lse = plain_attention(call)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.astype(float), expected, rtol=0.03, atol=0.03)
    assert (out[::11] == 0).all()
    some = [0, 1, 2, 31, 32, 33, 500, 968, 998, 999]
    assert_right_kvcache(out[some], lse[some], call.only(some), num_splits=num_splits)


@on_pairs(*ON_GPU)
def test_more_requests_than_65535(backend, dtype):
    """One key each: its value comes back."""
    sizes = LATENT | dict(heads_q=1) if backend.name == "sm90" else dict(heads_q=2, heads_k=1, head_dim=8)
    if backend.name == "sm90_rows":
        sizes |= many_heads(**sizes)
    # The same few cache rows for all, in turn.
    call = decoding(dtype, (1,) * 7, capacity=1, **sizes)
    count = 66_000
    index = (np.arange(count) % 7).astype(np.int32)
    call = dataclasses.replace(
        call,
        q=normal((count, *call.q.shape[1:]), dtype, 1),
        cache_seqlens=np.ones(count, np.int32),
        cache_batch_idx=index,
    )
    for num_splits in (0, 1):
        out, _ = compute_kvcache(backend, call, num_splits=num_splits)
        assert (out[:, 0] == call.v_cache[index, 0]).all()


@on_pairs(*ON_GPU)
@pytest.mark.parametrize("sizes", [{}, dict(page_size=16)], ids=str)
def test_one_long_sequence(backend, dtype, sizes):
    sizes |= dict(heads_q=2, heads_k=1)
    if backend.name == "sm90":
        sizes = LATENT | sizes
    elif backend.name == "sm90_rows":
        sizes |= many_heads(**sizes)
    check_kvcache(backend, decoding(dtype, (30_000,), **sizes))


# ------------------------------------------------------------------------------------------------------------
# Groups of heads


@on_pairs(*SOME)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 12, 13, 16])
def test_groups(backend, dtype, group):
    """A value of its own for each key head shows which one a query head read."""
    heads_k = 3
    sizes = dict(heads_q=group * heads_k, heads_k=heads_k)
    if backend.name == "sm90":
        sizes = LATENT | sizes
    for seqlen_q in (1, 2, 4) if backend.name != "sm90_rows" else (32 // group + 1, 64 // group + 1, 128 // group + 1):
        lengths = (130, 0, 17)
        call = decoding(dtype, lengths, seqlen_q=seqlen_q, **sizes)
        check_kvcache(backend, call)
        call.v_cache[...] = np.arange(1, heads_k + 1)[:, None]
        out, _ = compute_kvcache(backend, call)
        expected = np.broadcast_to((np.arange(group * heads_k) // group + 1)[:, None], out.shape).copy()
        for number, length in enumerate(lengths):
            expected[number, : max(0, seqlen_q - length)] = 0  # queries before the first key
        np.testing.assert_allclose(out.astype(float), expected, rtol=2 * oracle.ROUNDOFF[dtype] + 1e-6)


# ------------------------------------------------------------------------------------------------------------
# Pages


@on_pairs(*SOME)
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 48, 64, 256, 768])
def test_page_sizes(backend, dtype, page_size):
    check_kvcache(backend, draw(backend, dtype, (300, 1, 0, page_size, 2 * page_size), page_size=page_size))


@on_pairs(*SOME)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_where_pages_lie_changes_no_bit(backend, dtype, page_size):
    """In random order, as they come, the other way round, and shared by requests with the same first keys."""
    call = draw(backend, dtype, (300, 1, 65), page_size=page_size)
    expected = check_kvcache(backend, call)
    needed = [-(-length // page_size) for length in (300, 1, 65)]
    used = np.concatenate([call.block_table[b, :n] for b, n in enumerate(needed)])
    for order in (np.arange(len(used)), np.arange(len(used))[::-1]):
        moved = dataclasses.replace(call, block_table=call.block_table.copy())
        caches = [np.full_like(x, np.nan) for x in (call.k_cache, call.v_cache)]
        for cache, before in zip(caches, (call.k_cache, call.v_cache), strict=True):
            cache[order] = before[used]
        moved = dataclasses.replace(moved, k_cache=caches[0], v_cache=caches[1])
        if call.values_are_keys:
            moved = dataclasses.replace(moved, v_cache=caches[0][..., : call.v_cache.shape[3]])
        places = iter(order)
        for b, n in enumerate(needed):
            moved.block_table[b, :n] = [next(places) for _ in range(n)]
        assert_same(backend, compute_kvcache(backend, moved), expected, "moved")


@on_pairs(*SOME)
def test_shared_pages_are_the_same_as_copies(backend, dtype):
    call = draw(backend, dtype, (70, 64, 65), page_size=16, shared=4, new=5, seqlen_q=5)
    expected = check_kvcache(backend, call)
    keys = [call.keys(b) for b in range(3)]
    rows = draw(backend, dtype, (70, 64, 65), capacity=call.capacity, new=5, seqlen_q=5)
    for b, (k, v) in enumerate(keys):
        length = call.cached(b)
        rows.k_cache[b, :length] = k[0, :length]
        if not call.values_are_keys:
            rows.v_cache[b, :length] = v[0, :length]
    copies = dataclasses.replace(rows, q=call.q, k=call.k, v=call.v)
    out, lse = check_kvcache(backend, copies)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)
    tolerance = 4 * float(oracle.ROUNDOFF[dtype] + 1e-6)
    np.testing.assert_allclose(out.astype(float), expected[0].astype(float), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------
# Appending. The caches afterwards, and every byte around them, are looked at in all of these.


@on_pairs(*SOME)
@pytest.mark.parametrize("page_size", [0, 3, 16])
@pytest.mark.parametrize("chunk", [1, 2, 16, 17])
def test_a_chunk_is_the_end_of_a_causal_run(backend, dtype, chunk, page_size):
    """Query t of the chunk sees 37 keys and t + 1 more, as the last rows of a run over all of them."""
    call = draw(backend, dtype, (37, 37), seqlen_q=chunk, new=chunk, page_size=page_size)
    for num_splits in (0, 1):
        out, lse = check_kvcache(backend, call, num_splits=num_splits)
        for b in range(2):
            k, v = call.keys(b)
            q = np.zeros((1, 37 + chunk, *call.q.shape[2:]), call.q.dtype)
            q[:, 37:] = call.q[b]
            rows, rows_lse = oracle.attention(q, k, v, causal=True)
            tolerance = 8 * float(oracle.ROUNDOFF[dtype] + 1e-6)
            np.testing.assert_allclose(out[b].astype(float), rows[0, 37:], rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(lse[b], rows_lse[0, :, 37:], rtol=1e-4, atol=1e-4)


@on_pairs(*SOME)
@pytest.mark.parametrize("page_size", [0, 3])
def test_token_after_token(backend, dtype, page_size):
    """From an empty cache, in the same memory all the time; each step sees what the steps before left there."""
    steps = 12
    whole = draw(backend, dtype, (0, 0), new=steps, page_size=page_size)
    step = dataclasses.replace(whole, k=whole.k[:, :1], v=whole.v[:, :1])
    placed = PlacedDecoding(backend, step)
    for n in range(steps):
        k, v = whole.k[:, n : n + 1], whole.v[:, n : n + 1]
        call = dataclasses.replace(step, k=k, v=v, cache_seqlens=np.full(2, n, np.int32))
        placed.write(call, "k", "v", "cache_seqlens")
        result = backend.call(cuflash.attention_with_kvcache, *placed.arrays, return_lse=True, **placed.named)
        placed.verify()
        assert_right_kvcache(*map(backend.download, result), call)
        k_cache, v_cache = call.after()
        if call.values_are_keys:
            v_cache = k_cache[..., : v_cache.shape[3]]
        step = dataclasses.replace(step, k_cache=k_cache, v_cache=v_cache)


@on_pairs(*ON_GPU)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_what_does_not_fit_is_dropped(backend, dtype, num_splits, page_size):
    """The device alone knows the lengths: of 5 tokens the first ones go in as far as there is room."""
    call = draw(backend, dtype, (48, 0, 45, 44), seqlen_q=5, new=5, capacity=48)
    if page_size:
        call = draw(backend, dtype, (43, 0, 43, 43), seqlen_q=5, new=5, capacity=48, page_size=page_size)
        full = np.array([48, 0, 45, 44], np.int32)  # the pages are there, what they hold is NaN from 43 on
        for cache in {id(x): x for x in (call.k_cache, call.v_cache)}.values():
            cache[np.isnan(cache)] = 0.25
        call = dataclasses.replace(call, cache_seqlens=full)
    check_kvcache(backend, call, num_splits=num_splits)


@on_pairs(*SOME)
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_full_cache_is_named_where_the_host_knows(backend, dtype, page_size):
    """An integer always; an array on the CPU, or with validate=True. Nothing is written."""
    call = draw(backend, dtype, (27, 0), new=5, capacity=32, page_size=page_size)
    check_kvcache(backend, dataclasses.replace(call, cache_seqlens=np.array([27, 0], np.int32)))
    for lengths, how in (
        (28, {}),
        (33, {}),
        (-1, {}),
        (np.array([28, 0], np.int32), dict(validate=True)),
        (np.array([0, 33], np.int64), dict(validate=True)),
        (np.array([0, -1], np.int64), dict(validate=True)),
        *(((np.array([28, 0], np.int32), {}),) if backend.name == "cpu" else ()),
    ):
        placed = PlacedDecoding(backend, dataclasses.replace(call, cache_seqlens=lengths))
        with pytest.raises(ValueError, match="cache_seqlens must"):
            backend.call(cuflash.attention_with_kvcache, *placed.arrays, **placed.named, **how)
        for name, x in placed.placed.items():
            assert x.fetch().tobytes() == np.ascontiguousarray(getattr(placed.call, name)).tobytes()


# ------------------------------------------------------------------------------------------------------------
# What is unused, masked or wrong


@on_pairs(*EVERY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("page_size", [0, 16])
def test_what_is_masked_has_no_influence(backend, dtype, page_size, bad):
    """Keys before the window of every query, or of some; tails and pages of nobody. Bit for bit."""
    call = draw(backend, dtype, (300, 129), seqlen_q=5, page_size=page_size)
    options = dict(window=(40, 0))
    expected = check_kvcache(backend, call, **options)
    caches = call.k_cache.copy(), call.v_cache.copy()
    if call.values_are_keys:
        caches = caches[0], caches[0][..., : call.v_cache.shape[3]]
    for cache in caches:
        cache[np.isnan(cache)] = bad
        for b, first in enumerate((300 - 5 - 40, 129 - 5 - 40)):
            for key in range(first):
                cache[call.place(b, key)] = bad
    poisoned = dataclasses.replace(call, k_cache=caches[0], v_cache=caches[1])
    assert_same(backend, compute_kvcache(backend, poisoned, **options), expected, f"{bad} where nobody looks")
    # Seen by the first query alone.
    caches[1][call.place(0, 300 - 5 - 40)] = bad
    out, _ = check_kvcache(backend, poisoned, **options)
    if not call.values_are_keys:
        assert not np.isfinite(out[0, 0]).any()


# Three requests of a cache of 64 keys, or of four pages of 16.
WRONG_LENGTHS = {
    "below 0": [-1, -(2**31), 5],
    "past the end": [65, 2**31 - 1, 5],
    "far past the end": [2**31 - 1] * 3,
}
WRONG_PAGES = {
    "below 0": [-1, -(2**31), 3, -2],
    "past the end": [2**31 - 1, 10_000, 0, 100],
    "one past the end": [12 + 3, 12 + 4, 12 + 3, 1],
}


@on_pairs(*ON_GPU)
@pytest.mark.parametrize("wrong", WRONG_LENGTHS)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_wrong_lengths_are_cut(backend, dtype, wrong, num_splits):
    """To what the cache holds: as right as if that had been said, and nothing else is touched."""
    lengths = np.array(WRONG_LENGTHS[wrong], np.int64).astype(np.int32)
    for page_size in (0, 16):
        for new in (0, 3):
            call = draw(backend, dtype, (61, 61, 61), new=3, capacity=64, page_size=page_size, seqlen_q=3)
            for cache in {id(x): x for x in (call.k_cache, call.v_cache)}.values():
                cache[np.isnan(cache)] = 0.25
            call = dataclasses.replace(call, cache_seqlens=lengths)
            if not new:
                call = dataclasses.replace(call, k=None, v=None)
            check_kvcache(backend, call, num_splits=num_splits)


@on_pairs(*ON_GPU)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_lengths_past_32_bits_stay_inside(backend, dtype, num_splits):
    for new in (0, 3):
        call = draw(backend, dtype, (61, 61, 61), new=3, capacity=64, seqlen_q=3, length_dtype="int64", by_index=True)
        lengths = np.array([2**32 + 5, -(2**40), 2**63 - 1])
        for name in ("cache_seqlens", "cache_batch_idx"):
            wrong = dataclasses.replace(call, **{name: lengths})
            stays_inside(backend, wrong if new else dataclasses.replace(wrong, k=None, v=None), num_splits)


def stays_inside(backend, call, num_splits):
    """The result means nothing; what may be written is written inside, and nothing else at all."""
    placed = PlacedDecoding(backend, call)
    shape = (*call.q.shape[:3], call.v_cache.shape[3])
    target = Placed(backend, PLAIN, shape, call.q.dtype)
    backend.call(
        cuflash.attention_with_kvcache,
        *placed.arrays,
        out=target.array,
        return_lse=True,
        num_splits=num_splits,
        **placed.named,
    )
    target.fetch()
    for name, x in placed.placed.items():
        now = x.fetch()
        if name not in ("k_cache", "v_cache") or call.k is None:
            assert now.tobytes() == np.ascontiguousarray(getattr(call, name)).tobytes(), f"{name} was written"


@on_pairs(*ON_GPU)
@pytest.mark.parametrize("wrong", WRONG_PAGES)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_wrong_pages_stay_inside(backend, dtype, wrong, num_splits):
    """A page that is none is another one: the nearest that there is."""
    call = draw(backend, dtype, (61, 61, 61), new=3, capacity=64, page_size=16, seqlen_q=3)
    assert call.k_cache.shape[0] == 12 + 3 and call.block_table.shape == (3, 4)
    table = call.block_table.copy()
    table[1] = np.array(WRONG_PAGES[wrong], np.int64).astype(np.int32)
    stays_inside(backend, dataclasses.replace(call, block_table=table), num_splits)
    read_only = dataclasses.replace(call, block_table=table, k=None, v=None)
    stays_inside(backend, read_only, num_splits)
    result = compute_kvcache(backend, read_only, num_splits=num_splits)
    nearest = dataclasses.replace(read_only, block_table=np.clip(table, 0, call.k_cache.shape[0] - 1))
    assert_right_kvcache(*result, nearest, num_splits=num_splits)


@on_pairs(*ON_GPU)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_wrong_rows_stay_inside(backend, dtype, num_splits):
    call = draw(backend, dtype, (61, 61, 61), new=3, capacity=64, by_index=True, seqlen_q=3)
    for index in ([-1, 1, 2], [5, 1, 2], [2**31 - 1, -(2**31), 0]):
        wrong = dataclasses.replace(call, cache_batch_idx=np.array(index, np.int32))
        stays_inside(backend, wrong, num_splits)
        stays_inside(backend, dataclasses.replace(wrong, k=None, v=None), num_splits)


@on_pairs(*SOME)
def test_what_lies_wrong_is_named_by_validate(backend, dtype):
    """On the CPU always."""
    paged = draw(backend, dtype, (27, 0), new=5, capacity=32, page_size=16)
    rows = draw(backend, dtype, (27, 0), new=5, capacity=32, by_index=True)
    table = paged.block_table.copy()
    table[0, 1] = paged.k_cache.shape[0]
    for call, name in (
        (dataclasses.replace(paged, block_table=table), "block_table"),
        (dataclasses.replace(rows, cache_batch_idx=np.array([0, 4], np.int32)), "cache_batch_idx"),
        (dataclasses.replace(rows, cache_batch_idx=np.array([-1, 0], np.int32)), "cache_batch_idx"),
    ):
        placed = PlacedDecoding(backend, call)
        for how in ({}, dict(validate=True)) if backend.name == "cpu" else (dict(validate=True),):
            with pytest.raises(ValueError, match=f"{name} must"):
                backend.call(cuflash.attention_with_kvcache, *placed.arrays, **placed.named, **how)
    for call in (paged, rows):
        placed = PlacedDecoding(backend, call)
        result = backend.call(cuflash.attention_with_kvcache, *placed.arrays, return_lse=True, validate=True, **placed.named)
        assert_right_kvcache(*map(backend.download, result), call)


@on_pairs(*SOME)
def test_arrays_are_checked(backend, dtype):
    """What needs no look at the values: shape, dtype, what goes together."""
    call = draw(backend, dtype, (27, 0), new=5, capacity=32, page_size=16)
    placed = PlacedDecoding(backend, call)
    lengths, table = placed.named["cache_seqlens"], placed.named["block_table"]

    def upload(x):
        return place(backend, np.ascontiguousarray(x)).array

    for name, wrong in (
        ("cache_seqlens", upload(call.cache_seqlens[:1])),
        ("cache_seqlens", upload(call.cache_seqlens[:, None])),
        ("cache_seqlens", upload(call.cache_seqlens.astype(np.float32))),
        ("cache_seqlens", upload(call.cache_seqlens.astype(np.int16))),
        ("cache_seqlens", [27, 0]),
        ("cache_seqlens", 27.0),
        ("cache_seqlens", None),
        ("block_table", upload(call.block_table.astype(np.int64))),
        ("block_table", upload(call.block_table[:1])),
        ("block_table", upload(call.block_table[0])),
        ("block_table", upload(np.repeat(call.block_table, 2, axis=1))[:, ::2]),
        ("cache_batch_idx", lengths),
        ("num_splits", -1),
        ("num_splits", 1.0),
        ("num_splits", True),
        ("v", None),
        ("k", None),
        ("k", placed.named["k"][:1]),
        ("k", placed.named["k"][..., 1:]),
        *(() if backend.name == "cpu" else (("block_table", call.block_table), ("cache_seqlens", call.cache_seqlens))),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            backend.call(cuflash.attention_with_kvcache, *placed.arrays, **(placed.named | {name: wrong}))
    with pytest.raises(ValueError, match="q must have 4 axes"):
        backend.call(cuflash.attention_with_kvcache, placed.q[0], *placed.arrays[1:], **placed.named)
    assert table.shape == call.block_table.shape


# ------------------------------------------------------------------------------------------------------------
# Lengths of every kind


@on_pairs(*SOME)
@pytest.mark.parametrize("sizes", [{}, dict(page_size=16), dict(new=3, seqlen_q=3)], ids=str)
def test_a_number_for_all(backend, dtype, sizes):
    """Another one at each call, and no number: each as an array that says the same."""
    call = draw(backend, dtype, (125, 125), capacity=128, **sizes)
    new = sizes.get("new", 0)
    for cache in {id(x): x for x in (call.k_cache, call.v_cache)}.values():
        cache[np.isnan(cache)] = 0.25
    for length in (0, 1, 63, 64, 65, 125, 128 - new, np.int64(70), *(() if new else (None,))):
        number = dataclasses.replace(call, cache_seqlens=length)
        full = 128 if length is None else length
        array = dataclasses.replace(call, cache_seqlens=np.full(2, full, np.int32))
        result = compute_kvcache(backend, number)
        assert_same(backend, result, check_kvcache(backend, array), f"{length}")


# ------------------------------------------------------------------------------------------------------------
# Layouts

LAYOUTS = {
    "heads outside": Layout("bhsd"),
    "slices of wider rows": Layout(pad=(0, 0, 8, 24)),
    "backwards": Layout(backwards="s"),
    "rows outside": Layout("sbhd", pad=(8, 0, 0, 0)),
}


@on_pairs(*SOME)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sizes", [{}, dict(page_size=16, new=5, seqlen_q=5)], ids=str)
def test_layouts_of_inputs(backend, dtype, name, sizes):
    check_kvcache(backend, draw(backend, dtype, (130, 0, 65), **sizes), LAYOUTS[name])


@on_pairs(*SOME)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_layouts_of_out(backend, dtype, name, num_splits):
    """By its own strides, in the combine too, and nothing around it."""
    call = draw(backend, dtype, (1000, 0, 65), seqlen_q=3)
    plain = check_kvcache(backend, call, num_splits=num_splits)
    result = compute_kvcache(backend, call, out=LAYOUTS[name], num_splits=num_splits)
    assert_same(backend, result, plain, name)


@on_pairs("cpu-float32", "simt-float32", "simt-float16", "sm80-float16", "sm80-bfloat16")
@pytest.mark.parametrize("base", [2, 4, 8])
@pytest.mark.parametrize("sizes", [dict(seqlen_q=3), dict(page_size=16, new=5, seqlen_q=5)], ids=str)
def test_misaligned(backend, dtype, base, sizes):
    """All arrays off by so many bytes, or the rows of the caches alone."""
    if base % DTYPES[dtype].itemsize:
        pytest.skip("between two elements")
    call = draw(backend, dtype, (130, 0, 65), **sizes)
    check_kvcache(backend, call, Layout(base=base), out=Layout(base=base))
    pitch = Layout(pad=(0, 0, 0, base // DTYPES[dtype].itemsize))
    check_kvcache(backend, call, {"k_cache": pitch, "v_cache": pitch})


# ------------------------------------------------------------------------------------------------------------
# Far apart (GPU only)

GIB = 1 << 30


class Far:
    """The slots of a call's caches (its rows or pages), far apart in gigabytes of NaN.

    ``numbers``: of each slot among those of the large cache, which begin ``step`` elements apart. The values lie in
    the second half of a step.
    """

    def __init__(self, backend, call, numbers, step):
        import cupy

        self.call, self.numbers, self.itemsize = call, numbers, call.q.dtype.itemsize
        self.offsets = {"k_cache": 0} if call.values_are_keys else {"k_cache": 0, "v_cache": step // 2}
        self.step = step
        slots = max(numbers) + 1
        self.size = -(-slots * step * self.itemsize // 4) * 4
        needs_memory(self.size)
        # Outside of the pool, so that it goes back to the other processes at once.
        self.memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(self.size), 0)
        self.memory.memset_async(POISON, self.size)
        cupy.cuda.get_current_stream().synchronize()
        self.arrays = []
        for name in ("k_cache", "v_cache"):
            x = getattr(call, name)
            of = getattr(call, name if name in self.offsets else "k_cache")
            assert of[0].size <= (step // 2 if "v_cache" in self.offsets else step)
            row, head = of.shape[2] * of.shape[3], of.shape[3]
            strides = [stride * self.itemsize for stride in (step, row, head, 1)]
            offset = self.offsets.get(name, 0) * self.itemsize
            self.arrays.append(backend.array(self.memory, x.dtype, (slots, *x.shape[1:]), strides, offset))
        for name, slot, at in self._slots():
            data = np.ascontiguousarray(getattr(call, name)[slot])
            (self.memory + at).copy_from_host(data.ctypes.data, data.nbytes)
        cupy.cuda.Stream.null.synchronize()

    def _slots(self):
        """(name, slot of the call, byte offset) of all."""
        for name, offset in self.offsets.items():
            for slot, number in enumerate(self.numbers):
                yield name, slot, (number * self.step + offset) * self.itemsize

    def verify(self) -> None:
        """Every slot is what the call leaves, and all between them is NaN still."""
        import cupy

        cupy.cuda.Device().synchronize()
        after = dict(zip(("k_cache", "v_cache"), self.call.after(), strict=True))
        for name, slot, at in self._slots():
            expected = np.ascontiguousarray(after[name][slot])
            now = np.empty_like(expected)
            (self.memory + at).copy_to_host(now.ctypes.data, now.nbytes)
            assert now.tobytes() == expected.tobytes(), f"slot {slot} of {name}"
            (self.memory + at).memset(POISON, now.nbytes)
        words = cupy.ndarray((self.size // 4,), np.uint32, memptr=self.memory)
        for start in range(0, words.size, 1 << 27):
            assert bool((words[start : start + (1 << 27)] == 0xFFFFFFFF).all()), f"written past {4 * start} bytes"


def check_far(backend, far, call, **options):
    """The call with the caches where they lie far apart, against the same call judged as it stands."""
    given = dict(call.named())
    if call.values_are_keys:
        given.pop("v", None)
    placed = {name: place(backend, x) for name, x in given.items()}
    named = {name: x.array for name, x in placed.items()}
    if call.values_are_keys and call.k is not None:
        x = placed["k"]
        named["v"] = backend.array(x.memory, x.dtype, call.v.shape, x.strides, x.offset)
    if call.block_table is not None:
        table = call.block_table.copy()
        inside = (table >= 0) & (table < len(far.numbers))
        table[inside] = np.array(far.numbers)[table[inside]]
        named["block_table"] = place(backend, table).array
    elif call.cache_batch_idx is not None:
        index = np.array(far.numbers)[call.cache_batch_idx].astype(call.cache_batch_idx.dtype)
        named["cache_batch_idx"] = place(backend, index).array
    q = place(backend, call.q)
    result = backend.call(cuflash.attention_with_kvcache, q.array, *far.arrays, return_lse=True, **named, **options)
    assert_right_kvcache(*map(backend.download, result), call, **options)
    far.verify()


@on_pairs("simt-float16", "sm80-float16", "sm90-float16", "sm90_rows-float16")
@pytest.mark.parametrize("new", [0, 5])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_pages_past_32_bits(backend, dtype, new, num_splits):
    """A pool of more than 2**32 elements, of which a few pages are used, from all over."""
    call = draw(backend, dtype, (70, 0, 33), page_size=16, new=new, seqlen_q=max(new, 1))
    pages = call.k_cache.shape[0]
    step = call.k_cache[0].size * (1 if call.values_are_keys else 2)
    last = (1 << 32) // step + 1
    numbers = [int(page * last // (pages - 1)) for page in range(pages)]
    check_far(backend, Far(backend, call, numbers, step), call, num_splits=num_splits)


@on_pairs("simt-float16", "sm80-float16", "sm90-float16", "sm90_rows-float16")
@pytest.mark.parametrize("new", [0, 5])
def test_rows_past_32_bits(backend, dtype, new):
    """Requests 2**30 elements apart, as where layers are interleaved: 1 and 2 are used, 0 must stay as it is."""
    call = draw(backend, dtype, (9, 27, 0), new=new, seqlen_q=max(new, 1), capacity=40).only([1, 2])
    check_far(backend, Far(backend, call, [0, 1, 2], 1 << 30), call)


# ------------------------------------------------------------------------------------------------------------
# Drawn calls


@st.composite
def calls_drawn(draw_one):
    """Lengths, page sizes and sharing of all kinds; few kinds of kernels, since each is compiled."""
    kind = draw_one(st.sampled_from(("rows", "pages", "appended to pages")))
    page_size = draw_one(st.sampled_from((1, 2, 3, 16, 64))) if kind != "rows" else 0
    lengths = draw_one(st.lists(st.sampled_from((0, 0, 1, *EDGES)) | st.integers(0, 300), min_size=1, max_size=6))
    sizes = dict(page_size=page_size, seqlen_q=draw_one(st.sampled_from((1, 5))))
    if page_size:
        sizes["shared"] = draw_one(st.integers(0, min(lengths) // page_size))
    else:
        sizes["by_index"] = draw_one(st.booleans())
    if kind == "appended to pages":
        sizes["new"] = draw_one(st.sampled_from((1, 2, 17, 70)))
    sizes["length_dtype"] = draw_one(st.sampled_from(("int32", "int64")))
    return lengths, sizes


@on_pairs(*EVERY)
def test_drawn_calls(backend, dtype):
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        drawn=calls_drawn(),
        heads=st.sampled_from(((2, 1), (2, 2), (3, 1))),
        num_splits=st.sampled_from((0, 0, 2, 5, 300)),
        into=st.booleans(),
        seed=st.integers(0, 99),
    )
    def holds(drawn, heads, num_splits, into, seed):
        lengths, sizes = drawn
        call = draw(backend, dtype, lengths, heads_q=heads[0], heads_k=heads[1], seed=seed, **sizes)
        out = Layout(pad=(0, 0, 8, 8)) if into else None
        check_kvcache(backend, call, out=out, num_splits=num_splits)

    holds()


# ------------------------------------------------------------------------------------------------------------
# Which kernels run, and when nothing is prepared


def kernels_loaded() -> set[str]:
    return {key[0] for key in jit._loaded}


def latent_if(tier):
    return LATENT if tier == "sm90" else {}


@TIERS
def test_a_forced_tier_is_the_one_that_runs(monkeypatch, tier):
    backend = backend_named(tier)
    call = decoding("float16", (70, 3), **latent_if(tier))
    combine = {"decode_combine_wide" if tier == "sm90" else "decode_combine"}
    for num_splits, more in ((1, set()), (0, combine), (3, combine)):
        with fresh_process_state(monkeypatch):
            check_kvcache(backend, call, num_splits=num_splits)
            assert kernels_loaded() == {f"decode_{tier}"} | more


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["few rows", "many rows", "latent"])
def test_the_best_tier_runs_by_itself(cupy, monkeypatch, dtype, kind):
    capability = divmod(int(cupy.cuda.Device(0).compute_capability), 10)
    if capability < (8, 0):
        pytest.skip("tensor cores for all 16-bit dtypes need compute capability 8.0")
    kernel = "decode_simt"
    if dtype in ("float16", "bfloat16"):
        hopper = {"many rows": "decode_rows_sm90", "latent": "decode_sm90"} if capability == (9, 0) else {}
        kernel = hopper.get(kind, "decode_simt" if kind == "latent" else "decode_sm80")
    call = decoding(dtype, (70, 3), **{"few rows": {}, "many rows": dict(seqlen_q=20), "latent": LATENT}[kind])
    placed = PlacedDecoding(backend_named("simt"), call)
    with fresh_process_state(monkeypatch), config.force_tier(None):
        result = cuflash.attention_with_kvcache(*placed.arrays, return_lse=True, num_splits=1, **placed.named)
        assert kernels_loaded() == {kernel}
    assert_right_kvcache(*(x.get() for x in result), call)


@TIERS
def test_a_repeated_call_reads_neither_disk_nor_config(monkeypatch, tier):
    """Nor does one with another number of keys for all."""
    from cuflash import launch

    backend = backend_named(tier)
    call = decoding("float16", (70, 70), capacity=70, **latent_if(tier))
    placed = PlacedDecoding(backend, dataclasses.replace(call, cache_seqlens=None))
    with config.force_tier(tier):
        cuflash.attention_with_kvcache(*placed.arrays, cache_seqlens=3, return_lse=True)
        with monkeypatch.context() as patch:
            for module, name in ((launch, "choose"), (jit, "load"), (jit, "build"), (jit, "closure")):
                patch.setattr(module, name, None)
            for length in (3, 0, 70, np.int32(64)):
                result = cuflash.attention_with_kvcache(*placed.arrays, cache_seqlens=length, return_lse=True)
                shorter = dataclasses.replace(call, cache_seqlens=int(length))
                assert_right_kvcache(*(x.get() for x in result), shorter)
            with pytest.raises(ValueError, match="cache_seqlens must be 0 to 70"):
                cuflash.attention_with_kvcache(*placed.arrays, cache_seqlens=71, return_lse=True)


@TIERS
def test_same_shape_elsewhere_in_memory(tier):
    """A prepared call takes other addresses; values that are the first columns of the keys are another call."""
    backend = backend_named(tier)
    sizes = LATENT if tier == "sm90" else dict(heads_q=4, heads_k=1)
    for seed in range(3):
        for page_size in (0, 16):
            check_kvcache(backend, decoding("float16", (70, 3), page_size=page_size, seed=seed, **sizes))
    if tier != "sm90":
        for seed in range(4):
            check_kvcache(backend, decoding("float16", (70, 3), seed=seed, values_are_keys=seed % 2 == 0, **sizes))


# ------------------------------------------------------------------------------------------------------------
# Memory (GPU only)


@TIERS
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page_size", [0, 16])
def test_with_out_and_workspace_nothing_is_allocated(cupy, tier, num_splits, page_size):
    """The workspace lies between guard bands, and may hold anything."""
    backend = backend_named(tier)
    call = decoding("float16", (300, 65), new=1, page_size=page_size, **latent_if(tier))
    placed = PlacedDecoding(backend, call)
    target = Placed(backend, PLAIN, (*call.q.shape[:3], call.v_cache.shape[3]), call.q.dtype)
    named = placed.named | dict(num_splits=num_splits)
    with config.force_tier(tier):
        num_bytes = cuflash.kvcache_workspace_bytes(*placed.arrays, **named)
    assert (num_bytes == 0) == (num_splits == 1)
    memory = backend.empty(num_bytes + 2 * BAND)
    memory.memset_async(POISON, num_bytes + 2 * BAND)
    workspace = cupy.ndarray((num_bytes,), np.uint8, memptr=memory + BAND)
    cupy.cuda.Device().synchronize()
    expected = compute_kvcache(backend, call, num_splits=num_splits)

    def nothing(size):
        raise AssertionError(f"{size} bytes are asked for")

    with config.force_tier(tier):
        for _ in range(2):  # the same tokens appended to the same places
            with cupy.cuda.using_allocator(nothing):
                given = cuflash.attention_with_kvcache(*placed.arrays, out=target.array, workspace=workspace, **named)
            assert given is target.array
            placed.verify()
            assert_same(backend, (target.fetch(),) * 2, (expected[0],) * 2, "in memory of ours")
        if num_bytes:
            with pytest.raises(ValueError, match=f"workspace must have {num_bytes} bytes"):
                cuflash.attention_with_kvcache(*placed.arrays, workspace=workspace[: num_bytes - 16], **named)
            with pytest.raises(ValueError, match="workspace must be aligned"):
                cuflash.attention_with_kvcache(*placed.arrays, workspace=workspace[1:], **named)
    for band in (backend.fetch(memory, BAND), backend.fetch(memory + (BAND + num_bytes), BAND)):
        assert (band == POISON).all()


@TIERS
@pytest.mark.parametrize("num_splits", [0, 3])
def test_scratch_outlives_its_call(cupy, tier, num_splits):
    """On a side stream that is busy, with allocations in between that fill whatever has been given up."""
    backend = backend_named(tier)
    stream = cupy.cuda.Stream(non_blocking=True)
    for heads, seqlen_q in ((1, 1), (3, 1), (1, 5), (3, 11)):
        sizes = LATENT | dict(heads_q=heads) if tier == "sm90" else dict(heads_q=heads, heads_k=1)
        call = decoding("float16", (300, 0, 65), seqlen_q=seqlen_q, **sizes)
        expected = compute_kvcache(backend, call, num_splits=num_splits)
        placed = PlacedDecoding(backend, call)
        with config.force_tier(tier):
            num_bytes = cuflash.kvcache_workspace_bytes(*placed.arrays, num_splits=num_splits, **placed.named)
        results = []
        with config.force_tier(tier), stream:
            spin(2)
            for _ in range(50):
                results.append(
                    cuflash.attention_with_kvcache(*placed.arrays, return_lse=True, num_splits=num_splits, **placed.named)
                )
                filled = cupy.empty(num_bytes, np.uint8)
                filled.data.memset_async(POISON, num_bytes)
                del filled
        stream.synchronize()
        for out, lse in results:
            assert_same(backend, (out.get(), lse.get()), expected, "behind others")


# ------------------------------------------------------------------------------------------------------------
# Graphs (GPU only)


@TIERS
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_graph(cupy, tier, num_splits, page_size):
    """Captured with some lengths, replayed with longer, shorter and no keys, and other pages, in the same memory."""
    backend = backend_named(tier)
    sizes = dict(capacity=1024, page_size=page_size, num_pages=80, new=1, **latent_if(tier))
    lengths = ((1000, 1, 1, 1), (5, 900, 3, 0), (0, 0, 0, 0), (200, 300, 16, 400))
    calls = [decoding("float16", rows, seed=seed, **sizes) for seed, rows in enumerate(lengths)]
    placed = PlacedDecoding(backend, calls[0])
    given = Placed(backend, PLAIN, (*calls[0].q.shape[:3], calls[0].v_cache.shape[3]), calls[0].q.dtype)
    named = placed.named | dict(num_splits=num_splits)
    stream = cupy.cuda.Stream(non_blocking=True)
    with config.force_tier(tier), stream:
        cuflash.attention_with_kvcache(*placed.arrays, return_lse=True, **named)
        cuflash.attention_with_kvcache(*placed.arrays, out=given.array, **named)
        stream.begin_capture()
        out, lse = cuflash.attention_with_kvcache(*placed.arrays, return_lse=True, **named)
        cuflash.attention_with_kvcache(*placed.arrays, out=given.array, **named)
        graph = stream.end_capture()
    for call in calls[1:] + calls[:1]:
        stream.synchronize()
        placed.write(call)
        for x in (out, lse):
            x.data.memset(POISON, x.nbytes)
        cupy.cuda.Device().synchronize()
        graph.launch(stream=stream)
        stream.synchronize()
        placed.verify()
        result = out.get(), lse.get()
        assert_right_kvcache(*result, call, num_splits=num_splits)
        assert_same(backend, result, compute_kvcache(backend, call, num_splits=num_splits), "replay")
        assert_same(backend, (given.fetch(),) * 2, (result[0],) * 2, "replay into out")


@TIERS
def test_a_cold_kernel_under_capture_is_refused(cupy, monkeypatch, tier):
    backend = backend_named(tier)
    placed = PlacedDecoding(backend, decoding("float16", (70, 3), **latent_if(tier)))
    stream = cupy.cuda.Stream(non_blocking=True)
    with fresh_process_state(monkeypatch), config.force_tier(tier), stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=rf"decode_{tier} .*make one such call before the capture"):
                cuflash.attention_with_kvcache(*placed.arrays, **placed.named)
        finally:
            stream.end_capture()
        result = cuflash.attention_with_kvcache(*placed.arrays, return_lse=True, **placed.named)
        stream.synchronize()
        assert_right_kvcache(*(x.get() for x in result), placed.call)
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="validate before the capture"):
                cuflash.attention_with_kvcache(*placed.arrays, validate=True, **placed.named)
        finally:
            stream.end_capture()


# ------------------------------------------------------------------------------------------------------------
# PyTorch and JAX

FRAMEWORKS = pytest.mark.xdist_group("frameworks")
DOORS = [
    pytest.param(*pair, id="-".join(pair), marks=[FRAMEWORKS, *([MARKS[pair[0]]] if pair[0] in MARKS else [])])
    for pair in (
        ("cpu", "float32"),
        ("cpu", "bfloat16"),
        ("simt", "float32"),
        ("sm80", "float16"),
        ("sm80", "bfloat16"),
        ("sm90", "bfloat16"),
    )
]


def torch_call(torch, call, device):
    """(q and the caches, the rest by name), values being views of keys where they are."""
    given = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, **call.named()}
    views = {"v_cache": "k_cache", "v": "k"} if call.values_are_keys else {}
    arrays = {name: to_torch(torch, np.ascontiguousarray(x), device) for name, x in given.items() if name not in views}
    for name, of in views.items():
        if of in arrays:
            arrays[name] = arrays[of][..., : given[name].shape[3]]
    return tuple(arrays.pop(name) for name in ("q", "k_cache", "v_cache")), arrays


@pytest.mark.parametrize("tier, dtype", DOORS)
@pytest.mark.parametrize("sizes", [{}, dict(page_size=16, new=3, seqlen_q=3)], ids=str)
def test_torch(torch, tier, dtype, sizes):
    device = device_of(torch, tier)
    call = decoding(dtype, (300, 0, 65), **sizes, **latent_if(tier))
    for num_splits in (0, 3):
        arrays, named = torch_call(torch, call, device)
        with forced(tier):
            out, lse = cuflash.attention_with_kvcache(*arrays, return_lse=True, num_splits=num_splits, **named)
        for x in (out, lse):
            assert type(x) is torch.Tensor and x.device == arrays[0].device and x.is_contiguous()
        assert_right_kvcache(from_torch(torch, out), from_torch(torch, lse), call, num_splits=num_splits)
        for x, expected in zip(arrays[1:], call.after(), strict=True):
            assert from_torch(torch, x.contiguous()).tobytes() == np.ascontiguousarray(expected).tobytes()
        into, named["cache_seqlens"] = torch.empty_like(out), named["cache_seqlens"].long()
        with forced(tier):
            assert cuflash.attention_with_kvcache(*arrays, out=into, num_splits=num_splits, **named) is into
        assert torch.equal(into, out)


@pytest.mark.gpu
@FRAMEWORKS
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_torch_memory(cuda, num_splits):
    """With out= and a workspace nothing is allocated; without, from PyTorch's allocator, and nothing from CuPy's."""
    import cupy

    call = decoding("bfloat16", (300, 65), new=1)
    arrays, named = torch_call(cuda, call, "cuda")
    named["num_splits"] = num_splits
    workspace = cuda.empty(cuflash.kvcache_workspace_bytes(*arrays, **named), dtype=cuda.uint8, device="cuda")
    out = cuda.empty_like(arrays[0])
    expected = cuflash.attention_with_kvcache(*arrays, **named)
    cuda.cuda.synchronize()
    counter = "allocation.all.allocated"
    before = cuda.cuda.memory_stats()[counter]
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        cuflash.attention_with_kvcache(*arrays, out=out, workspace=workspace, **named)
        assert cuda.cuda.memory_stats()[counter] == before
        cuflash.attention_with_kvcache(*arrays, **named)
    assert cuda.cuda.memory_stats()[counter] == before + 1 + (num_splits != 1) and pool.total_bytes() == 0
    assert cuda.equal(out, expected)


@pytest.mark.gpu
@FRAMEWORKS
@pytest.mark.parametrize("num_splits", [0, 3])
def test_torch_graph(cuda, num_splits):
    sizes = dict(capacity=1024, page_size=16, num_pages=80, new=1)
    lengths = ((1000, 1, 1, 1), (5, 900, 3, 0), (0, 0, 0, 0))
    calls = [decoding("bfloat16", rows, seed=seed, **sizes) for seed, rows in enumerate(lengths)]
    arrays, named = torch_call(cuda, calls[0], "cuda")
    cuflash.attention_with_kvcache(*arrays, return_lse=True, num_splits=num_splits, **named)
    graph = cuda.cuda.CUDAGraph()
    with cuda.cuda.graph(graph):
        out, lse = cuflash.attention_with_kvcache(*arrays, return_lse=True, num_splits=num_splits, **named)
    for call in calls[1:] + calls[:1]:
        others, others_named = torch_call(cuda, call, "cuda")
        for x, y in zip((*arrays, *named.values()), (*others, *others_named.values()), strict=True):
            x.copy_(y)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        assert_right_kvcache(from_torch(cuda, out), from_torch(cuda, lse), call, num_splits=num_splits)
        for x, expected in zip(arrays[1:], call.after(), strict=True):
            assert from_torch(cuda, x).tobytes() == expected.tobytes()


@pytest.mark.parametrize("tier, dtype", [door for door in DOORS if "sm90" not in door.values])
@pytest.mark.parametrize("page_size", [0, 16])
def test_jax(jax, tier, dtype, page_size):
    """Arrays that nothing can be appended to, or be written into."""
    call = decoding(dtype, (300, 0, 65), page_size=page_size)
    *arrays, lengths = on_device(jax, tier, (call.q, call.k_cache, call.v_cache, call.cache_seqlens))
    named = {"cache_seqlens": lengths}
    if page_size:
        (named["block_table"],) = on_device(jax, tier, (call.block_table,))
    with forced(tier):
        out, lse = cuflash.attention_with_kvcache(*arrays, return_lse=True, **named)
        assert isinstance(out, jax.Array) and isinstance(lse, jax.Array) and out.dtype == arrays[0].dtype
        assert_right_kvcache(np.asarray(out), np.asarray(lse), call)
        k, v = on_device(jax, tier, (call.k_cache[:3, :1], call.v_cache[:3, :1]))
        with pytest.raises(TypeError, match="k is not supported for jax arrays"):
            cuflash.attention_with_kvcache(*arrays, k=k, v=v, **named)
        with pytest.raises(TypeError, match="out is not supported for jax arrays"):
            cuflash.attention_with_kvcache(*arrays, out=out, **named)
        if not page_size:
            result = cuflash.attention_with_kvcache(*arrays, cache_seqlens=20, return_lse=True)
            three = dataclasses.replace(call, cache_seqlens=20)
            assert_right_kvcache(*(np.asarray(x) for x in result), three)


# ------------------------------------------------------------------------------------------------------------
# Parts of the keys, joined


def merge(backend, outs, lses, layout=PLAIN, into: Layout | None = None):
    """(out, lse) of merge_attention on the host."""
    placed = [place(backend, x, layout) for x in outs], [place(backend, x) for x in lses]
    target = None if into is None else Placed(backend, into, outs[0].shape, outs[0].dtype)
    more = {} if target is None else {"out": target.array}
    out, lse = backend.call(cuflash.merge_attention, *([x.array for x in group] for group in placed), **more)
    assert target is None or out is target.array
    for group, host in zip(placed, (outs, lses), strict=True):
        for x, before in zip(group, host, strict=True):
            assert x.fetch().tobytes() == before.tobytes()
    out = backend.download(out) if target is None else target.fetch()
    lse = backend.download(lse)
    assert out.dtype == outs[0].dtype and out.shape == outs[0].shape
    assert lse.dtype == lses[0].dtype and lse.shape == lses[0].shape
    return out, lse


def parts_of(dtype, count, batch=3, seqlen=5, heads=6, head_dim_v=64):
    """Parts with weights of all sizes; some rows see nothing in a part, and there hold NaN."""
    rng = np.random.default_rng(count)
    outs = [rng.standard_normal((batch, seqlen, heads, head_dim_v)).astype(DTYPES[dtype]) for _ in range(count)]
    number = np.float64 if dtype == "float64" else np.float32
    lses = [(4 * rng.standard_normal((batch, heads, seqlen))).astype(number) for _ in range(count)]
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        b = n % batch
        lse[b, 1], out[b, :, 1] = -np.inf, np.nan
        lse[:, 2], out[:, :, 2] = -np.inf, np.nan  # nobody sees anything
        lse[:, 3] += 3000 * (n % 2)  # a weight of 0, next to one of 1
    return outs, lses


@on("cpu", "simt")
@pytest.mark.parametrize("count", [1, 3, 32])
def test_merge(backend, dtype, count):
    for sizes in ({}, dict(batch=1, seqlen=1, heads=4, head_dim_v=1), dict(seqlen=33, head_dim_v=40), dict(head_dim_v=512)):
        outs, lses = parts_of(dtype, count, **sizes)
        out, lse = merge(backend, outs, lses)
        expected, expected_lse = oracle.merge_attention(outs, lses)
        # Neighbours of an lse near 3000 are 5e-13 apart in float64, and so are the weights that follow from it.
        tolerance = 2 * oracle.ROUNDOFF[dtype] + (1e-12 if dtype == "float64" else 1e-5)
        np.testing.assert_allclose(out.astype(float), expected, rtol=tolerance, atol=4 * tolerance)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)
        assert (out[:, :, 2] == 0).all() and (lse[:, 2] == -np.inf).all()


@on("cpu", "simt", dtypes=("float16", "float32"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_merge_of_any_layout(backend, dtype, name):
    outs, lses = parts_of(dtype, 3)
    expected = merge(backend, outs, lses)
    assert_same(backend, merge(backend, outs, lses, LAYOUTS[name]), expected, "outs")
    assert_same(backend, merge(backend, outs, lses, into=LAYOUTS[name]), expected, "out")


@on("cpu", "simt", dtypes=("float16", "float32"))
def test_merge_of_nothing_and_of_too_much(backend, dtype):
    for sizes in (dict(batch=0), dict(seqlen=0)):
        outs, lses = ([x[:0] if "batch" in sizes else x for x in group] for group in parts_of(dtype, 2))
        if "seqlen" in sizes:
            outs, lses = [x[:, :0] for x in outs], [np.ascontiguousarray(x[..., :0]) for x in lses]
        out, lse = merge(backend, outs, lses)
        assert out.size == lse.size == 0
    outs, lses = parts_of(dtype, 2)
    placed = [[place(backend, x).array for x in group] for group in (outs, lses)]
    many = [group * 17 for group in placed]
    for wrong in (
        ([], []),
        (placed[0], placed[1][:1]),
        (many[0][:33], many[1][:33]),
        (placed[0], [x[:1] for x in placed[1]]),
        ([placed[0][0], placed[0][1][..., :8]], placed[1]),
        (placed[0], [x.astype(np.float16) for x in placed[1]]),
    ):
        with pytest.raises((TypeError, ValueError), match="outs|lses"):
            backend.call(cuflash.merge_attention, *wrong)


@on_pairs(*SOME)
@pytest.mark.parametrize("cut", [0, 1, 64, 129, 200])
def test_two_calls_merged_are_the_single_one(backend, dtype, cut):
    """The first keys in one call, those behind them in another."""
    call = draw(backend, dtype, (200, 200), capacity=200, seqlen_q=3)
    placed = PlacedDecoding(backend, dataclasses.replace(call, cache_seqlens=None))
    options = dict(causal=False, return_lse=True)
    attend = cuflash.attention_with_kvcache
    first = backend.call(attend, *placed.arrays, cache_seqlens=cut, **options)
    behind = [x[:, cut:] for x in placed.arrays[1:]]
    if behind[0].size:
        rest = backend.call(attend, placed.q, *behind, **options)
    else:
        rest = backend.call(attend, *placed.arrays, cache_seqlens=0, **options)
    out, lse = backend.call(cuflash.merge_attention, *zip(first, rest, strict=True))
    assert_right_kvcache(backend.download(out), backend.download(lse), call, causal=False)


@pytest.mark.parametrize("tier, dtype", [door for door in DOORS if "sm90" not in door.values])
def test_merge_in_torch(torch, tier, dtype):
    device = device_of(torch, tier)
    outs, lses = parts_of(dtype, 3)
    given = [[to_torch(torch, x, device) for x in group] for group in (outs, lses)]
    out, lse = cuflash.merge_attention(*given)
    assert type(out) is torch.Tensor and out.device == given[0][0].device and lse.dtype == given[1][0].dtype
    expected, expected_lse = oracle.merge_attention(outs, lses)
    tolerance = 2 * oracle.ROUNDOFF[dtype] + 1e-5
    np.testing.assert_allclose(from_torch(torch, out).astype(float), expected, rtol=tolerance, atol=4 * tolerance)
    np.testing.assert_allclose(from_torch(torch, lse), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("tier, dtype", [door for door in DOORS if "sm90" not in door.values])
def test_merge_in_jax(jax, tier, dtype):
    outs, lses = parts_of(dtype, 3)
    given = [on_device(jax, tier, group) for group in (outs, lses)]
    out, lse = cuflash.merge_attention(*given)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    expected, expected_lse = oracle.merge_attention(outs, lses)
    tolerance = 2 * oracle.ROUNDOFF[dtype] + 1e-5
    np.testing.assert_allclose(np.asarray(out).astype(float), expected, rtol=tolerance, atol=4 * tolerance)
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=1e-6, atol=1e-5)
