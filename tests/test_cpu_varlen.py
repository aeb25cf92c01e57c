"""Packed batches on the NumPy path: any lengths, the bits of dense calls, and nothing across a boundary."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cpu import DTYPES, LAYOUTS, SHIPPED, SMALL, TILES, dtype_of, peak_of, problem_of

from cuflash import cpu, oracle


@pytest.fixture(params=("shipped", "small"))
def tiles(request, monkeypatch):
    """The tiles as shipped, and small ones."""
    if request.param == "small":
        for name, value in zip(TILES, SMALL):
            monkeypatch.setattr(cpu, name, value)


@dataclasses.dataclass
class Packed:
    """A packed batch with rows past its end; rows of no sequence hold nan."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    seqused_q: np.ndarray | None = None
    seqused_k: np.ndarray | None = None

    @classmethod
    def of(cls, dtype, slots_q, slots_k=None, heads=(2, 1), dim=8, dim_v=None, used=(None, None), tail=(0, 0), seed=0):
        slots_k, dim_v, rng = slots_q if slots_k is None else slots_k, dim_v or dim, np.random.default_rng(seed)
        cu_seqlens = [np.cumsum([0, *slots]).astype(np.int32) for slots in (slots_q, slots_k)]
        totals = [int(cu[-1]) + more for cu, more in zip(cu_seqlens, tail)]
        used = [x if x is None else np.asarray(x, np.int32) for x in used]
        covered = [np.zeros(total, bool) for total in totals]
        for mask, cu, lengths in zip(covered, cu_seqlens, used):
            for n, (start, stop) in enumerate(itertools.pairwise(cu)):
                mask[start:stop if lengths is None else start + lengths[n]] = True

        def draw(which, *shape):
            x = rng.standard_normal((totals[which], *shape))
            x[~covered[which]] = np.nan
            return x.astype(dtype_of(dtype))

        dlse = rng.standard_normal((heads[0], totals[0])).astype(np.float64 if dtype == "float64" else np.float32)
        return cls(draw(0, heads[0], dim), draw(1, heads[1], dim), draw(1, heads[1], dim_v), draw(0, heads[0], dim_v),
                   np.where(covered[0], dlse, dlse.dtype.type(np.nan)), *cu_seqlens, *used)

    @property
    def lengths(self):
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k

    @property
    def used(self):
        return {"seqused_q": self.seqused_q, "seqused_k": self.seqused_k}

    def sequences(self):
        return oracle._sequences(*self.lengths)

    def problem(self, **options):
        dense = problem_of(self.q[None], self.k[None], self.v[None], **options)
        return dataclasses.replace(dense, batch=len(self.cu_seqlens_q) - 1)

    def attend(self, out=None, **options):
        """(out, lse); out was full of nan, nothing may warn."""
        out = np.empty((*self.q.shape[:2], self.v.shape[2]), self.q.dtype) if out is None else out
        out[...] = np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lse = cpu.attention_varlen(self.problem(**options), self.q, self.k, self.v, *self.lengths, out)
        assert lse.shape == (self.q.shape[1], len(self.q)) and lse.dtype == self.dlse.dtype
        return out, lse

    def differentiate(self, out, lse, with_dlse=True, gradients=None, **options):
        """(dq, dk, dv), which were full of nan; rows of no sequence may hold anything in out and lse too."""
        if gradients is None:
            gradients = [np.empty(x.shape, x.dtype) for x in (self.q, self.k, self.v)]
        for gradient in gradients:
            gradient[...] = np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cpu.backward_varlen(self.problem(**options), self.dout, self.q, self.k, self.v, out, lse, *self.lengths,
                                self.dlse if with_dlse else None, *gradients)
        return gradients

    def check(self, with_dlse=True, **options):
        out, lse = self.attend(**options)
        verdict = oracle.judge_varlen(out, lse, self.q, self.k, self.v, *self.lengths[:2], **self.used, **options)
        assert verdict.ok, verdict.why
        gradients = self.differentiate(out, lse, with_dlse, **options)
        verdict = oracle.judge_varlen_backward(*gradients, self.dout, self.q, self.k, self.v, *self.lengths[:2],
                                               **self.used, dlse=self.dlse if with_dlse else None, **options)
        assert verdict.ok, verdict.why
        return out, lse, *gradients

    def check_bits(self, **options):
        """Each sequence by itself, through the dense functions, gives the same bits."""
        out, lse = self.attend(**options)
        gradients = self.differentiate(out, lse, **options)
        for rows, keys in self.sequences():
            q, k, v, dout = self.q[None, rows], self.k[None, keys], self.v[None, keys], self.dout[None, rows]
            left, right = options.get("window") or (None, None)
            if options.get("causal"):
                right = 0 if right is None else min(right, 0)
            # As `check_attention` states them: a side that hides nothing is none.
            left = None if left is None or left >= k.shape[1] - 1 else left
            right = None if right is None or right >= q.shape[1] - 1 else right
            dense = dataclasses.replace(problem_of(q, k, v, **{**options, "causal": False}),
                                        window_left=left, window_right=right)
            one = np.empty_like(out[None, rows])
            one_lse = cpu.attention(dense, q, k, v, one)
            np.testing.assert_array_equal(one[0], out[rows])
            np.testing.assert_array_equal(one_lse[0], lse[:, rows])
            each = [np.empty(x.shape, x.dtype) for x in (q, k, v)]
            cpu.backward(dense, dout, q, k, v, one, one_lse, self.dlse[None, :, rows], *each)
            for gradient, place, alone in zip(gradients, (rows, keys, keys), each):
                np.testing.assert_array_equal(alone[0], gradient[place])
        return out, lse, gradients


