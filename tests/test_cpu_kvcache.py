"""Decoding on the NumPy path: keys in rows and in pages, new ones appended in place, each request by itself."""

import dataclasses
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import assert_bits, assert_right_kvcache, decoding
from test_cpu import DTYPES, SMALL, TILES, attend, peak_of, problem_of, scratch_bytes

from cuflash import cpu, oracle


@pytest.fixture(params=("shipped", "small"))
def tiles(request, monkeypatch):
    """The tiles as shipped, and small ones."""
    if request.param == "small":
        for name, value in zip(TILES, SMALL):
            monkeypatch.setattr(cpu, name, value)


def stated(call, causal=True, **options):
    """The problem of a call: the path reads no more of it than what every problem has."""
    problem = problem_of(call.q, call.k_cache, call.v_cache, causal=causal, **options)
    return dataclasses.replace(problem, seqlen_k=call.capacity)


def decode(call, **options):
    """(out, lse) of the CPU path. out was full of nan; the caches must end as they should, and all else as it was."""
    k_cache = call.k_cache.copy()
    v_cache = k_cache[..., : call.v_cache.shape[3]] if call.values_are_keys else call.v_cache.copy()
    given, before = call.named(), {name: np.copy(x) for name, x in (call.named() | {"q": call.q}).items()}
    out = np.full((*call.q.shape[:3], v_cache.shape[3]), np.nan, call.q.dtype)
    names = ("k", "v", "cache_seqlens", "cache_batch_idx", "block_table")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lse = cpu.attention_with_kvcache(
            stated(call, **options), call.q, k_cache, v_cache, *(given.get(name) for name in names), out)
    for name, expected, cache in zip(("k_cache", "v_cache"), call.after(), (k_cache, v_cache)):
        assert_bits(cache, expected, name)
    for name, x in before.items():
        assert np.asarray(getattr(call, name)).tobytes() == x.tobytes(), f"{name} was written"
    assert lse.shape == (call.q.shape[0], call.q.shape[2], call.q.shape[1])
    assert lse.dtype == (np.float64 if call.q.dtype == np.float64 else np.float32)
    return out, lse