LENGTHS = (5, 0, 17, 1, 64, 5, 5, 0, 65, 1, 129, 2)
OPTIONS = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "wide": {"window": (100, 64)},
    "left only": {"window": (20, None), "softcap": 3.0},
    "causal window": {"causal": True, "window": (20, 9), "softmax_scale": 0.5},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_named(name, dtype, tiles):
    Packed.of(dtype, LENGTHS, heads=(4, 2), tail=(3, 1)).check(name != "dense", **OPTIONS[name])
    used = [length // 2 for length in LENGTHS[::-1]], [max(0, length - 3) for length in LENGTHS]
    Packed.of(dtype, LENGTHS[::-1], LENGTHS, (2, 2), 5, 12, used, (0, 2)).check(**OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_dense_calls(name, tiles):
    for dtype in DTYPES:
        Packed.of(dtype, LENGTHS, LENGTHS[::-1], (4, 2), 16, 12, tail=(3, 1)).check_bits(**OPTIONS[name])


def test_bits_at_the_edges_of_the_shipped_tiles():
    """Lengths beyond a tile, where a window that hides nothing must not change the tiles either."""
    for options in ({}, {"causal": True}, {"window": (1100, 1100)}, {"window": (1600, None)}):
        Packed.of("float32", (1025, 3, 1200), (1025, 1300, 3), (2, 1), 8).check_bits(**options)


# By hand

def test_each_sequence_sees_its_own(tiles):
    """Two documents of 3 and 5 tokens: a change of the first leaves every bit of the second."""
    packed = Packed.of("float32", (3, 5))
    out, lse = packed.attend(causal=True)
    gradients = packed.differentiate(out, lse, causal=True)
    packed.k[:3] += 100
    packed.v[:3] += 100
    moved, moved_lse = packed.attend(causal=True)
    moved_gradients = packed.differentiate(moved, moved_lse, causal=True)
    for before, after in zip((out, lse.T, *gradients), (moved, moved_lse.T, *moved_gradients)):
        np.testing.assert_array_equal(after[3:], before[3:])
        assert (after[:3] != before[:3]).any()


def test_single_queries_and_an_empty_sequence(tiles):
    """cu_q 0, 1, 1, 2 with cu_k 0, 3, 3, 8: nine heads on three."""
    Packed.of("bfloat16", (1, 0, 1), (3, 0, 5), (9, 3), 64).check(softmax_scale=1.0, causal=True)


def test_more_sequences_than_tokens(tiles):
    packed = Packed.of("bfloat16", (0, 0, 0, 1), heads=(21, 7), dim=120)
    out, *_ = packed.check()
    np.testing.assert_array_equal(out, np.repeat(packed.v, 3, axis=1))
    for slots in ((), (0,), (0, 0)):
        for tail in ((0, 0), (3, 2)):
            out, lse, *gradients = Packed.of("float32", slots, tail=tail).check()
            assert (out == 0).all() and (lse == -np.inf).all() and all((x == 0).all() for x in gradients)


def test_leading_empty_sequences(tiles):
    """In every order: query lengths 0, 0, 65 with key lengths 0, 1, 130."""
    for order in itertools.permutations(((0, 0), (0, 1), (65, 130))):
        for causal in (False, True):
            Packed.of("float16", *zip(*order), dim=16).check(causal=causal)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
def test_sequences_without_queries_or_keys(heads, tiles):
    for causal in (False, True):
        *_, dk, dv = Packed.of("float16", (3, 0, 2), (4, 7, 5), heads).check(causal=causal)
        assert (dk[4:11] == 0).all() and (dv[4:11] == 0).all() and dk[:4].any() and dv[11:].any()
        out, lse, dq, *_ = Packed.of("float16", (3, 2), (0, 0), heads).check(causal=causal)
        assert (out == 0).all() and (lse == -np.inf).all() and (dq == 0).all()


def test_rows_after_the_last_sequence(tiles):
    packed = Packed.of("float32", (3, 4), tail=(2, 2))
    out, lse, dq, dk, dv = packed.check()
    assert all((x[7:] == 0).all() for x in (out, dq, dk, dv)) and (lse[:, 7:] == -np.inf).all()
    out[7:], lse[:, 7:] = np.nan, np.nan         # not read by the backward
    for gradient, other in zip(packed.differentiate(out, lse), (dq, dk, dv)):
        np.testing.assert_array_equal(gradient, other)


def test_gaps_between_sequences(tiles):
    """Lengths 9, 8, 8, 12, 8, 12 in slots that start at 0, 12, 20, 28, 40, 48: nan in the gaps counts for nothing."""
    used, slots = (9, 8, 8, 12, 8, 12), (12, 8, 8, 12, 8, 12)
    gaps = Packed.of("float32", slots, used=(used, used))
    assert np.isnan(gaps.k[9:12]).all()
    results = gaps.check(causal=True)
    tight = Packed(*(x[~np.isnan(gaps.q[:, 0, 0])] for x in (gaps.q, gaps.k, gaps.v, gaps.dout)),
                   gaps.dlse[:, ~np.isnan(gaps.dlse[0])], *(np.cumsum([0, *used]),) * 2)
    out, lse = tight.attend(causal=True)
    for packed, other in zip(results, (out, lse, *tight.differentiate(out, lse, causal=True))):
        kept = np.delete(packed, slice(9, 12), axis=packed.ndim == 2)
        np.testing.assert_array_equal(kept, other)


def test_lengths_of_every_kind(tiles):
    """int64, strided and read-only arrays, lists, and a seqused that passes its slot and ends with it."""
    packed = Packed.of("float32", (3, 5, 2), (4, 1, 6), used=((2, 5, 1), (4, 1, 3)))
    expected = packed.check(causal=True)
    wide = [np.repeat(x, 2)[::2] for x in packed.lengths]
    for lengths in ([x.astype(np.int64) for x in packed.lengths], wide, [x.tolist() for x in packed.lengths]):
        packed.cu_seqlens_q, packed.cu_seqlens_k, packed.seqused_q, packed.seqused_k = lengths
        out, lse = packed.attend(causal=True)
        for x, y in zip((out, lse, *packed.differentiate(out, lse, causal=True)), expected):
            np.testing.assert_array_equal(x, y)
    full = Packed.of("float32", (3, 5), (4, 1))
    expected, _ = full.attend()
    full.seqused_q, full.seqused_k = np.array([9, 9]), np.array([4, 100])
    np.testing.assert_array_equal(full.attend()[0], expected)


def test_shape_of_lse(tiles):
    """(heads_q, total_q), the values of three dense calls."""
    packed = Packed.of("float64", (1, 65, 3), heads=(3, 1))
    _, lse = packed.attend()
    for rows, keys in packed.sequences():
        _, expected = oracle.attention(packed.q[None, rows], packed.k[None, keys], packed.v[None, keys])
        np.testing.assert_allclose(lse[:, rows], expected[0], rtol=1e-13)


def test_no_lse_unless_asked():
    packed = Packed.of("float32", (3, 5))
    out, _ = packed.attend()
    other = np.empty_like(out)
    plain = dataclasses.replace(packed.problem(), return_lse=False)
    assert cpu.attention_varlen(plain, packed.q, packed.k, packed.v, *packed.lengths, other) is None
    np.testing.assert_array_equal(out, other)
    no_heads = Packed.of("float32", (3, 5), heads=(0, 2))
    *_, dk, dv = no_heads.check()
    assert (dk == 0).all() and (dv == 0).all()


# Anything

@st.composite
def cases(draw):
    length = st.one_of(st.integers(0, 20), st.sampled_from((0, 1, 1, 63, 65)))
    slots_q, slots_k = zip(*draw(st.lists(st.tuples(length, length), min_size=1, max_size=6)))
    if draw(st.booleans()):
        slots_k = slots_q
    heads_k, side = draw(st.integers(1, 2)), st.one_of(st.none(), st.integers(0, 70))
    batch = {
        "dtype": draw(st.sampled_from(DTYPES)), "slots_q": slots_q, "slots_k": slots_k,
        "heads": (heads_k * draw(st.integers(1, 3)), heads_k), "dim": draw(st.integers(1, 20)),
        "dim_v": draw(st.integers(1, 20)), "tail": draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        "used": [draw(st.one_of(st.none(), st.tuples(*[st.integers(0, slot) for slot in slots])))
                 for slots in (slots_q, slots_k)],
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    options = {"causal": draw(st.booleans()), "window": draw(st.one_of(st.none(), st.tuples(side, side))),
               "softcap": draw(st.sampled_from((0.0, 2.0)))}
    layouts = draw(st.tuples(*[st.sampled_from((np.copy, *LAYOUTS))] * 8))
    return batch, options, layouts, draw(st.sampled_from((SHIPPED, SMALL))), draw(st.booleans())


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_anything(drawn):
    batch, options, layouts, tile, with_dlse = drawn
    packed = Packed.of(**batch)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(TILES, tile):
            patch.setattr(cpu, name, value)
        *_, dq, dk, dv = results = packed.check(with_dlse, **options)
        packed.check_bits(**options)
        for name, layout in zip(("q", "k", "v", "dout"), layouts):
            setattr(packed, name, layout(getattr(packed, name)[None])[0])
        out, lse = packed.attend(layouts[4](np.zeros_like(results[0])[None])[0], **options)
        gradients = [layout(np.zeros_like(x)[None])[0] for layout, x in zip(layouts[5:], (dq, dk, dv))]
        packed.differentiate(out, lse, with_dlse, gradients, **options)
    for x, y in zip((out, lse, *gradients), results):
        np.testing.assert_array_equal(x, y)


# Memory and time

@pytest.mark.parametrize("slots", [(1,) * 65537, (0, 1, 2, 3) * 5000], ids=("65537 of 1", "20000 of 0 to 3"))
def test_many_short_sequences_take_few_calls(slots, monkeypatch):
    """Sequences of equal lengths are taken together: a call each would cost seconds."""
    packed, calls = Packed.of("float16", slots, heads=(1, 1), dim=16), []
    for name in ("attention", "backward"):
        call = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *args, call=call: calls.append(1) or call(*args))
    out, lse = packed.attend()
    dq, dk, dv = packed.differentiate(out, lse)
    assert len(calls) < 20
    if slots[0]:
        np.testing.assert_array_equal(out, packed.v)
        np.testing.assert_array_equal(dv, packed.dout)
    some = slice(-3, None)
    expected, expected_lse = oracle.attention(packed.q[None, some], packed.k[None, some], packed.v[None, some])
    if not slots[0]:
        np.testing.assert_allclose(out[some].astype(np.float64), expected[0], rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(lse[:, some], expected_lse[0], rtol=1e-5)


@pytest.mark.parametrize("slots", [(2048, 2048), (64,) * 128, (1,) * 20000, (4000, 1, 2, 3)],
                         ids=("2 of 2048", "128 of 64", "20000 of 1", "one long"))
def test_scratch_is_what_the_docstring_says(slots):
    packed = Packed.of("float16", slots, heads=(2, 2), dim=64)
    problem, out = packed.problem(causal=True), np.empty_like(packed.q)
    lse = cpu.attention_varlen(problem, packed.q, packed.k, packed.v, *packed.lengths, out)
    gradients = [np.empty_like(x) for x in (packed.q, packed.k, packed.v)]
    lengths = 64 * len(slots) + 2**16                   # the bookkeeping of the sequences, and Python's own objects
    longest = max(slots) * 128
    peak = peak_of(lambda: cpu.attention_varlen(problem, packed.q, packed.k, packed.v, *packed.lengths, out))
    assert peak < 4 * (4 * cpu.TILE_ELEMENTS + longest) + 2 * 4 * cpu.HEADS_ELEMENTS + lse.nbytes + lengths
    peak = peak_of(lambda: cpu.backward_varlen(problem, packed.dout, packed.q, packed.k, packed.v, out, lse,
                                               *packed.lengths, packed.dlse, *gradients))
    assert peak < 4 * (8 * cpu.TILE_ELEMENTS + 2 * longest) + 2 * 8 * cpu.HEADS_ELEMENTS + lengths