def check(call, **options):
    """`decode`, judged by the oracle, and against plain attention on all keys one after the other, bit for bit."""
    out, lse = decode(call, **options)
    assert_right_kvcache(out, lse, call, **options)
    for b in range(call.batch):
        k, v = call.keys(b)
        if not k.shape[1]:
            assert (out[b] == 0).all() and (lse[b] == -np.inf).all()
            continue
        plain = attend(call.q[b:b + 1], k, v, **{"causal": True, **options})
        np.testing.assert_allclose(out[b].astype(float), plain[0][0].astype(float), rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(lse[b], plain[1][0], rtol=1e-5, atol=1e-5)
    return out, lse


# name -> (lengths, sizes and kind of cache, options)
CASES = {
    "rows": ((70, 1, 33), {}, {}),
    "pages": ((70, 1, 33), dict(page_size=16), {}),
    "pages of one": ((20, 1, 33), dict(page_size=1), {}),
    "pages of 3": ((20, 3, 33), dict(page_size=3), {}),
    "a page for all": ((70, 1, 256), dict(page_size=256), {}),
    "shared pages": ((70, 50, 33), dict(page_size=16, shared=2), {}),
    "shared pages, appended": ((70, 50, 33), dict(page_size=16, shared=2, new=5, seqlen_q=5), {}),
    "other rows": ((70, 1, 33), dict(by_index=True), {}),
    "other rows, appended, int64": ((70, 1, 33), dict(by_index=True, new=3, length_dtype="int64"), {}),
    "appended": ((70, 0, 33), dict(new=4, seqlen_q=4), {}),
    "appended to nothing": ((0, 0), dict(new=1), {}),
    "appended to nothing, in pages": ((0, 0), dict(new=7, seqlen_q=7, page_size=3), {}),
    "appended across pages": ((15, 16, 17), dict(new=18, seqlen_q=18, page_size=16), {}),
    "appended up to the end": ((60, 3, 0), dict(new=4, seqlen_q=4, capacity=64), {}),
    "full": ((64, 64), dict(capacity=64), {}),
    "full pages": ((64, 64), dict(capacity=64, page_size=16), {}),
    "lengths of 0": ((0, 9, 0), {}, {}),
    "lengths of 0, in pages": ((0, 9, 0), dict(page_size=4), {}),
    "nothing at all": ((0,), {}, {}),
    "more queries than keys": ((3, 70), dict(seqlen_q=9), {}),
    "not causal": ((70, 20), dict(seqlen_q=5), dict(causal=False)),
    "window": ((70, 20, 5), dict(seqlen_q=9, page_size=16), dict(window=(12, 3))),
    "window, not causal": ((70, 20, 5), dict(seqlen_q=9), dict(window=(12, 3), causal=False)),
    "softcap, scale": ((70, 20), dict(seqlen_q=3), dict(softcap=2.0, softmax_scale=0.4)),
    "groups of 1": ((40, 9), dict(heads_q=3, heads_k=3, seqlen_q=2), {}),
    "groups of 3": ((40, 9), dict(heads_q=6, heads_k=2, seqlen_q=2), {}),
    "groups of 4": ((40, 9), dict(heads_q=8, heads_k=2, seqlen_q=2), {}),
    "groups of 7": ((40, 9), dict(heads_q=14, heads_k=2, seqlen_q=2), {}),
    "groups of 8": ((40, 9), dict(heads_q=8, heads_k=1, seqlen_q=2), {}),
    "groups of 16": ((40, 9), dict(heads_q=32, heads_k=2, seqlen_q=2), {}),
    "odd head dims": ((40, 9), dict(head_dim=65, head_dim_v=40, page_size=16), {}),
    "latent": ((70, 0, 17), dict(heads_q=16, heads_k=1, head_dim=576, head_dim_v=512, values_are_keys=True), {}),
    "latent, appended to pages": (
        (70, 0, 17), dict(heads_q=16, heads_k=1, head_dim=576, head_dim_v=512, values_are_keys=True, page_size=16,
                          new=2, seqlen_q=2), {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_named(name, dtype, tiles):
    lengths, sizes, options = CASES[name]
    check(decoding(dtype, lengths, **sizes), **options)


def test_lengths_of_every_kind(tiles):
    """The same for all by a number, all that there is room for without one, int64 and int32."""
    for page_size in (0, 16):
        call = decoding("float32", (64, 64), capacity=64, page_size=page_size)
        expected = check(call)
        for lengths in (64, np.int64(64), None, np.array([64, 64], np.int64)):
            for x, y in zip(decode(dataclasses.replace(call, cache_seqlens=lengths)), expected):
                np.testing.assert_array_equal(x, y)
        fewer = dataclasses.replace(call, cache_seqlens=20)
        check(fewer)
        check(dataclasses.replace(call, cache_seqlens=0))


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("page_size", [0, 1, 3, 16])
def test_a_chunk_is_the_end_of_a_causal_run(chunk, page_size, tiles):
    """37 keys, then as many as fit into the chunk: its queries see the prefix and themselves."""
    call = decoding("float64", (37, 37), seqlen_q=chunk, new=chunk, page_size=page_size)
    out, lse = check(call)
    for b in range(2):
        k, v = call.keys(b)
        q = np.zeros((1, 37 + chunk, *call.q.shape[2:]))
        q[:, 37:] = call.q[b]
        all_rows, all_lse = attend(q, k, v, causal=True)
        np.testing.assert_allclose(out[b], all_rows[0, 37:], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[b], all_lse[0, :, 37:], rtol=1e-12)
        np.testing.assert_array_equal(k[0, 37:], call.k[b])


def test_token_after_token(tiles):
    """A cache that fills from nothing, in pages: each step as attention on all so far."""
    steps, page_size = 20, 3
    whole = decoding("float32", (0, 0), new=steps, page_size=page_size)
    caches = whole.k_cache.copy(), whole.v_cache.copy()
    for step in range(steps):
        q, k, v = whole.q, whole.k[:, step:step + 1], whole.v[:, step:step + 1]
        call = dataclasses.replace(whole, k_cache=caches[0], v_cache=caches[1], k=k, v=v,
                                   cache_seqlens=np.full(2, step, np.int32))
        out, lse = check(call)
        caches = call.after()
        expected = attend(q, whole.k[:, :step + 1], whole.v[:, :step + 1])
        np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [{}, dict(page_size=16), dict(by_index=True), dict(page_size=3, shared=2)], ids=str)
def test_a_request_has_the_bits_it_has_alone(sizes, tiles):
    call = decoding("bfloat16", (70, 9, 33, 200), seqlen_q=3, new=3, **sizes)
    out, lse = decode(call)
    for b in range(call.batch):
        alone, alone_lse = decode(call.only([b]))
        np.testing.assert_array_equal(alone[0], out[b])
        np.testing.assert_array_equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("page_size", [0, 16])
def test_what_is_unused_has_no_influence(bad, page_size, tiles):
    """Tails, pages of nobody, and keys that the mask hides from all."""
    call = decoding("float32", (70, 20), seqlen_q=4, page_size=page_size, capacity=100)
    options = dict(window=(10, 0))
    expected = decode(call, **options)
    poisoned = dataclasses.replace(call, k_cache=call.k_cache.copy(), v_cache=call.v_cache.copy())
    for x in (poisoned.k_cache, poisoned.v_cache):
        x[np.isnan(x)] = bad
        for key in range(70 - 4 - 10):          # no query of the first request sees so far
            x[call.place(0, key)] = bad
    for x, y in zip(decode(poisoned, **options), expected):
        np.testing.assert_array_equal(x, y)
    # And a visible one is seen.
    poisoned.v_cache[call.place(0, 69)] = np.nan
    out, _ = decode(poisoned, **options)
    assert np.isnan(out[0, 3]).all() and np.isfinite(out[0, :3]).all() and np.isfinite(out[1]).all()


def test_each_key_head_has_its_own_value(tiles):
    for group in (1, 3, 4, 5, 7, 8, 12, 13, 16):
        call = decoding("float32", (40, 9), heads_q=3 * group, heads_k=3, page_size=4, seqlen_q=2)
        call.v_cache[...] = np.arange(3)[:, None]
        out, _ = decode(call)
        np.testing.assert_allclose(out, np.broadcast_to(np.arange(3 * group)[:, None] // group, out.shape), rtol=1e-6)


def test_empty_sizes():
    for sizes in (dict(seqlen_q=0), dict(heads_q=0, heads_k=0), dict(heads_q=0, heads_k=2)):
        out, lse = decode(decoding("float32", (5, 0), new=2, **sizes))      # appended all the same
        assert out.size == lse.size == 0
    out, lse = decode(decoding("float32", ()))
    assert out.shape[0] == lse.shape[0] == 0


def test_no_lse_unless_asked():
    call = decoding("float32", (5, 9))
    out = np.empty_like(call.q)
    problem = dataclasses.replace(stated(call), return_lse=False)
    assert cpu.attention_with_kvcache(problem, call.q, call.k_cache, call.v_cache, None, None, call.cache_seqlens, None,
                                      None, out) is None
    np.testing.assert_array_equal(out, decode(call)[0])


@pytest.mark.parametrize("page_size", [0, 16])
def test_scratch_is_what_the_docstring_says(page_size):
    call = decoding("float16", (4000, 4000, 1), page_size=page_size, heads_q=8, heads_k=4, seqlen_q=64)
    problem, out = stated(call), np.empty_like(call.q)
    peak = peak_of(lambda: cpu.attention_with_kvcache(
        problem, call.q, call.k_cache, call.v_cache, None, None, call.cache_seqlens, None, call.block_table, out))
    lse = 4 * 8 * 64 * 3
    pages = 4016 * 4 * 128 * 2 if page_size else 0
    assert peak < scratch_bytes(problem) + pages + lse


@st.composite
def calls(draw):
    page_size = draw(st.sampled_from((0, 0, 1, 2, 3, 16, 64)))
    lengths = draw(st.lists(st.integers(0, 70), min_size=0, max_size=5))
    shared = draw(st.integers(0, min(lengths, default=0) // page_size)) if page_size else 0
    group, heads_k = draw(st.sampled_from((1, 2, 3, 7))), draw(st.integers(1, 3))
    return decoding(
        draw(st.sampled_from(DTYPES)), lengths, page_size=page_size, shared=shared,
        seqlen_q=draw(st.integers(1, 9)), new=draw(st.sampled_from((0, 0, 1, 5, 20))),
        by_index=not page_size and draw(st.booleans()), length_dtype=draw(st.sampled_from(("int32", "int64"))),
        heads_q=group * heads_k, heads_k=heads_k, head_dim=draw(st.integers(1, 20)), head_dim_v=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 99)))


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(call=calls(), options=st.sampled_from(({}, dict(causal=False), dict(window=(9, 2)), dict(softcap=1.5),
                                              dict(window=(20, None), causal=False))))
def test_anything(call, options):
    check(call, **options)


def test_merged_parts_are_the_whole():
    """The first keys in one call, the rest in another, joined by lse: what all keys give."""
    call = decoding("float32", (70, 70), seqlen_q=3)
    for cut in (0, 1, 33, 70):
        first = decode(dataclasses.replace(call, cache_seqlens=cut), causal=False)
        rest = dataclasses.replace(call, k_cache=call.k_cache[:, cut:70], v_cache=call.v_cache[:, cut:70],
                                   cache_seqlens=None)
        parts = zip(first, decode(rest, causal=False))
        out, lse = oracle.merge_attention(*parts)
        expected = oracle.attention_with_kvcache(call.q, call.k_cache, call.v_cache, cache_seqlens=70, causal=False)
        np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)
