"""The benchmarks without a GPU: what is counted, timed, compared, written; the whole path on NumPy arrays."""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import importlib.machinery
import itertools
import json
import math
import statistics
import subprocess
import sys
import types
import weakref
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from cuflash import config, jit, launch, oracle
from cuflash.cli import main as cuflash_main

REPO = Path(jit.__file__).resolve().parent.parent

command = importlib.import_module("cuflash.cli.bench")
cases, decode, memory, overhead, peers, record, run, table, timing = (
    command.library(name) for name in ("cases", "decode", "memory", "overhead", "peers", "record", "run", "table", "timing")
)
DECODING = [name for name in cases.SUITES if name.startswith("decode")]


def tiny(**changes):
    sizes = {
        "suite": "test",
        "dtype": "float32",
        "batch": 1,
        "seqlen_q": 24,
        "seqlen_k": 24,
        "heads_q": 2,
        "heads_k": 2,
        "head_dim": 16,
        "head_dim_v": 16,
    }
    return cases.Case(**{**sizes, **changes})


def tiny_decode(**changes):
    """Three requests of up to 40 keys."""
    sizes = {"batch": 3, "seqlen_q": 2, "seqlen_k": 40, "heads_q": 4, "causal": True, "graph": True}
    return decode.DecodeCase(**{**dataclasses.asdict(tiny()), **sizes, **changes})


# ------------------------------------------------------------------------------------------------------------
# Cases


def test_flops_and_bytes_by_hand():
    (case,) = cases.suite("forward", head_dims=[128], seqlens=[16384], causal=False)
    assert (case.batch, case.heads_q) == (1, 16)
    assert case.flops == 4 * 16 * 16384**2 * 128 == 2199023255552
    assert case.bytes == 4 * 16384 * 2048 * 2
    (causal,) = cases.suite("forward", head_dims=[128], seqlens=[16384], causal=True)
    assert causal.flops * 2 == case.flops
    # 2 queries of 3 see keys 0 to 1 and 0 to 2; products of 4 and of 8.
    assert tiny(
        seqlen_q=2, seqlen_k=3, causal=True, heads_q=1, heads_k=1, head_dim=4, head_dim_v=8
    ).flops == 2 * 5 * (4 + 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(3, 0), (2, 5), (None, 1), (0, None), (40, 40)])
@pytest.mark.parametrize("seqlens", [(7, 7), (5, 9), (9, 4)])
def test_pairs_of_a_window_are_those_of_the_oracle(causal, window, seqlens):
    case = tiny(seqlen_q=seqlens[0], seqlen_k=seqlens[1], causal=causal, window=window)
    assert case.pairs == oracle.visible(*seqlens, causal, window).sum()


@pytest.mark.parametrize("name", [name for name in cases.SUITES if name not in DECODING])
def test_suites(name):
    table = cases.suite(name)
    assert table and len({case.name for case in table}) == len(table) == len({case.seed for case in table})
    assert all(case.heads_q % case.heads_k == 0 and case.flops > 0 for case in table)
    assert {case.causal for case in table} == {False, True}
    assert {case.head_dim for case in cases.suite(name, head_dims=[32])} == {32}
    assert all(case.graph == (name == "small") for case in table)


@pytest.mark.parametrize("name", DECODING)
def test_suites_of_decoding(name):
    table = cases.suite(name)
    assert table and len({case.name for case in table}) == len(table)
    assert all(isinstance(case, decode.DecodeCase) and case.graph and case.causal for case in table)
    assert all(case.clocked == (name == "decode") for case in table)
    assert not any(case.causal for case in cases.suite(name, causal=False))
    head_dim = table[0].head_dim
    assert {case.head_dim for case in cases.suite(name, head_dims=[head_dim], dtype="float16")} == {head_dim}
    assert {case.seqlen_k for case in cases.suite(name, seqlens=[8192])} == {8192}
    with pytest.raises(ValueError, match=rf"suite {name} has no case of head_dim \[32\] and seqlen any"):
        cases.suite(name, head_dims=[32])


def test_sizes_of_decoding_by_hand():
    table = cases.suite("decode")
    assert len(table) == 4 * 6 and len(cases.suite("decode", head_dims=[64])) == 6
    case = table[0]
    assert case.name == "d128 s1/8192 b64 h32/8 causal" and case.seqlen_q == 1
    assert case.work == case.kv_bytes == 64 * 8192 * 8 * (128 + 128) * 2
    assert case.flops == 4 * 64 * 32 * 8192 * 128
    assert case.bytes == case.kv_bytes + 2 * 64 * 32 * 128 * 2
    assert case.rates(1e-3)["tb_per_s"] == pytest.approx(2.147, abs=1e-3)
    assert case.bound == (case.bytes / 4.25e12, "bytes")
    many = [case for case in cases.suite("decode-mla") if case.heads_q == 128][0]
    assert many.kv_bytes == 64 * 8192 * 576 * 2 and many.bound == (many.flops / 700e12, "flops")
    assert many.name == "d576/512 s1/8192 b64 h128/1 causal page64" and many.shapes[1] == (64 * 128, 64, 1, 576)
    assert many.rates(2 * many.bound[0])["share_of_bound"] == 0.5
    assert many.facts["bound"]["by"] == "flops" and many.facts["page_size"] == 64 and many.facts["v_is_k"]
    appends, skewed = cases.suite("decode-append")
    one = dataclasses.replace(appends, appended=0)
    assert appends.kv_bytes == one.kv_bytes and appends.bytes == one.bytes + 64 * 8 * 256 * 2
    assert sum(skewed.key_lengths) == 225589 and skewed.name == "d128 s1/32768 b64 t225589 h32/8 causal"
    assert 64 <= min(skewed.key_lengths) and max(skewed.key_lengths) < 32768 == skewed.seqlen_k
    assert skewed.facts["key_lengths"] == skewed.lengths_k and skewed.kv_bytes == 225589 * 8 * 256 * 2


def test_pairs_of_decoding_are_those_of_the_oracle():
    for causal in (False, True):
        case = tiny_decode(key_lengths=(40, 1, 7), seqlen_q=3, causal=causal)
        assert case.pairs == sum(oracle.visible(3, length, causal, None).sum() for length in (40, 1, 7))


def test_small_caches_take_turns_and_graphs_are_long_enough():
    l2 = 50 * 2**20
    large, small = cases.suite("decode", head_dims=[128])[0], cases.suite("decode", head_dims=[64])[-1]
    assert large.caches(l2) == 1 and large.calls_a_graph(1) == 2
    assert small.kv_bytes == 2**23 and small.caches(l2) == 25 and small.calls_a_graph(25) == 75
    assert tiny_decode().caches(l2) == 32 and tiny_decode().calls_a_graph(32) == 64


def test_what_is_asked_of_decoding():
    targets = {case.name: cases.asked(case) for case in cases.suite("decode")}
    assert targets["d128 s1/8192 b64 h32/8 causal"][0] == cases.Asked(4.0, figure="tb_per_s")
    assert targets["d128 s1/4096 b16 h32 causal"][0].bound == 3.5 and targets["d64 s1/2048 b128 h32/4 causal"][0].bound == 3.23
    assert [target.clock for target in targets["d128 s1/8192 b1 h64/8 causal"]] == [None, "single", "queued"]
    assert [cases.asked(case)[0].bound for case in cases.suite("decode-paged")] == [0.95, 0.95, 0.7] * 2
    assert cases.asked(cases.suite("decode-mla")[0]) == [cases.Asked(0.8, figure="share_of_bound")]
    assert cases.asked(tiny_decode()) == [] == cases.asked(cases.suite("decode-append")[0])
    entry = {"median_s": 1e-3, "tb_per_s": 3.9}
    assert not cases.Asked(4.0, figure="tb_per_s").judge(entry, None)["ok"]
    over = {"ratio": 1.2, "single": 0.9}
    assert cases.Asked(1.0, "fa3", clock="single").judge(entry, over) == {
        "what": "cuflash over fa3, single calls", "value": 0.9, "asked": 1.0, "ok": False
    }
    assert cases.Asked(1.0, "fa3").judge(entry, over)["ok"] and cases.Asked(1.0, "fa3", clock="queued").judge(entry, over) is None


def test_forward_is_16k_tokens_of_hidden_size_2048():
    table = cases.suite("forward")
    assert len(table) == 3 * 6 * 2
    assert all(case.batch * case.seqlen_q == 16384 and case.heads_q * case.head_dim == 2048 for case in table)
    assert {case.dtype for case in cases.suite("forward", dtype="float16")} == {"float16"}
    with pytest.raises(
        ValueError, match="dtype of suite forward must be one of bfloat16, float16; got 'float32'"
    ):
        cases.suite("forward", dtype="float32")
    with pytest.raises(ValueError, match="suite must be one of forward"):
        cases.suite("sideways")


def test_backward_counts_five_products_and_twice_the_arrays():
    table = cases.suite("backward")
    assert len(table) == 3 * 3 * 2 and all(case.backward and case.name.endswith(" bwd") for case in table)
    for case in table:
        forward = dataclasses.replace(case, backward=False)
        assert case.flops == 2.5 * forward.flops
        assert case.bytes == 2 * forward.bytes + 16384 * case.heads_q * 4
        assert case.result_shapes == case.shapes and forward.result_shapes == (case.out_shape,)
    # 2 queries of 3 see 5 keys in all; three products over 4, two over 8.
    assert tiny(
        seqlen_q=2, seqlen_k=3, causal=True, heads_q=1, heads_k=1, head_dim=4, head_dim_v=8, backward=True
    ).flops == 2 * 5 * (3 * 4 + 2 * 8)


def test_a_step_counts_both_passes():
    table = cases.suite("step")
    assert len(table) == 3 * 2 * 2 and all(case.backward and case.step for case in table)
    for case in table:
        backward = dataclasses.replace(case, step=False)
        forward = dataclasses.replace(backward, backward=False)
        assert case.name == backward.name.replace(" bwd", " fwd+bwd")
        assert case.flops == forward.flops + backward.flops
        assert case.bytes == forward.bytes + backward.bytes + 16384 * case.heads_q * 4  # lse, written and read


def test_grouped_heads_are_held_against_as_many_key_heads():
    table = cases.suite("gqa", head_dims=[128])
    assert {(case.heads_q, case.heads_k, case.backward) for case in table} == {
        (32, heads_k, backward) for heads_k in (8, 4) for backward in (False, True)
    }
    for case in table:
        alone = peers.problem_of("cuflash-mha", case)
        assert (alone.heads_q, alone.heads_k) == (32, 32) and alone.flops == case.flops and alone.seqlen_q == case.seqlen_q
        assert [target.contender for target in cases.asked(case)] == ["cuflash-mha"]
        with pytest.raises(peers.Unavailable, match="would be the case itself"):
            peers.problem_of("cuflash-mha", alone)


def test_other_head_dims_have_one_with_values_of_their_own():
    table = cases.suite("head-dims")
    assert {(case.head_dim, case.head_dim_v) for case in table} == {(96, 96), (192, 192), (192, 128)}
    assert {case.heads_q for case in table} == {2048 // 96, 2048 // 192}


def test_packed_sequences_count_their_own_lengths():
    case = cases.packed("test", "float16", (3, 0, 2), 2, 4)
    assert case.flops == 4 * 2 * (9 + 4) * 4 and case.name == "d4 s<=3 b3 t5 h2 full"
    assert dataclasses.replace(case, causal=True).flops == case.flops / 2
    assert dataclasses.replace(case, window=(0, 0)).pairs == 3 + 2
    assert case.shapes == ((5, 2, 4),) * 3 and case.out_shape == (5, 2, 4) and case.bytes == 4 * 5 * 2 * 4 * 2
    assert case.starts == [0, 3, 3, 5] and not case.is_uniform
    assert case.dense == tiny(
        dtype="float16", batch=2, seqlen_q=3, seqlen_k=3, head_dim=4, head_dim_v=4
    )
    x = np.arange(5 * 2).reshape(5, 2, 1)
    assert case.part(x, 2, 1).tolist() == [[7], [9]] and case.part(x, 1, 0).size == 0
    assert (case.alone(2).batch, case.alone(2).seqlen_q, case.alone(2).lengths) == (1, 2, ())


def test_varlen_is_16k_tokens_as_long_skewed_and_short():
    table = cases.suite("varlen")
    assert {case.backward for case in table} == {False, True} and {case.head_dim for case in table} == {64, 128}
    assert all(case.heads_q * case.head_dim == 2048 for case in table)
    uniform = [case for case in table if case.is_uniform]
    assert {case.lengths for case in uniform} == {(2048,) * 8, (1024,) * 16}
    for case in uniform:
        assert case.dense.flops == case.flops and case.dense.shapes[0] == (case.batch, case.seqlen_q, *case.shapes[0][1:])
    (skewed,) = {case.lengths for case in table if case.seqlen_q == 8192}
    assert len(skewed) == 17 and all(16 <= length <= 1024 for length in skewed[1:])
    assert skewed[1:5] == (890, 680, 265, 659)  # the same in every run
    dense = next(case.dense for case in table if case.seqlen_q == 8192)
    assert (dense.batch, dense.seqlen_q, dense.lengths) == (2, 8192, ())
    short = [case for case in table if case.wall]
    assert all(case.batch == 128 and 1 <= min(case.lengths) and case.seqlen_q <= 255 for case in short)
    assert len(table) == 2 * 4 * 2 * 2 and len(short) == 2 * 2 * 2


def test_a_table_of_packed_sequences_has_all_tokens():
    one, another = cases.table(
        dtype="float32", head_dims=[16], seqlens=[40, 700], causal=True, tokens=500, hidden=32, varlen=True, backward=True
    )
    for case, longest in ((one, 40), (another, 500)):
        assert sum(case.lengths) == 500 and 1 <= min(case.lengths) <= case.seqlen_q <= longest and case.backward
        assert (case.heads_q, case.causal) == (2, True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"window": (5, 2), "seqlen_q": 17},
        {"dtype": "float16"},
        {"heads_q": 6, "causal": True, "seqlen_k": 40},
        {"dtype": "bfloat16"},
        {"dtype": "float64", "seqlen_q": 40, "causal": True},
    ],
)
def test_the_truth_of_some_rows_is_that_of_the_oracle(changes):
    case = tiny(**changes)
    arrays = cases.make_arrays(case, "numpy")
    exact, _ = oracle.attention(arrays.q, arrays.k, arrays.v, **case.options)
    truth = cases.Truth(case, arrays)
    assert truth.error(exact) < 1e-12
    wrong = exact.copy()
    wrong[-1, -1, -1] += 1e-3
    assert truth.error(wrong) == pytest.approx(1e-3)
    wrong[0, 0, 0] = np.nan
    assert math.isnan(truth.error(wrong))


def test_the_truth_of_packed_sequences_is_that_of_each():
    case = cases.packed("test", "float32", (5, 0, 40, 7), 2, 16, causal=True)
    arrays = cases.make_arrays(case, "numpy")
    assert arrays.starts.dtype == np.int32 and arrays.starts.tolist() == [0, 5, 5, 45, 52]
    exact = np.concatenate(
        [
            oracle.attention(*(x[None, start:stop] for x in (arrays.q, arrays.k, arrays.v)), causal=True)[0][0]
            for start, stop in ((0, 5), (5, 45), (45, 52))
        ]
    )
    truth = cases.Truth(case, arrays)
    assert sorted(truth.expected) == [(0, 0), (2, 0), (3, 1)] and truth.error(exact) < 1e-12
    for row, head in ((4, 0), (44, 0), (51, 1)):
        wrong = exact.copy()
        wrong[row, head, -1] += 1e-3
        assert truth.error(wrong) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "seqlen_q": 9, "seqlen_k": 20, "head_dim_v": 8},
        {"causal": True, "seqlen_q": 20, "seqlen_k": 9},
        {"window": (3, 2), "heads_q": 4},
    ],
)
def test_the_truth_of_gradients_is_that_of_finite_differences(changes):
    case = tiny(dtype="float64", backward=True, batch=2, **changes)
    arrays = cases.make_arrays(case, "numpy")
    truth = cases.Truth(case, arrays)
    result = tuple(np.zeros(shape) for shape in case.shapes)
    step, group = 1e-5, case.heads_q // case.heads_k

    def loss():
        return (oracle.attention(arrays.q, arrays.k, arrays.v, **case.options)[0] * arrays.dout).sum()

    for (number, head), expected in truth.expected.items():
        for index, (x, gradient, (rows, values)) in enumerate(
            zip((arrays.q, arrays.k, arrays.v), result, expected, strict=True)
        ):
            place = (number, head // group if index else head)
            for row in (int(rows[0]), int(rows[len(rows) // 2]), int(rows[-1])):
                at = (place[0], row, place[1], 3)
                before, around = x[at], []
                for value in (before + step, before - step):
                    x[at] = value
                    around.append(loss())
                x[at] = before
                assert (around[0] - around[1]) / (2 * step) == pytest.approx(
                    values[list(rows).index(row), 3], rel=1e-5, abs=1e-7
                )
            gradient[place[0], rows, place[1]] = values
    assert truth.error(result) == 0
    result[2][0, 0, 0] *= 1.5
    assert truth.error(result) > 0.1
    result[1][0, 0, 0] = np.nan
    assert math.isnan(truth.error(result))


def keys_of(case, arrays, number):
    """The keys and values of a request, gathered one by one, those to append behind them."""
    length = case.lengths_k[number] - case.appended
    found = []
    for x, name in ((arrays.k, "k"), (arrays.v, "v")):
        rows = []
        for key in range(length):
            if case.page_size:
                page = arrays.given["block_table"][number, key // case.page_size]
                rows.append(x[page, key % case.page_size])
            else:
                rows.append(x[number, key])
        rows += list(arrays.given[name][number]) if case.appended else []
        found.append(np.array(rows).reshape(1, len(rows), *x.shape[2:]))
    return found


def exact_decode(case, arrays):
    """By the oracle, each request by itself."""
    outs = [oracle.attention(arrays.q[n : n + 1], *keys_of(case, arrays, n), **case.options)[0] for n in range(case.batch)]
    return np.concatenate(outs)


def append_by_hand(case, arrays):
    for cache, name in ((arrays.k, "k"), (arrays.v, "v")) if case.appended else ():
        for place, row in zip(arrays.places, arrays.given[name].reshape(-1, *cache.shape[2:]), strict=True):
            cache[place] = row


CACHES = [
    {},
    {"key_lengths": (40, 1, 17), "dtype": "float16"},
    {"page_size": 8, "causal": False},
    {"page_size": 1, "key_lengths": (3, 40, 20), "appended": 2, "dtype": "bfloat16"},
    {"key_lengths": (2, 40, 20), "appended": 1, "head_dim": 24, "v_is_k": True, "heads_k": 1},
    {"page_size": 10, "head_dim": 24, "v_is_k": True, "heads_k": 1, "seqlen_q": 1, "appended": 11},
]


@pytest.mark.parametrize("changes", CACHES)
def test_the_truth_of_decoding_is_that_of_the_oracle(changes):
    case = tiny_decode(**changes)
    arrays = cases.make_arrays(case, "numpy")
    assert tuple(x.shape for x in (arrays.q, arrays.k, arrays.v)) == case.shapes
    assert {name: (x.shape, x.dtype.name) for name, x in arrays.given.items()} == case.given_shapes
    assert np.shares_memory(arrays.k, arrays.v) == case.v_is_k
    truth, exact = cases.truth_of(case, arrays), exact_decode(case, arrays)
    if case.appended:
        arrays.unappend()
        assert math.isnan(truth.error(exact)), "nothing was appended"
        append_by_hand(case, arrays)
    assert truth.error(exact) < 1e-12
    for number, head in ((0, 0), (2, 3), (case.lengths_k.index(min(case.lengths_k)), 0)):
        wrong = exact.copy()
        wrong[number, -1, head] *= 1.1
        assert 0.05 < truth.error(wrong) < 0.1 + 1e-9  # of the row, or of the median row if that is larger
    wrong[0, 0, 0, 0] = np.nan
    assert math.isnan(truth.error(wrong))
    lost = dataclasses.replace(case, key_lengths=tuple(length - (length > 4) for length in case.lengths_k))
    assert truth.error(exact_decode(lost, arrays)) > case.tolerance, "a key is missing"


def test_caches_with_the_same_keys_are_alike_and_poisoned_behind_them():
    case = tiny_decode(key_lengths=(7, 40, 20))
    dense = cases.make_arrays(case, "numpy")
    assert np.isnan(dense.k[0, 7:]).all() and np.isnan(dense.v[2, 20:]).all() and not np.isnan(dense.k[1]).any()
    for changes in ({"page_size": 8}, {"page_size": 1, "appended": 1}, {"appended": 3}):
        other = dataclasses.replace(case, **changes)
        arrays = cases.make_arrays(other, "numpy")
        assert other.answer == case.answer and other.seed == case.seed and (arrays.q == dense.q).all()
        for number, length in enumerate(case.lengths_k):
            k, v = keys_of(other, arrays, number)
            assert (k[0] == dense.k[number, :length]).all() and (v[0] == dense.v[number, :length]).all()
        if other.page_size:
            pages = arrays.given["block_table"]
            assert (pages[0, -(-7 // other.page_size) :] == -1).all() and len(set(pages[1])) == other.max_pages
            assert sorted(pages[1]) != list(pages[1]), "in random order"
        assert arrays.given["cache_seqlens"].tolist() == [length - other.appended for length in case.lengths_k]


def test_calls_take_caches_in_turns():
    case = tiny_decode(page_size=8, appended=1)
    arrays = cases.make_arrays(case, "numpy")
    assert decode.in_turns(case, arrays, 1) is arrays
    turns = decode.in_turns(case, arrays, 3).turns
    assert len(turns) == 3 and turns[0] is arrays and len({x.k.ctypes.data for x in turns}) == 3
    assert all(x.q is arrays.q and np.array_equal(x.v, arrays.v, equal_nan=True) for x in turns)
    case = tiny_decode(head_dim=24, v_is_k=True, heads_k=1)
    turns = decode.in_turns(case, cases.make_arrays(case, "numpy"), 2).turns
    assert all(x.v.ctypes.data == x.k.ctypes.data for x in turns)
    calls = peers.InTurns([lambda: 1, lambda: 2])
    assert [calls() for _ in range(3)] == [1, 2, 1]


def test_errors_of_gradients_are_measured_by_the_size_of_their_row():
    b = np.ones((1, 5, 1, 4), np.float32)
    b[0, 0], b[0, 1], b[0, 2] = 100, 0, 1e-6
    a = b.copy()
    assert cases.largest_relative_difference(a, b) == 0
    a[0, 0] += 1
    assert cases.largest_relative_difference(a, b) == pytest.approx(0.01)
    a[0, 1, 0, 2] = 0.05  # beside a row of nothing: as large as the median row
    assert cases.largest_relative_difference(a, b) == pytest.approx(0.05)
    a[0, 3] = np.nan
    assert math.isnan(cases.largest_relative_difference(a, b))
    assert cases.largest_relative_difference(np.zeros((0, 2, 4)), np.zeros((0, 2, 4))) == 0


def test_data_is_normal_repeats_and_differs_by_case():
    case = tiny(seqlen_q=512)
    one, again = (cases.make_arrays(case, "numpy") for _ in range(2))
    assert (one.q == again.q).all() and abs(one.q.std() - 1) < 0.1
    assert (one.q[:, :24] != cases.make_arrays(tiny(causal=True), "numpy").q).any()


def test_largest_difference():
    a = np.zeros((2, 3), np.float32)
    b = a.copy()
    b[1, 2] = -0.5
    assert cases.largest_difference(a, b) == 0.5
    b[0, 0] = np.nan
    assert math.isnan(cases.largest_difference(a, b))


# ------------------------------------------------------------------------------------------------------------
# Timing


class FakeTimer:
    """Each call takes what the callable returns, and 100 times as long the first time in a block."""

    def __init__(self):
        self.order = []

    def block(self, call, runs):
        self.order.append((call, runs))
        seconds = call()
        return [seconds * 100] * (runs > 1) + [seconds] * (runs - 1 if runs > 1 else 1), {
            "nvml_sm_clock_mhz": 1700
        }

    def alive(self):
        return True


def test_contenders_take_turns_and_first_calls_do_not_count():
    timer, fast, slow = FakeTimer(), lambda: 1e-3, lambda: 1e-2
    results = timing.measure({"fast": fast, "slow": slow}, timer, min_runs=10, min_seconds=0.06, rounds=3)
    assert results["fast"].median == 1e-3 and len(results["fast"].seconds) == 60
    assert results["slow"].median == 1e-2 and len(results["slow"].seconds) == 12  # 10, in three equal rounds
    blocks = [call for call, _ in timer.order[4:]]
    assert blocks == [fast, slow, slow, fast, fast, slow]
    assert results["fast"].spread == 0 and results["fast"].record()["nvml_sm_clock_mhz"] == 1700


@pytest.mark.parametrize("count", range(1, 7))
def test_contenders_follow_each_other_equally_often(count):
    """As what ran before sets the clock."""
    rounds = timing.balanced_rounds(count)
    assert rounds == {2: 4, 3: 6, 4: 4, 5: 10}.get(count, rounds)
    orders = [timing.order_of_round(count, turn) for turn in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = [pair for order in orders for pair in itertools.pairwise(order)]
    places = [place for order in orders for place in enumerate(order)]
    for met, kinds in ((followed, count * (count - 1)), (places, count * count)):
        assert len(set(met)) == kinds and len({met.count(one) for one in met}) <= 1


def test_a_run_of_many_calls_counts_as_all_of_them():
    timer = FakeTimer()
    timer.calls_a_run = 20
    results = timing.measure({"fast": lambda: 1e-3, "slow": lambda: 0.1}, timer, min_runs=3, min_seconds=0.12)
    assert len(results["fast"].seconds) == 8 and results["slow"].seconds == [0.1]  # 6, in four equal rounds


def test_a_slow_contender_is_called_once():
    timer = FakeTimer()
    results = timing.measure({"slow": lambda: 3.0}, timer)
    assert results["slow"].seconds == [3.0] and len(timer.order) == 1


def test_a_contender_that_raises_leaves_and_the_others_stay():
    calls = iter([1e-3] * 4)

    def breaks():
        try:
            return next(calls)
        except StopIteration:
            raise RuntimeError("out of luck") from None

    results = timing.measure({"breaks": breaks, "works": lambda: 1e-3, "never": lambda: 1 / 0}, FakeTimer())
    assert str(results["breaks"]) == "out of luck" and isinstance(results["never"], ZeroDivisionError)
    assert results["works"].median == 1e-3


def test_figures_of_a_timing():
    seconds = [float(number) for number in range(1, 102)]
    figures = timing.Timing(
        (tuple(seconds[:50]), tuple(seconds[50:])), ({"power_w": 100.04}, {"power_w": 300.0})
    ).record()
    assert figures["median_s"] == statistics.median(seconds) == 51
    assert (figures["min_s"], figures["p10_s"], figures["p90_s"], figures["runs"]) == (1, 11, 91, 101)
    assert (
        figures["round_medians_s"] == [25.5, 76]
        and figures["power_w"] == 200
        and figures["nvml_sm_clock_mhz"] is None
    )


def test_the_wall_clock_waits_for_the_gpu_and_divides_a_queue(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    waits = []
    timer = timing.WallTimer(lambda: (waits.append(0), advance(1.0)), calls_a_run=4)
    seconds, reading = timer.block(lambda: advance(0.5), 3)
    assert seconds == [(4 * 0.5 + 1) / 4] * 3 and reading == {} and len(waits) == 4 and timer.alive()
    assert timing.WallTimer().block(lambda: advance(0.5), 2)[0] == [0.5, 0.5]


def test_no_management_library_means_no_readings(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(timing.ctypes, "CDLL", missing)
    nvml = timing.Nvml("0000:01:00.0")
    assert nvml.read() == {} and nvml.driver() is None


class FakeCupy(types.ModuleType):
    """As much of CuPy as a timer uses: a clock that each call moves on by a millisecond."""

    def __init__(self):
        super().__init__("cupy")
        self.now, self.flushed, self.uint8 = 0.0, 0, np.uint8
        fake = self

        class Event:
            def record(self, stream):
                self.at = fake.now

        class Buffer:
            nbytes = 64

            @property
            def data(self):
                return self

            def memset_async(self, value, size, stream):
                fake.flushed += size
                fake.now += 50

        self.empty = lambda size, dtype: Buffer()
        stream = types.SimpleNamespace(synchronize=lambda: None)
        runtime = types.SimpleNamespace(
            getDevice=lambda: 0, getDeviceProperties=lambda device: {"l2CacheSize": 8}
        )
        self.cuda = types.SimpleNamespace(
            Event=Event,
            get_current_stream=lambda: stream,
            runtime=runtime,
            get_elapsed_time=lambda start, end: end.at - start.at,
        )

    def work(self):
        self.now += 1


@pytest.mark.parametrize("cold", [True, False])
def test_events_enclose_the_call_and_not_the_flush(monkeypatch, cold):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monitor = types.SimpleNamespace(read=lambda: {"power_w": 1.0})
    seconds, reading = timing.CudaTimer(cold=cold, monitor=monitor, calls_a_run=4).block(cupy.work, 3)
    assert seconds == pytest.approx([0.25e-3] * 3) and reading == {"power_w": 1.0}
    assert cupy.flushed == (3 * 64 if cold else 0)


# ------------------------------------------------------------------------------------------------------------
# Contenders


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "dtype": "float16"},
        {"heads_q": 4, "window": (7, 0)},
        {"dtype": "bfloat16"},
        {"dtype": "float64", "batch": 2, "seqlen_k": 40, "causal": True},
    ],
)
def test_contenders_agree_on_the_cpu(changes):
    case = tiny(**changes)
    arrays = cases.make_arrays(case, "numpy")
    truth = cases.Truth(case, arrays)
    for name in ("cuflash", "unfused"):
        out = peers.make(name, case, arrays)()
        assert (
            out.shape == (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v)
            and out.dtype == arrays.q.dtype
        )
        assert truth.error(out) <= cases.TOLERANCE[case.dtype] / 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "dtype": "float16"},
        {"heads_q": 4, "window": (7, 0), "batch": 2},
        {"dtype": "float64", "batch": 2, "seqlen_k": 40, "causal": True, "head_dim_v": 8},
        {"lengths": (24, 0, 5), "causal": True},
        {"lengths": (24, 0, 5), "heads_q": 4, "window": (3, 1)},
        {"step": True, "causal": True},
    ],
)
def test_contenders_agree_on_gradients_and_packed_sequences(changes):
    packed = "lengths" in changes
    for backward in (False, True) if packed else (True,):
        case = tiny(backward=backward, **({"batch": 3} if packed else {}), **changes)
        arrays = cases.make_arrays(case, "numpy")
        truth = cases.Truth(case, arrays)
        for name in ("cuflash", "unfused", *(["cuflash-deterministic"] if backward else [])):
            result = peers.make(name, case, arrays)()
            results = result if backward else (result,)
            assert tuple(x.shape for x in results) == case.result_shapes and {x.dtype for x in results} == {arrays.q.dtype}
            assert truth.error(result) <= cases.TOLERANCE[case.dtype] / 4


def test_windows_are_held_against_a_causal_mask_and_float16_against_bfloat16():
    both, narrow, wide = cases.suite("window", head_dims=[128])
    assert peers.problem_of("cuflash-causal", narrow) == peers.problem_of("cuflash-causal/sm80", wide)
    causal = peers.problem_of("cuflash-causal", both)
    assert causal.causal and causal.window is None and causal.shapes == both.shapes and causal.flops > narrow.flops
    assert cases.asked(narrow) == [cases.Asked(0.8, "cuflash-causal")] and cases.asked(wide) == cases.asked(both) == []
    (half,) = cases.suite("forward", dtype="float16", head_dims=[64], seqlens=[512], causal=False)
    assert peers.problem_of("cuflash-bfloat16", half) == dataclasses.replace(half, dtype="bfloat16")
    assert cases.Asked(0.98, "cuflash-bfloat16") in cases.asked(half)
    for name, case in (("cuflash-causal", causal), ("cuflash-bfloat16", narrow)):
        with pytest.raises(peers.Unavailable, match="would be the case itself"):
            peers.problem_of(name, case)


def test_a_forward_has_no_deterministic_contender_and_dense_is_for_packed_sequences():
    case = tiny()
    with pytest.raises(peers.Unavailable, match="every forward is deterministic"):
        peers.make("cuflash-deterministic", case, cases.make_arrays(case, "numpy"))
    with pytest.raises(peers.Unavailable, match="the sequences are not packed"):
        peers.problem_of("cuflash-dense", case)
    packed = cases.packed("test", "float32", (3, 3), 2, 16)
    assert peers.problem_of("cuflash-dense/simt", packed) == packed.dense and peers.problem_of("fa3", packed) is packed
    with pytest.raises(peers.Unavailable, match="not the host's time"):
        peers.problem_of("cuflash-dense", dataclasses.replace(packed, wall=True))


class FakeCublas:
    """gemmStridedBatchedEx by NumPy, on host memory: column-major, as cuBLAS documents it."""

    def gemmStridedBatchedEx(
        self,
        handle,
        trans_a,
        trans_b,
        m,
        n,
        k,
        alpha,
        a,
        a_type,
        lda,
        stride_a,
        b,
        b_type,
        ldb,
        stride_b,
        beta,
        c,
        c_type,
        ldc,
        stride_c,
        count,
        compute,
        algorithm,
    ):
        assert handle == 7 and {a_type, b_type, c_type} == {1} and compute == 70

        def read(pointer, *shape, strides=None):
            size = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
            buffer = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_double)), (size,))
            return np.lib.stride_tricks.as_strided(buffer, shape, [8 * step for step in strides])

        scale, keep = read(alpha, 1, strides=[1])[0], read(beta, 1, strides=[1])[0]
        assert keep == 0
        for number in range(count):
            left = read(a + 8 * number * stride_a, *((k, m) if trans_a else (m, k)), strides=(1, lda))
            right = read(b + 8 * number * stride_b, *((n, k) if trans_b else (k, n)), strides=(1, ldb))
            read(c + 8 * number * stride_c, m, n, strides=(1, ldc))[...] = (
                scale * (left.T if trans_a else left) @ (right.T if trans_b else right)
            )


@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_products_of_unfused_attention_on_a_gpu(heads_k):
    """The pointers, strides and order of operands that cuBLAS is given, on NumPy arrays that look like
    CuPy's.
    """
    case = tiny(
        dtype="float64", batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_k=heads_k, head_dim=3, head_dim_v=6
    )
    arrays = cases.make_arrays(case, "numpy")
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(Device=lambda: types.SimpleNamespace(cublas_handle=7))
    )

    def like_cupy(x):
        return types.SimpleNamespace(
            data=types.SimpleNamespace(ptr=x.ctypes.data), strides=x.strides, shape=x.shape, array=x
        )

    scores, out = np.full((2, 4, 5, 7), np.nan), np.full((2, 5, 4, 6), np.nan)
    q, k, v, s, o = map(like_cupy, (arrays.q, arrays.k, arrays.v, scores, out))
    peers._batched_product(cupy, FakeCublas(), case, "scores", q, k, s, alpha=0.5)
    k_all, v_all = (np.repeat(x, 4 // heads_k, axis=2) for x in (arrays.k, arrays.v))
    np.testing.assert_allclose(scores, 0.5 * np.einsum("bihd,bjhd->bhij", arrays.q, k_all))
    peers._batched_product(cupy, FakeCublas(), case, "rows", s, v, o)
    np.testing.assert_allclose(out, np.einsum("bhij,bjhd->bihd", scores, v_all))


class LikeCupy(np.ndarray):
    """An array with its address where CuPy has it."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def numpy_as_cupy(monkeypatch):
    """NumPy in CuPy's place, as far as unfused attention uses it."""
    fake = types.ModuleType("cupy")
    fake.__dict__.update({name: getattr(np, name) for name in ("arange", "asarray", "exp", "float32", "where")})
    fake.ndarray = LikeCupy
    fake.empty = lambda shape, dtype: np.full(shape, np.nan, dtype).view(LikeCupy)
    fake.cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(cublas_handle=7),
        runtime=types.SimpleNamespace(memGetInfo=lambda: (2**40, 2**40)),
    )
    libs = types.ModuleType("cupy_backends.cuda.libs")
    libs.cublas = FakeCublas()
    for name, module in (("cupy", fake), ("cupy_backends", libs), ("cupy_backends.cuda", libs), (libs.__name__, libs)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(jit, "import_cupy", lambda: fake)
    return fake


@pytest.mark.parametrize("changes", [{}, {"causal": True, "seqlen_k": 31, "head_dim_v": 8}, {"window": (4, 2)}])
def test_unfused_attention_on_a_gpu(numpy_as_cupy, changes):
    """Its forward and backward, on NumPy arrays that look like CuPy's."""
    case = tiny(dtype="float64", batch=2, backward=True, **changes)
    arrays = cases.make_arrays(case, "numpy")
    like_cupy = cases.Arrays("cupy", *(x.view(LikeCupy) for x in (arrays.q, arrays.k, arrays.v, arrays.dout)))
    forward = dataclasses.replace(case, backward=False)
    assert cases.Truth(forward, arrays).error(peers.make("unfused", forward, like_cupy)()) < 1e-12
    backward = peers.make("unfused", case, like_cupy)
    for _ in range(2):  # a call leaves what the next one needs
        assert cases.Truth(case, arrays).error(backward()) < 1e-10
    with pytest.raises(peers.Unavailable, match="no grouped heads"):
        peers.make("unfused", dataclasses.replace(case, heads_q=4), like_cupy)
    with pytest.raises(peers.Unavailable, match="no packed sequences"):
        peers.make("unfused", cases.packed("test", "float64", (3, 4), 2, 16), like_cupy)


class FakeTensor:
    """A tensor that knows by what name it goes, and which way its axes lie."""

    def __init__(self, name, transposed=False):
        self.name, self.transposed = name, transposed

    def transpose(self, a, b):
        assert (a, b) == (1, 2)
        return FakeTensor(self.name, not self.transposed)

    def __repr__(self):
        return self.name + "^T" * self.transposed


def fake_torch(monkeypatch):
    """PyTorch's operators by the parameter names of their schemas (2.6 to 2.13); they return names, and keep the
    arguments of the last call.
    """
    torch, attention, seen = types.ModuleType("torch"), types.ModuleType("torch.nn.attention"), {}
    torch.__version__ = "2.11"
    attention.SDPBackend = types.SimpleNamespace(FLASH_ATTENTION="flash", CUDNN_ATTENTION="cudnn")

    def operator(parameters, results):
        names = parameters.split()

        def call(*arguments, **options):
            seen.clear()
            seen.update(zip(names, arguments, strict=False), **options)
            assert len(arguments) <= len(names)
            return tuple(FakeTensor(name, transposed=not name.islower()) for name in results.split())

        return call

    saved = "cum_seq_q cum_seq_k max_q max_k"
    gradients = "grad_out query key value out logsumexp"
    torch.ops = types.SimpleNamespace(
        aten=types.SimpleNamespace(
            _scaled_dot_product_flash_attention=operator(
                "query key value dropout_p is_causal return_debug_mask", f"output logsumexp {saved} rng_state unused debug"
            ),
            _scaled_dot_product_flash_attention_backward=operator(
                f"{gradients} {saved} dropout_p is_causal philox_seed philox_offset", "dq dk dv"
            ),
            _scaled_dot_product_cudnn_attention=operator(
                "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
                f"output logsumexp {saved} philox_seed philox_offset debug",
            ),
            _scaled_dot_product_cudnn_attention_backward=operator(
                f"{gradients} philox_seed philox_offset attn_bias {saved} dropout_p is_causal", "dq dk dv"
            ),
            _flash_attention_forward=operator(
                f"query key value {saved} dropout_p is_causal return_debug_mask", "output logsumexp rng_state unused debug"
            ),
            _flash_attention_backward=operator(
                f"{gradients} {saved} dropout_p is_causal rng_state unused", "dq dk dv"
            ),
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.nn.attention", attention)
    return seen


@pytest.mark.parametrize(
    "name, packed, expected",
    [
        (
            "sdpa_flash",
            False,
            "grad_out=dout^T query=q^T key=k^T value=v^T out=output logsumexp=logsumexp cum_seq_q=cum_seq_q "
            "cum_seq_k=cum_seq_k max_q=max_q max_k=max_k dropout_p=0.0 is_causal=True philox_seed=rng_state "
            "philox_offset=unused",
        ),
        (
            "sdpa_cudnn",
            False,
            "grad_out=dout^T query=q^T key=k^T value=v^T out=output logsumexp=logsumexp philox_seed=philox_seed "
            "philox_offset=philox_offset attn_bias=None cum_seq_q=cum_seq_q cum_seq_k=cum_seq_k max_q=max_q max_k=max_k "
            "dropout_p=0.0 is_causal=True",
        ),
        (
            "sdpa_flash",
            True,
            "grad_out=dout query=q key=k value=v out=output logsumexp=logsumexp cum_seq_q=starts cum_seq_k=starts "
            "max_q=24 max_k=24 dropout_p=0.0 is_causal=True rng_state=rng_state unused=unused",
        ),
    ],
)
def test_backwards_of_torch_by_their_operators(monkeypatch, name, packed, expected):
    seen = fake_torch(monkeypatch)
    changes = {"lengths": (24, 3), "batch": 2} if packed else {}
    case = tiny(dtype="bfloat16", causal=True, backward=True, **changes)
    arrays = cases.Arrays("torch", *map(FakeTensor, ("q", "k", "v", "dout", "starts")))
    results = peers.make(name, case, arrays)()
    assert " ".join(f"{key}={value}" for key, value in seen.items()) == expected
    assert " ".join(map(str, results)) == ("dq dk dv" if packed else "dq^T dk^T dv^T")


@pytest.mark.parametrize("name", ["cuflash", "sdpa_flash", "sdpa_cudnn"])
@pytest.mark.parametrize("step", [False, True])
def test_only_a_step_runs_the_forward_in_each_call(monkeypatch, name, step):
    called = []
    monkeypatch.setattr(peers, "_with_forward", lambda case, forward, backward: called.append((forward, backward)))
    case = tiny(dtype="bfloat16", backward=True, step=step)
    if name == "cuflash":
        peers.make(name, case, cases.make_arrays(case, "numpy"))
    else:
        fake_torch(monkeypatch)
        peers.make(name, case, cases.Arrays("torch", *map(FakeTensor, ("q", "k", "v", "dout"))))
    monkeypatch.undo()
    ((forward, backward),) = called
    log = []
    call = peers._with_forward(case, lambda: log.append("forward") or forward(), backward)
    assert len(call()) == len(call()) == 3 and len(log) == (2 if step else 1)


def test_packed_sequences_through_torch_and_fa3(monkeypatch):
    seen = fake_torch(monkeypatch)
    case = tiny(dtype="bfloat16", lengths=(24, 3), batch=2)
    arrays = cases.Arrays("torch", *map(FakeTensor, ("q", "k", "v", "dout", "starts")))
    assert str(peers.make("sdpa_flash", case, arrays)()) == "output"
    assert [str(value) for value in seen.values()] == ["q", "k", "v", "starts", "starts", "24", "24", "0.0", "False", "False"]
    with pytest.raises(peers.Unavailable, match="takes no packed sequences"):
        peers.make("sdpa_cudnn", case, arrays)
    with pytest.raises(peers.Unavailable, match="multiples of 8"):
        peers.make("sdpa_flash", dataclasses.replace(case, head_dim=20), arrays)

    fa3 = types.ModuleType("fa3_fwd_interface")
    fa3.flash_attn_func = None
    fa3.flash_attn_varlen_func = lambda *arguments, **options: (arguments, options)
    fa3.__spec__ = importlib.machinery.ModuleSpec("fa3_fwd_interface", None)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fa3)
    arguments = peers.make("fa3", case, arrays)()
    assert [str(value) for value in arguments] == ["q", "k", "v", "starts", "starts", "24", "24"]
    with pytest.raises(peers.Unavailable, match="fa3_fwd_interface has no backward"):
        peers.make("fa3", dataclasses.replace(case, backward=True), arrays)


def test_backward_of_fa3_through_jax(monkeypatch):
    fake_torch(monkeypatch)
    sys.modules["torch"].from_dlpack = lambda x: f"torch:{x}"
    names = ("jax", "jax.dlpack", "flash_attn3_jax", "flash_attn3_jax.flash")
    jax, dlpack, _, flash = made = [types.ModuleType(name) for name in names]
    for name, module in zip(names, made, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    passed, called = [], []

    def from_dlpack(x):
        passed.append(str(x))
        return f"jax:{x}"

    dlpack.from_dlpack, jax.jit = from_dlpack, lambda function: function
    flash._flash_mha_fwd = lambda *arguments: called.append(arguments) or ("out", "lse")
    flash._flash_mha_bwd = lambda *arguments: called.append(arguments) or ("dq", "dk", "dv")
    arrays = cases.Arrays("torch", *map(FakeTensor, ("q", "k", "v", "dout")))
    case = tiny(dtype="bfloat16", causal=True, backward=True, head_dim=64, head_dim_v=64)
    call = peers.make("fa3_jax", case, arrays)
    assert call() == call() == ("torch:dq", "torch:dk", "torch:dv")
    inputs, options = ("jax:q", "jax:k", "jax:v"), (0.125, True, (-1, -1))
    assert called == [(*inputs, *options), *[("jax:dout", *inputs, "out", "lse", *options)] * 2]
    assert passed == ["q", "k", "v", "dout", "dout"]  # dout in each call: JAX waits for it
    for change, why in (
        ({"backward": False}, "for its backward"), ({"step": True}, "for its backward"), ({"window": (5, 0)}, "windows"),
        ({"lengths": (24, 3), "batch": 2}, "packed"), ({"head_dim": 256, "head_dim_v": 256}, "up to 128"),
        ({"head_dim_v": 32}, "up to 128"), ({"dtype": "float32"}, "takes float16"),
    ):
        with pytest.raises(peers.Unavailable, match=why):
            peers.make("fa3_jax", dataclasses.replace(case, **change), arrays)


def test_cuflash_gets_what_its_functions_take(monkeypatch):
    seen = []

    def note(name):
        def call(*arguments, **options):
            seen.append((name, arguments, options))
            return ("out", "lse") if options.get("return_lse") else name

        monkeypatch.setattr(peers.cuflash, name, call, raising=False)

    for name in ("attention", "attention_varlen", "attention_backward", "attention_varlen_backward"):
        note(name)
    arrays = cases.Arrays("cupy", "q", "k", "v", "dout", "starts")
    case = tiny(causal=True, window=(5, 0), backward=True)
    assert peers.make("cuflash-deterministic/simt", case, arrays)() == "attention_backward"
    options = {"causal": True, "window": (5, 0)}
    assert seen == [
        ("attention", ("q", "k", "v"), options | {"return_lse": True}),
        ("attention_backward", ("dout", "q", "k", "v", "out", "lse"), options | {"deterministic": True}),
    ]
    seen.clear()
    case = tiny(lengths=(24, 3), batch=2, backward=True)
    assert peers.make("cuflash", case, arrays)() == "attention_varlen_backward"
    peers.make("cuflash", dataclasses.replace(case, backward=False), arrays)()
    assert seen == [
        ("attention_varlen", ("q", "k", "v", "starts", "starts"), {"causal": False, "return_lse": True}),
        ("attention_varlen_backward", ("dout", "q", "k", "v", "out", "lse", "starts", "starts"), {"causal": False}),
        ("attention_varlen", ("q", "k", "v", "starts", "starts"), {"causal": False}),
    ]


def test_decoding_through_cuflash_and_fa3(monkeypatch):
    seen = []

    def attend(*arguments, **options):
        seen.append((arguments, options))
        return "out", "lse"

    monkeypatch.setattr(peers.cuflash, "attention_with_kvcache", attend, raising=False)
    fa3 = types.ModuleType("fa3_fwd_interface")
    fa3.flash_attn_with_kvcache = attend
    fa3.__spec__ = importlib.machinery.ModuleSpec("fa3_fwd_interface", None)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fa3)
    monkeypatch.setattr(peers, "_torch", lambda arrays: None)
    case = tiny_decode(dtype="bfloat16", page_size=8, appended=1)
    given = {"cache_seqlens": "lengths", "block_table": "table", "k": "new k", "v": "new v"}
    arrays = decode.DecodeArrays("torch", "q", "k", "v", given=given)
    peers.make("cuflash", case, arrays)()
    assert peers.make("fa3", case, arrays)() == "out"
    table = {name: value for name, value in given.items() if name != "block_table"} | {"page_table": "table"}
    assert seen == [(("q", "k", "v"), given | {"causal": True}), (("q", "k", "v"), table | {"causal": True})]
    # Columns that are keys alone, and those that are values too.
    seen.clear()
    case = tiny_decode(dtype="bfloat16", head_dim=24, heads_k=1, v_is_k=True)
    arrays = cases.make_arrays(case, "numpy")
    peers.make("fa3", case, arrays)()
    ((q, k, v), options), = seen
    assert (q.shape, k.shape, v.shape) == ((3, 2, 4, 8), (3, 40, 1, 8), (3, 40, 1, 16))
    assert (options["qv"] == arrays.q[..., :16]).all() and (q == arrays.q[..., 16:]).all() and options["k"] is None
    with pytest.raises(peers.Unavailable, match="appends to no keys that are values too"):
        peers.make("fa3", dataclasses.replace(case, appended=1), arrays)
    # One callable for each of the caches.
    case = tiny_decode()
    seen.clear()
    call = peers.make("cuflash", case, decode.in_turns(case, cases.make_arrays(case, "numpy"), 2))
    call(), call(), call()
    assert seen[0][0][1] is not seen[1][0][1] and seen[0][0][1] is seen[2][0][1]


def test_who_takes_part_in_decoding(monkeypatch):
    case = tiny_decode(page_size=8)
    arrays = cases.make_arrays(case, "numpy")
    for name in ("unfused", "sdpa_flash", "fa4", "flashinfer"):
        with pytest.raises(peers.Unavailable, match="takes no pages"):
            peers.make(name, case, arrays)
    for name in ("cuflash-deterministic", "cuflash-cupy"):
        with pytest.raises(peers.Unavailable, match="every forward is deterministic|numpy's already"):
            peers.make(name, case, arrays)
    plain = tiny_decode()
    arrays = cases.make_arrays(plain, "numpy")
    assert cases.truth_of(plain, arrays).error(peers.make("unfused", plain, arrays)()) < plain.tolerance / 4
    assert not tiny_decode(key_lengths=(40, 40, 39)).is_plain and tiny_decode(key_lengths=(40,) * 3).is_plain
    others = {
        "cuflash-contiguous": ({"page_size": 8}, {"page_size": 0}),
        "cuflash-one-query": ({}, {"seqlen_q": 1}),
        "cuflash-no-append": ({"appended": 1}, {"appended": 0}),
        "cuflash-uniform": ({"key_lengths": (1, 2, 3)}, {"key_lengths": (), "seqlen_k": 8192}),
    }
    for name, (own, beside) in others.items():
        case = tiny_decode(**own)
        assert peers.problem_of(f"{name}/simt", case) == dataclasses.replace(case, **beside) and name in peers.CONTENDERS
        for same in (tiny(), tiny_decode(seqlen_q=1)):
            with pytest.raises(peers.Unavailable, match="would be the case itself"):
                peers.problem_of(name, same)
    assert peers.is_clocked("cuflash-cupy/sm80") and peers.is_clocked("fa3") and not peers.is_clocked("sdpa_flash")


def test_one_query_through_torch_sees_all_keys(monkeypatch):
    fake_torch(monkeypatch)
    torch, seen = sys.modules["torch"], []
    torch.nn = types.SimpleNamespace(functional=types.SimpleNamespace())

    def sdpa(*arguments, **options):
        seen.append((*map(str, arguments), options))
        return FakeTensor("out")

    torch.nn.functional.scaled_dot_product_attention = sdpa
    torch.no_grad = sys.modules["torch.nn.attention"].sdpa_kernel = lambda *kind: contextlib.nullcontext()
    arrays = decode.DecodeArrays("torch", *map(FakeTensor, "qkv"), given={})
    case = tiny_decode(dtype="bfloat16", seqlen_q=1)
    assert str(peers.make("sdpa_flash", case, arrays)()) == "out^T"
    assert seen[-1] == ("q^T", "k^T", "v^T", {"is_causal": False, "enable_gqa": True})
    with pytest.raises(peers.Unavailable, match="aligned top-left"):
        peers.make("sdpa_flash", tiny_decode(dtype="bfloat16"), arrays)


@pytest.fixture
def nothing_installed(monkeypatch):
    """No peer can be imported, whatever this machine has."""
    real = importlib.util.find_spec
    absent = ("torch", "fa3_fwd_interface", "flash_attn_interface", "flash_attn3_jax", "flash_attn", "flashinfer")
    monkeypatch.setattr(
        peers.importlib.util,
        "find_spec",
        lambda name, *rest: None if name.split(".")[0] in absent else real(name, *rest),
    )
    for name in list(sys.modules):
        if name.split(".")[0] in absent:
            monkeypatch.delitem(sys.modules, name)


def test_a_peer_that_is_not_installed_gives_the_reason(nothing_installed):
    for name in ("sdpa_flash", "fa3", "fa3_jax", "fa4", "flashinfer"):
        assert peers.missing(name).startswith("not installed (no module ")
    assert peers.missing("cuflash") is None and peers.missing("unfused") is None


def test_a_peer_that_does_not_take_the_arrays_gives_the_reason():
    case = tiny()
    arrays = cases.make_arrays(case, "numpy")
    for name in ("sdpa_flash", "sdpa_math", "fa3", "fa3_jax", "fa4", "flashinfer"):
        with pytest.raises(peers.Unavailable, match="takes torch tensors, not numpy arrays"):
            peers.make(name, case, arrays)
    with pytest.raises(peers.Unavailable, match="tiers are for GPUs"):
        peers.make("cuflash/simt", case, arrays)


def test_a_module_whose_import_breaks_is_unavailable(monkeypatch, tmp_path):
    (tmp_path / "broken_peer.py").write_text("raise SyntaxError('built for\\nanother version')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(peers.Unavailable, match="cannot import broken_peer: built for another version"):
        peers._module("broken_peer")


def test_sides_of_a_window_as_peers_want_them():
    assert peers._sides(tiny(window=(3, None)), -1) == (3, -1)
    assert peers._sides(tiny(window=(3, 5), causal=True), -1) == (3, 0)
    assert peers._sides(tiny(), None) == (None, None)


# ------------------------------------------------------------------------------------------------------------
# Runs and records


def bench_of(names, timer=None, **settings):
    lines = []
    return run.Bench(names, device_id=None, timer=timer, say=lines.append, **settings), lines


@pytest.fixture
def contenders(monkeypatch):
    """Contenders of the test's own: right ones, wrong ones, and two that do not get that far."""

    def right(case, arrays):
        exact, _ = oracle.attention(arrays.q, arrays.k, arrays.v, **case.options)
        return lambda: exact.astype(arrays.q.dtype)

    def wrong(case, arrays):
        return lambda: right(case, arrays)() + np.float32(0.5)

    def refuses(case, arrays):
        raise peers.Unavailable("has no such case")

    def breaks(case, arrays):
        raise RuntimeError("a long\nstory")

    def subtly_wrong(case, arrays):
        out = right(case, arrays)()
        out[0, :, 1] = 0  # in a head that the truth has no rows of
        return lambda: out

    table = {
        "cuflash": right,
        "good": right,
        "wrong": wrong,
        "refuses": refuses,
        "breaks": breaks,
        "subtle": subtly_wrong,
    }
    monkeypatch.setattr(peers, "CONTENDERS", table)
    return table


class NamedTimer:
    """Seconds by order of the contenders, whatever they do."""

    def __init__(self, *seconds):
        self.seconds, self.calls = seconds, []

    def block(self, call, runs):
        if call not in self.calls:
            self.calls.append(call)
        return [self.seconds[self.calls.index(call)]] * runs, {}

    def alive(self):
        return True


def test_a_record_holds_results_reasons_and_ratios(contenders, tmp_path):
    case = tiny(heads_q=3, heads_k=3)
    bench, lines = bench_of(
        ["cuflash", "good", "wrong", "refuses", "breaks", "subtle"], NamedTimer(1e-3, 2e-3)
    )
    path = tmp_path / "deep" / "record.json"
    bench.run([case], suite="test", path=str(path))
    written = json.loads(path.read_text())
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]
    assert (
        written["complete"]
        and written["suite"] == "test"
        and written["environment"]["kernels_digest"] == jit.digest()
        and written["environment"]["kernel_digests"] == jit.kernel_digests()
    )
    assert written["environment"]["date"].startswith("20") and written["environment"]["device"] == "cpu"
    (one,) = written["cases"]
    assert one["flops"] == case.flops and one["shapes"] == [list(shape) for shape in case.shapes]
    results = one["results"]
    assert results["cuflash"]["median_s"] == 1e-3 and results["cuflash"]["tflops"] == pytest.approx(
        case.flops * 1e-9, rel=1e-4
    )
    assert results["cuflash"]["runs"] == 60 and results["cuflash"]["share_of_limit"] is None
    assert results["wrong"]["failed"].startswith("wrong result: off by 0.5 from float64")
    assert "from cuflash" in results["subtle"]["failed"]
    assert results["refuses"] == {"unavailable": "has no such case"} and results["breaks"] == {
        "failed": "a long story"
    }
    assert one["speed_over"] == {"good": {"ratio": 2.0, "lowest_round": 2.0, "highest_round": 2.0}}
    assert one["best_peer"] == "good" and one["speed_over_best_peer"] == 2.0
    text = "\n".join(lines)
    assert "(2.00x)" in text and text.count("has no such case") == 1 and "FAILED: a long story" in text
    assert lines[0].startswith("no GPU used") and "cuflash over good: 2.00x in the mean" in text
    assert run.exit_status(written, "cuflash") == 0 and run.exit_status(written, "wrong") == 1


@pytest.fixture
def gradients(monkeypatch):
    """Contenders of the test's own for backwards: a right one and a subtly wrong one."""

    def right(case, arrays):
        return peers._unfused_numpy_backward(case, arrays)

    def subtly_wrong(case, arrays):
        dq, dk, dv = right(case, arrays)()
        dk[0, 5, 1] = 0  # in a head that the truth has no rows of
        return lambda: (dq, dk, dv)

    def wrong(case, arrays):
        return lambda: tuple(2 * x for x in right(case, arrays)())

    table = {"cuflash": right, "cuflash-deterministic": right, "sdpa_flash": right, "subtle": subtly_wrong, "wrong": wrong}
    monkeypatch.setattr(peers, "CONTENDERS", table)
    monkeypatch.setattr(peers, "missing", lambda name: None)


@pytest.mark.parametrize("seconds, reached", [((2e-3, 2.2e-3, 2.1e-3), [True, True]), ((2e-3, 2.3e-3, 1.9e-3), [False, False])])
def test_a_backward_is_held_against_its_targets(gradients, seconds, reached):
    case = tiny(suite="backward", heads_q=3, heads_k=3, backward=True)
    bench, lines = bench_of(["cuflash", "cuflash-deterministic", "sdpa_flash", "subtle", "wrong"], NamedTimer(*seconds))
    (one,) = bench.run([case], suite="backward")["cases"]
    assert one["backward"] and one["flops"] == case.flops
    assert "of a row's size from float64" in one["results"]["wrong"]["failed"]
    assert "from cuflash" in one["results"]["subtle"]["failed"]
    assert [verdict["what"] for verdict in one["asked"]] == ["cuflash over sdpa_flash", "cuflash-deterministic over cuflash"]
    assert [target.contender for target in cases.asked(case)][1:-1] == ["sdpa_cudnn", "fa3_jax", "fa4"]
    assert [verdict["ok"] for verdict in one["asked"]] == reached
    assert one["asked"][1]["value"] == pytest.approx(seconds[0] / seconds[1], rel=1e-3)
    text = "\n".join(lines)
    assert f"targets: {sum(reached)} of 2 reached" in text and ("MISSED" in text) != all(reached)
    assert cases.asked(tiny()) == []


def test_packed_sequences_are_held_against_the_rate_of_dense_ones(contenders):
    case = dataclasses.replace(cases.packed("varlen", "float32", (16, 9, 3), 2, 16), causal=True)

    def packed(case, arrays):
        return peers._unfused_numpy(case, arrays)

    contenders["cuflash"], contenders["cuflash-dense"] = packed, contenders["good"]
    seconds = 1e-3, 1.5e-3
    bench, lines = bench_of(["cuflash", "cuflash-dense"], NamedTimer(*seconds))
    result = bench.run([case], suite="varlen")
    (one,) = result["cases"]
    assert one["lengths"] == (16, 9, 3) and result["settings"]["lengths_seed"] == cases.LENGTHS_SEED
    dense = one["results"]["cuflash-dense"]
    assert dense["problem"]["flops"] == case.dense.flops == 2 * 4 * 2 * 16 * 16 * 16 / 2
    rates = case.flops / seconds[0], case.dense.flops / seconds[1]
    assert dense["tflops"] == pytest.approx(rates[1] * 1e-12, rel=1e-3)
    assert one["speed_over"]["cuflash-dense"]["ratio"] == pytest.approx(rates[0] / rates[1], rel=1e-3)
    (verdict,) = one["asked"]
    assert verdict["asked"] == 0.85 and verdict["ok"] == (rates[0] / rates[1] >= 0.85)
    assert cases.asked(cases.packed("varlen", "float32", (16, 16), 2, 16))[0].bound == 0.95


def test_short_calls_are_timed_one_at_a_time_and_queued(contenders):
    case = cases.packed("varlen", "float32", (3, 5), 2, 16, wall=True)
    contenders["cuflash"] = contenders["good"] = peers._unfused_numpy
    bench, lines = bench_of(["cuflash", "good", "cuflash-dense"], NamedTimer(1.5e-4, 3e-4))
    (one,) = bench.run([case], suite="varlen")["cases"]
    assert one["results"]["cuflash"]["queued"]["median_s"] == 1.5e-4
    assert one["results"]["cuflash"]["queued"]["calls"] == run.CALLS_A_QUEUE
    assert one["asked"] == [{"what": "ms", "value": 0.15, "asked": 0.2, "ok": True}]
    assert "unavailable" in one["results"]["cuflash-dense"]
    text = "\n".join(lines)
    assert "150/150 ±0.0%" in text and "300/300 (2.00x)" in text and "one at a time / in a queue of" in text


def test_which_clock_times_a_case_on_a_gpu(monkeypatch):
    waits = []
    stream = types.SimpleNamespace(synchronize=lambda: waits.append(0))
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setattr(jit, "import_cupy", lambda: fake)
    monkeypatch.setattr(run.record, "monitor", lambda index: None)
    bench = run.Bench(["cuflash"], device_id=0, quick=True, min_seconds=1e-6, say=lambda line: None)
    assert isinstance(bench._timer(tiny()), timing.CudaTimer) and bench._timer(tiny()).cold
    graph = bench._timer(tiny(graph=True))
    assert graph.calls_a_run == run.CALLS_A_GRAPH and not graph.cold
    case = cases.packed("varlen", "float32", (3, 5), 2, 16, wall=True)
    wall = bench._timer(case)
    assert isinstance(wall, timing.WallTimer) and wall.calls_a_run == 1
    wall.block(lambda: None, 2)
    assert len(waits) == 3 and bench._timed_as(len, case) == ("calls, the host's time included, L2 warm", len)
    one, calls = {"results": {"cuflash": {"median_s": 1e-4}, "fa3": {"failed": "why"}}}, []
    settings = {"min_runs": 2, "min_seconds": 0, "rounds": 1}
    bench._clock({"cuflash": lambda: calls.append(0), "fa3": None}, one, "queued", run.CALLS_A_QUEUE, settings)
    assert one["results"]["cuflash"]["queued"]["median_s"] > 0 and "queued" not in one["results"]["fa3"]
    assert len(calls) % run.CALLS_A_QUEUE == 0


def test_a_decoding_is_timed_as_a_graph_of_calls_on_caches_in_turn(monkeypatch):
    runtime = types.SimpleNamespace(getDeviceProperties=lambda device: {"l2CacheSize": 50 * 2**20})
    monkeypatch.setattr(jit, "import_cupy", lambda: types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(run.record, "monitor", lambda index: None)
    case = cases.suite("decode", head_dims=[64])[-1]
    bench = run.Bench(["cuflash"], device_id=0, say=lambda line: None)
    timer = bench._timer(case)
    assert timer.calls_a_run == 75 and not timer.cold and bench._caches(case) == 25
    assert bench._settings(case) == {"min_runs": 6, "min_seconds": 0.03} and bench._settings(tiny()) == {"min_seconds": 0.06}
    graphs = []
    monkeypatch.setattr(run, "captured", lambda call, framework, count: graphs.append(count) or call)
    assert bench._timed_as(lambda: None, case)[0] == "graph of 75 calls, 25 caches in turn" and graphs == [75]
    monkeypatch.setattr(run, "captured", lambda *arguments: 1 / 0)
    calls = []
    mode, repeated = bench._timed_as(lambda: calls.append(0), case)
    assert mode == "75 calls in a row, 25 caches in turn; no graph: division by zero"
    repeated()
    assert len(calls) == 1 + 75
    warm = run.Bench(["cuflash"], device_id=0, flush=False, say=lambda line: None)
    assert warm._caches(case) == 1 and warm._timer(case).calls_a_run == 64


def test_all_data_are_made_before_the_first_graph(contenders, monkeypatch):
    """A replay writes wherever it wrote when it was captured: nothing that is made later may come to lie there."""
    events = []
    monkeypatch.setattr(peers, "problem_of", lambda name, case: tiny(causal=True) if name == "good" else case)
    data = run._Data
    monkeypatch.setattr(run, "_Data", lambda case, *rest: events.append(f"data {case.name}") or data(case, *rest))
    bench, _ = bench_of(["cuflash", "good", "wrong", "breaks"], NamedTimer(1e-3))
    monkeypatch.setattr(bench, "_timed_as", lambda call, case: ("graph", events.append("graph") or call))
    bench.framework, one = "numpy", {"results": {}}
    calls, single_calls = bench._prepare(tiny(), bench.names, one, bench.timer)
    assert events == [f"data {tiny().name}", f"data {tiny(causal=True).name}", "graph", "graph"]
    assert list(calls) == list(single_calls) == ["cuflash", "good"] and list(one["results"]) == bench.names
    assert "wrong result" in one["results"]["wrong"]["failed"] and one["results"]["good"]["mode"] == "graph"


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_what_a_graph_writes_is_not_handed_to_others(monkeypatch, framework):
    events, pools = [], []

    class Pool:
        def __init__(self):
            pools.append(weakref.ref(self))

        def malloc(self, size):
            raise AssertionError("nothing is allocated here")

    @contextlib.contextmanager
    def using_allocator(malloc):
        assert isinstance(malloc.__self__, Pool)
        events.append("own pool")
        yield
        events.append("common pool")

    def graph(name):
        return lambda *given, **named: events.append(name)

    stream = types.SimpleNamespace(begin_capture=graph("begin"))
    stream.end_capture = lambda: events.append("end") or types.SimpleNamespace(launch=graph("launch"))
    cuda = types.SimpleNamespace(MemoryPool=Pool, using_allocator=using_allocator, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    made = types.SimpleNamespace(capture_begin=graph("begin"), capture_end=graph("end"), replay=graph("launch"))
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(CUDAGraph=lambda: made))
    monkeypatch.setitem(sys.modules, "torch", torch)
    replay = timing.captured(graph("call"), framework, 2)
    replay()
    assert events == ["own pool", "call", "begin", "call", "call", "end", "common pool", "launch"]
    assert pools[0]() is not None
    del replay
    gc.collect()
    assert pools[0]() is None


@pytest.fixture
def decoders(monkeypatch):
    """Contenders of the test's own for decoding: right ones, one that appends nothing, one that loses keys."""

    def right(case, arrays):
        def call():
            append_by_hand(case, arrays)
            return exact_decode(case, arrays).astype(arrays.q.dtype)

        return call

    def forgets(case, arrays):
        out = right(case, arrays)()
        arrays.unappend()
        return lambda: out

    def loses(case, arrays):
        def call():
            out = right(case, arrays)()
            out[1, 0, 1] = 0  # where the truth has no row
            return out

        return call

    table = {name: right for name in ("cuflash", "cuflash-cupy", *decode.BESIDE, "fa3", "sdpa_flash")}
    monkeypatch.setattr(peers, "CONTENDERS", table | {"forgets": forgets, "loses": loses})
    monkeypatch.setattr(peers, "missing", lambda name: None)
    monkeypatch.setattr(peers, "make", lambda name, case, arrays: peers.CONTENDERS[name](case, arrays))


def test_a_record_of_decoding(decoders, tmp_path):
    case = tiny_decode(suite="decode", seqlen_q=1, seqlen_k=32, appended=1, clocked=True, page_size=8)
    names = ["cuflash", "cuflash-cupy", "fa3", "sdpa_flash", "cuflash-contiguous", "forgets", "loses"]
    bench, lines = bench_of(names, NamedTimer(2e-6, 2e-6, 3e-6, 8e-6, 2e-6))
    path = tmp_path / "r.json"
    (one,) = bench.run([case], suite="decode", path=str(path))["cases"]
    results = one["results"]
    assert one["kv_bytes"] == case.kv_bytes and one["page_size"] == 8 and one["appended"] == 1
    assert results["cuflash"]["tb_per_s"] == pytest.approx(case.kv_bytes / 2e-6 * 1e-12, rel=1e-3)
    assert "of a row's size from float64" in results["forgets"]["failed"] and "nan" in results["forgets"]["failed"]
    assert results["loses"]["failed"].endswith("from cuflash"), "others are held against cuflash in whole"
    assert results["cuflash-contiguous"]["max_difference"] == 0, "the same keys, and so the same answer"
    assert results["fa3"]["single"]["calls"] == 1 and results["fa3"]["queued"]["calls"] == run.CALLS_A_QUEUE
    assert "single" not in results["sdpa_flash"] and "single" not in results["cuflash-contiguous"]
    assert one["speed_over"]["fa3"] == {
        "ratio": 1.5, "lowest_round": 1.5, "highest_round": 1.5, "single": 1.5, "queued": 1.5
    }
    assert [verdict["what"] for verdict in one["asked"]] == [
        "cuflash over fa3", "cuflash over fa3, single calls", "cuflash over fa3, queued calls"
    ]
    assert all(verdict["ok"] for verdict in one["asked"]) and one["best_peer"] == "fa3"
    text = "\n".join(lines)
    assert "TB/s of keys and values on numpy arrays" in text and "3.0/3.0 (1.50/1.50x)" in text and "targets: 3 of 3" in text
    printed = CliRunner().invoke(table.main, [str(path), "--seqlen", "32"]).output.splitlines()
    assert printed[2] == "| TB/s of keys and values | cuflash | through CuPy | FA3 | FA2 (torch) | contiguous |"
    assert printed[6] == "| us a call, alone / queued | cuflash | through CuPy | FA3 |"
    assert printed[8] == f"| {case.name} | 2.0 / 2.0 | 2.0 / 2.0 (1.00x / 1.00x) | 3.0 / 3.0 (1.50x / 1.50x) |"
    assert "s1/32" not in CliRunner().invoke(table.main, [str(path), "--seqlen", "3"]).output


def test_a_decoding_is_held_against_another_one_by_its_rate(decoders):
    case = tiny_decode(suite="decode-append", key_lengths=(40, 8, 6))
    uniform = dataclasses.replace(case, key_lengths=(), seqlen_k=8192)
    bench, lines = bench_of(["cuflash", "cuflash-one-query"], NamedTimer(1e-5, 1.5e-5))
    (one,) = bench.run([case], suite="decode-append")["cases"]
    beside = one["results"]["cuflash-one-query"]
    assert beside["problem"]["name"].startswith("d16 s1/40") and one["speed_over"]["cuflash-one-query"]["ratio"] == 1.5
    work = case.kv_bytes / uniform.kv_bytes
    timed = {name: {"median_s": seconds, "round_medians_s": [seconds]} for name, seconds in
             (("cuflash", 1e-5), ("cuflash-uniform", 1e-5 / work / 0.95))}
    record_of = {"results": timed}
    bench._compare(case, record_of)
    assert record_of["speed_over"]["cuflash-uniform"]["ratio"] == pytest.approx(1 / 0.95, rel=1e-3)
    assert record_of["asked"] == [{"what": "cuflash over cuflash-uniform", "value": 1.0526, "asked": 0.9, "ok": True}]


def test_the_share_of_a_bound_in_a_table():
    entry = {"median_s": 1e-4, "tb_per_s": 3.4, "share_of_bound": 0.82}
    one = {
        "name": "mla", "kv_bytes": 1, "bound": {"by": "flops"}, "results": {"cuflash": entry},
        "asked": [{"what": "share_of_bound", "ok": True}],
    }
    lines = table.markdown({"kind": "bench", "contenders": ["cuflash"], "cases": [one]})
    assert lines[0] == "| TB/s of keys and values | cuflash | of the bound |" and lines[2] == "| mla | 3.40 | 82% of flops |"


def test_suites_on_the_cpu_as_they_are(tmp_path):
    bench, lines = bench_of(["cuflash", "unfused", "cuflash-deterministic", "cuflash-dense"], quick=True, min_seconds=0.004)
    table = [
        *cases.table(dtype="float32", head_dims=[16], seqlens=[32], tokens=64, hidden=32, backward=True),
        *cases.table(dtype="float32", head_dims=[16], seqlens=[32], tokens=64, hidden=32, varlen=True),
        *cases.table(dtype="float32", head_dims=[16], seqlens=[32], tokens=64, hidden=32, varlen=True, backward=True),
    ]
    result = bench.run(table, suite="table", path=str(tmp_path / "r.json"))
    assert result["complete"] and len(result["cases"]) == 6
    for case, one in zip(table, result["cases"], strict=True):
        measured = {name for name, entry in one["results"].items() if "median_s" in entry}
        assert measured == {"cuflash", "unfused"} | ({"cuflash-deterministic"} if case.backward else set()) | (
            {"cuflash-dense"} if case.lengths else set()
        )
        assert all(entry.get("max_error", 0) < 1e-4 for entry in one["results"].values())


def test_a_run_can_be_cut_short_and_keeps_what_it_has(contenders, tmp_path):
    bench, lines = bench_of(["cuflash"], FakeTimerForever(), limit_seconds=0)
    result = bench.run([tiny(), tiny(causal=True)], suite="test", path=str(tmp_path / "r.json"))
    assert result["cases"] == [] and not result["complete"] and "2 cases are left" in "\n".join(lines)
    assert run.exit_status(result, "cuflash") == 1


class FakeTimerForever(NamedTimer):
    def __init__(self):
        super().__init__(1e-3)


def test_a_lost_context_ends_the_run(contenders, tmp_path):
    class Dead(NamedTimer):
        def alive(self):
            return False

    bench, lines = bench_of(["cuflash", "breaks", "good"], Dead(1e-3))
    result = bench.run([tiny(), tiny(causal=True)], suite="test", path=str(tmp_path / "r.json"))
    assert len(result["cases"]) == 1 and result["cases"][0]["aborted"] and not result["complete"]
    assert "the CUDA context is lost" in "\n".join(lines)


def test_a_context_lost_while_data_are_made_is_said_of_all(contenders, tmp_path, monkeypatch):
    class Dead(NamedTimer):
        def alive(self):
            return False

    def breaks(*_):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(run, "_Data", breaks)
    bench, _ = bench_of(["cuflash", "good"], Dead(1e-3))
    result = bench.run([tiny()], suite="test", path=str(tmp_path / "r.json"))
    found = result["cases"][0]["results"]
    assert "illegal memory access" in found["cuflash"]["failed"]
    assert found["good"]["failed"] == "not timed: cuflash has lost the CUDA context"


def test_the_whole_path_on_the_cpu(tmp_path):
    bench, lines = bench_of(["cuflash", "unfused"], quick=True, min_seconds=0.004)
    table = cases.table(dtype="float32", head_dims=[16], seqlens=[32, 64], tokens=64, hidden=32)
    result = bench.run(table, suite="table", path=str(tmp_path / "r.json"))
    assert result["complete"] and len(result["cases"]) == 4
    for one in result["cases"]:
        assert all(entry["median_s"] > 0 and entry["max_error"] < 1e-4 for entry in one["results"].values())
        assert one["best_peer"] == "unfused"


def test_the_limit_of_a_gpu():
    assert record.limit_tflops("float32", (9, 0), 132, 1980) == pytest.approx(
        66.9, abs=0.1
    )  # an H200: 67 TFLOP/s
    assert record.limit_tflops("bfloat16", (8, 0), 108, 1410) == pytest.approx(312, abs=1)  # an A100: 312
    assert record.limit_tflops("float64", (8, 0), 108, 1410) == pytest.approx(9.7, abs=0.1)
    assert record.limit_tflops("bfloat16", (99, 0), 1, 1) is None


def test_what_cuflash_compiles_is_known_ahead(monkeypatch):
    device = config.DEVICES["sm_90"]
    monkeypatch.setattr(launch, "device_of", lambda index: device)
    monkeypatch.setattr(jit, "arch_for", lambda capability: "sm_90")
    started = []
    monkeypatch.setattr(
        run.subprocess, "Popen", lambda arguments, **rest: started.append(json.loads(arguments[3]))
    )
    table = cases.suite("forward", head_dims=[64, 128], seqlens=[1024, 16384])
    run.compile_ahead(table, ["cuflash", "unfused"], 0, jobs=3)
    variants = [variant for work in started for variant in work]
    assert len(started) == 3 and len(variants) == 6, "at 128 a long sequence has another tile"
    assert {(kernel, arch) for kernel, _, arch in variants} == {("fwd_sm90", "sm_90a")}
    _, chosen = run.choice_of(table[0], "cuflash", 0)
    assert [
        chosen.kernel,
        [list(pair) for pair in launch.kernel_constants(chosen).items()],
        "sm_90a",
    ] in variants
    # A forced tier is compiled for the arch of its own.
    started.clear()
    run.compile_ahead(table, ["cuflash/sm80", "cuflash/sm90"], 0, jobs=3)
    archs = {(kernel, arch) for work in started for kernel, _, arch in work}
    assert archs == {("fwd_sm80", "sm_90"), ("fwd_sm90", "sm_90a")}
    # What surrounds the kernel is compiled too, and the forward that comes first.
    started.clear()
    (case,) = cases.suite("backward", head_dims=[64], seqlens=[2048], causal=True)
    run.compile_ahead([case, cases.packed("test", "bfloat16", (5, 6), 2, 64)], ["cuflash", "cuflash-deterministic"], 0)
    archs = {kernel: arch for work in started for kernel, _, arch in work}
    assert sorted(archs) == ["bwd_cast", "bwd_delta", "bwd_sm90", "fwd_sm90", "varlen_tiles"]
    assert archs.pop("fwd_sm90") == archs.pop("bwd_sm90") == "sm_90a" and set(archs.values()) == {"sm_90"}
    deterministic = {
        dict(run.choice_of(case, name, 0)[1].constants)["DETERMINISTIC"] for name in ("cuflash", "cuflash-deterministic")
    }
    assert deterministic == {0, 1}
    assert not run.compile_ahead(
        table[:1], ["cuflash"], 0
    )  # one variant compiles just as well when it is called


@pytest.mark.parametrize("changes", CACHES)
def test_the_problem_of_a_decoding_is_that_of_its_arrays(monkeypatch, changes):
    monkeypatch.setattr(launch, "device_of", lambda index: config.DEVICES["sm_90"])
    case = tiny_decode(**changes)
    stated, chosen = run.choice_of(case, "cuflash-cupy", 0)
    assert (stated.batch, stated.seqlen_q, stated.seqlen_k) == (3, 2 if case.seqlen_q > 1 else 1, 40)
    assert (stated.page_size, stated.paged, stated.seqlen_new) == (case.page_size, case.page_size > 0, case.appended)
    assert stated.v_is_k == case.v_is_k and stated.has_cache_seqlens and stated.decode_int64_lengths == 0
    assert [kernel.kernel for kernel in config.kernels_of(stated, chosen)] == [chosen.kernel, "decode_combine"]


@pytest.mark.parametrize("name, kernel, arch", [("cuflash", "fwd_sm90", "sm_90a"), ("cuflash/sm80", "fwd_sm80", "sm_90")])
def test_the_record_has_the_kernel_as_it_was_compiled(monkeypatch, name, kernel, arch):
    monkeypatch.setattr(launch, "device_of", lambda index: config.DEVICES["sm_90"])
    monkeypatch.setattr(jit, "arch_for", lambda capability: "sm_90")
    asked = []

    def build(*variant):
        asked.append(variant)
        return types.SimpleNamespace(registers=128, spill_bytes=4)

    monkeypatch.setattr(jit, "build", build)
    (case,) = cases.suite("forward", head_dims=[128], seqlens=[2048], causal=True)
    found = run.Bench([name], device_id=0)._config(case, name)
    _, chosen = run.choice_of(case, name, 0)
    assert asked == [(kernel, launch.kernel_constants(chosen), arch)]
    assert found == {
        "kernel": kernel,
        "block_m": chosen.block_m,
        "block_n": chosen.block_n,
        "threads": chosen.threads,
        "smem_bytes": chosen.smem_bytes,
        "registers": 128,
        "spill_bytes": 4,
    }


# ------------------------------------------------------------------------------------------------------------
# Memory and overhead


def test_expected_memory_is_the_outputs():
    case = tiny(
        dtype="bfloat16", seqlen_q=65536, seqlen_k=65536, heads_q=1, heads_k=1, head_dim=64, head_dim_v=64
    )
    assert memory.expected_bytes(case, False) == 65536 * 64 * 2
    assert memory.expected_bytes(case, True) == 65536 * 64 * 2 + 65536 * 4
    assert memory.expected_bytes(tiny(seqlen_q=1), True) == 512 + 512  # whole units of the pool


def test_expected_memory_of_a_backward_is_gradients_and_scratch():
    case = tiny(
        dtype="bfloat16", seqlen_q=4096, seqlen_k=8192, heads_q=2, heads_k=1, head_dim=40, head_dim_v=64, backward=True
    )
    rows = 4096 * 2
    gradients = 2 * (rows * 40 + 8192 * 40 + 8192 * 64)
    assert memory.expected_backward_bytes(case, None) == gradients + 4 * rows * 64 + 8 * rows + 512, "a counter"
    turns = 4 * (1 + 2 * 4096 // 64)
    assert memory.expected_backward_bytes(case, 64) == gradients + 4 * rows * 64 + 8 * rows + -(-turns // 512) * 512
    double = tiny(dtype="float64", seqlen_q=64, seqlen_k=64, heads_q=1, heads_k=1, backward=True)
    assert memory.expected_backward_bytes(double, None) == 3 * 8 * 64 * 16 + 8 * 64 * 32 + 16 * 64 + 512


def test_the_memory_of_a_backward_is_checked_against_its_formula(monkeypatch):
    chosen = types.SimpleNamespace(block_m=32)
    monkeypatch.setattr(memory, "choice_of", lambda case, name, device_id: (None, chosen))
    monkeypatch.setattr(memory, "device_growth", lambda call: 0)
    monkeypatch.setattr(memory.peers, "make", lambda name, case, arrays: lambda: name)
    grown = {"cuflash": 512 * 100, "cuflash-deterministic": 10}
    monkeypatch.setattr(memory, "pool_growth", lambda call: grown[call()])
    case, lines = tiny(backward=True), []
    rows = [memory._checked(case, None, 0, variant, lines.append) for variant in (False, True)]
    assert [row["ok"] for row in rows] == [False, True] and rows[0]["deterministic"] is False
    assert "OVER" in lines[0] and lines[1].endswith("ok") and ", deterministic: the pool grows" in lines[1]


def test_memory_on_the_cpu(tmp_path):
    path = tmp_path / "memory.json"
    done = CliRunner().invoke(memory.main, ["--device", "cpu", "--seqlen", "64", "--json", str(path)])
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    for key, kept in (("table", 1), ("backward_table", 2)):  # score matrices that are there at once
        rows = written[key]
        assert ["causal" in row["case"] for row in rows] == [False, True]
        for row in rows:
            scores = 8 * 64 * 64 * 4
            assert row["results"]["unfused"]["peak_bytes"] > kept * scores and row["results"]["cuflash"]["median_s"] > 0
            assert row["backward"] == (kept == 2) and row["speed_over_unfused"] > 0
    assert done.output.count("x") >= 8 and "memory of forward and backward" in done.output
    printed = CliRunner().invoke(table.main, [str(path)]).output
    assert printed.count("| 64 causal |") == 2 and "kernels " in printed


def test_tables_of_records(contenders, tmp_path):
    bench, _ = bench_of(["cuflash", "good", "refuses"], NamedTimer(1e-3, 2e-3, 1e-3, 2e-3))
    path = tmp_path / "r.json"
    bench.run([tiny(), tiny(causal=True)], suite="test", path=str(path))
    lines = CliRunner().invoke(table.main, [str(path), "--causal"]).output.splitlines()
    assert lines[2:4] == ["| case | cuflash | good |", "| --- | --- | --- |"]
    assert lines[4].startswith("| d16 s24 b1 h2 causal | 0.0 | 0.0 (2.00x) |") and lines[5] == ""
    assert CliRunner().invoke(table.main, [str(path), "--seqlen", "25"]).output.count("|") == 6
    wall = {"median_s": 1.5e-4, "queued": {"median_s": 1e-4}}
    one = {"name": "short", "results": {"cuflash": wall, "fa3": wall}, "speed_over": {"fa3": {"ratio": 1.0}}}
    text = table.markdown({"kind": "bench", "contenders": ["cuflash", "fa3"], "cases": [one]})
    assert text[0] == "| case | cuflash | FA3 |" and text[2] == "| short | 0.150 / 0.100 | 0.150 / 0.100 (1.00x) |"
    path.write_text(json.dumps({"kind": "overhead"}))
    done = CliRunner().invoke(table.main, [str(path)])
    assert done.exit_code == 1 and "a record of kind overhead has no table" in done.output


def test_traced_memory_sees_what_numpy_takes():
    assert 8 * 2**20 <= memory.traced_growth(lambda: np.ones(2**20)) < 8.1 * 2**20


def test_host_time_leaves_waiting_out():
    waits = []
    figures = overhead.host_time(lambda: None, 1000, lambda: waits.append(0))
    assert (
        figures["calls"] == 1000
        and len(waits) == 11
        and 0 <= figures["min_us"] <= figures["median_us"] <= figures["p90_us"]
    )


def test_lines_of_overhead():
    figures = {"median_us": 30.0, "p10_us": 29.0, "p90_us": 31.0}
    assert "OVER: at most 25 asked" in overhead._line("attention, cupy", figures)
    assert "asked" not in overhead._line("cupy.empty", figures)
    assert "asked" not in overhead._line("attention_backward, cupy", figures)
    assert "ok: at most 30 asked" in overhead._line("attention_with_kvcache, torch, out=, workspace=", figures)
    assert "FAILED: why" in overhead._line("attention, cupy", {"failed": "why"})
    name, beside = "cuflash.torch.attention", {"attention, cupy": {"median_us": 24.0}}
    assert "asked" not in overhead._line(name, figures, {})
    assert "OVER: at most 29.00 asked, that of attention, cupy + 5" in overhead._line(name, figures, beside)
    beside = {name: {"median_us": 30.0}}
    assert "ok: at most 30.00 asked" in overhead._line(f"{name}, compiled", figures, beside)
    call = {"call_s": 0.04, "host_s": 0.0, "compiles": 0}
    entry = {
        "dtype": "float32",
        "head_dim": 64,
        "causal": True,
        "first": call,
        "again": call,
        "new_shape": call,
    }
    assert "ok: at most 50 ms asked" in overhead._first_line(entry)
    entry["first"] = {**call, "compiles": 1, "call_s": 6.0}
    assert "OVER: at most 5 s asked" in overhead._first_line(entry)


def test_the_host_cost_of_every_function_is_measured(numpy_as_cupy, monkeypatch):
    numpy_as_cupy.float16 = np.float16
    names = overhead.subjects(None)
    for function in (
        "attention", "attention_backward", "attention_varlen", "attention_varlen_backward", "attention_with_kvcache"
    ):
        assert f"{function}, cupy" in names
    made = []
    monkeypatch.setattr(overhead, "make_arrays", lambda case, framework: (framework, case.name))
    monkeypatch.setattr(overhead.peers, "make", lambda name, case, arrays: made.append((name, case.backward, *arrays)))
    names["attention_backward, cupy, deterministic"]()
    names["attention_varlen, cupy"]()
    names["attention_with_kvcache, cupy, pages, k, v"]()
    assert made == [
        ("cuflash-deterministic", True, "cupy", "d64 s64 b1 h8 full bwd"),
        ("cuflash", False, "cupy", "d64 s<=33 b4 t64 h8 full"),
        ("cuflash", False, "cupy", "d64 s1/64 b4 h8/2 causal page16 append1"),
    ]


def test_the_host_cost_of_decoding_without_an_allocation(numpy_as_cupy, monkeypatch):
    numpy_as_cupy.uint8 = np.uint8
    numpy_as_cupy.empty = np.empty
    monkeypatch.setattr(overhead, "make_arrays", lambda case, framework: cases.make_arrays(case, "numpy"))
    seen = []
    monkeypatch.setattr(overhead.cuflash, "kvcache_workspace_bytes", lambda *arrays, **given: 48, raising=False)
    monkeypatch.setattr(
        overhead.cuflash, "attention_with_kvcache", lambda *arrays, **options: seen.append(options), raising=False
    )
    call = overhead.subjects(None)["attention_with_kvcache, cupy, out=, workspace="]()
    call()
    assert seen[0]["out"].shape == (4, 1, 8, 64) and seen[0]["workspace"].nbytes == 48 and "cache_seqlens" in seen[0]


def test_the_host_cost_of_the_functions_for_torch(monkeypatch):
    torch = pytest.importorskip("torch", reason="no PyTorch")
    pytest.importorskip("cuflash.torch", reason="PyTorch is too old")

    def on_cpu(x):
        return torch.from_numpy(np.asarray(x, x.dtype if x.dtype.kind == "i" else np.float32).copy())

    def make(case, framework):
        arrays = cases.make_arrays(case, "numpy")
        changes = {name: x if x is None else on_cpu(x) for name, x in vars(arrays).items() if isinstance(x, np.ndarray)}
        if hasattr(arrays, "given"):
            changes["given"] = {name: on_cpu(x) if hasattr(x, "dtype") else x for name, x in arrays.given.items()}
        return types.SimpleNamespace(**{**vars(arrays), **changes})

    monkeypatch.setattr(overhead, "make_arrays", make)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode=None, **options: compiler(function, backend="aot_eager"))
    subjects = overhead.of_cuflash_torch(torch)
    assert {*overhead.TARGETS_BESIDE_US} <= {*subjects}
    for name, prepare in subjects.items():
        result = prepare()()
        assert result is not None and (getattr(result, "requires_grad", False) == name.endswith("recorded"))


def test_a_child_that_fails_gives_its_reason(monkeypatch, tmp_path):
    report = overhead.child(
        str(tmp_path), 0, overhead.VARIANTS[:1]
    )  # without a GPU, or with one: no exception
    assert "failed" in report or report["variants"]
    monkeypatch.setattr(overhead, "_CHILD", "import sys; sys.exit('no such thing')")
    assert overhead.child(str(tmp_path), 0, []) == {"failed": "no such thing"}


def test_the_child_reports_first_calls(monkeypatch, tmp_path):
    """The program of the child with NumPy in CuPy's place: what it times is there under the names that are
    read.
    """
    fake = """
import numpy
def asarray(x): return x
def empty(*a): return None
class _Stream:
    def synchronize(self): pass
class cuda:
    class Device:
        def __init__(self, index): pass
        def use(self): pass
    class runtime:
        deviceSynchronize = staticmethod(lambda: None)
    get_current_stream = staticmethod(lambda: _Stream())
"""
    (tmp_path / "cupy.py").write_text(fake)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        overhead, "_CHILD", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + overhead._CHILD
    )
    report = overhead.child(str(tmp_path), 0, [("bfloat16", 16, True), ("float99", 16, True)])
    first, second = report["variants"]
    assert (
        first["first"]["call_s"] > 0
        and first["first"]["compiles"] == 0
        and {"again", "new_shape"} <= set(first)
    )
    assert (
        "failed" in second
        and "first call" in overhead._first_line(first)
        and "FAILED" in overhead._first_line(second)
    )


# ------------------------------------------------------------------------------------------------------------
# Command lines


@pytest.mark.parametrize("program", [run, overhead, memory])
def test_help(program):
    done = CliRunner().invoke(program.main, ["--help"])
    assert done.exit_code == 0 and "--json" in done.output and "--device" in done.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--suite", "sideways"], "'sideways' is not one of 'forward'"),
        (
            ["--suite", "float32", "--dtype", "float16"],
            "dtype of suite float32 must be one of float32; got 'float16'",
        ),
        (["--peers", "sdpa_flash,fa9", "--device", "cpu"], "'fa9' is not one of cuflash"),
        (["--device", "tpu"], "'tpu' is neither the index of a GPU nor cpu"),
        (["--head-dim", "257"], "257 is not in the range 1<=x<=256"),
        (["--tier", "sm70"], "'sm70' is not one of"),
    ],
)
def test_bad_arguments(arguments, message):
    done = CliRunner().invoke(run.main, arguments)
    assert done.exit_code == 2 and message in done.output


def test_without_a_gpu_a_gpu_is_refused(monkeypatch):
    def none():
        raise RuntimeError("no NVIDIA driver was found")

    monkeypatch.setattr(jit, "check_driver", none)
    for program in (run, overhead, memory):
        done = CliRunner().invoke(program.main, [])
        assert done.exit_code == 1 and "no GPU can be used: no NVIDIA driver was found" in done.output
    assert CliRunner().invoke(overhead.main, ["--device", "cpu"]).exit_code == 2


def test_names_of_contenders():
    assert run.parse_names(None, ("fa3",)) == ["fa3"] and run.parse_names("none", ("fa3",)) == []
    assert run.parse_names("fa4, sdpa_math") == ["fa4", "sdpa_math"] and "unfused" in run.parse_names("all")
    with pytest.raises(click.BadParameter, match="'x' is not one of"):
        run.parse_names("x")
    assert run.contenders(None, None, ("cuflash-dense", "fa3")) == ["cuflash", "cuflash-dense", "fa3"]
    assert run.contenders("simt", None, ("cuflash-dense", "fa3")) == ["cuflash/simt", "cuflash-dense/simt", "fa3"]
    assert peers.tier_of("cuflash-dense/simt") == "simt" and peers.tier_of("cuflash") is None
    assert all(set(names) <= set(peers.CONTENDERS) for names in peers.USUAL.values()) and set(
        peers.USUAL
    ) == set(cases.SUITES)


SMALL_TABLE = ["--head-dim", "16", "--seqlen", "32", "--tokens", "64", "--hidden", "32", "--quick"]


def test_cuflash_bench_on_the_cpu(tmp_path):
    path = tmp_path / "bench.json"
    done = CliRunner().invoke(command.bench, ["--device", "cpu", *SMALL_TABLE, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("no GPU used") and "d16 s32 b2 h2 causal" in done.output
    assert len(json.loads(path.read_text())["cases"]) == 2


@pytest.mark.parametrize("option, name", [("--backward", "d16 s32 b2 h2 full bwd"), ("--varlen", " t64 h2 full")])
def test_cuflash_bench_of_gradients_and_packed_sequences(option, name):
    done = CliRunner().invoke(command.bench, ["--device", "cpu", *SMALL_TABLE, "--full", option, "--json", "-"])
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)["cases"]
    assert name in one["name"] and one["best_peer"] == "unfused"


def test_cuflash_bench_of_decoding(tmp_path):
    path = tmp_path / "bench.json"
    done = CliRunner().invoke(command.bench, ["--device", "cpu", *SMALL_TABLE, "--decode", "--json", str(path)])
    assert done.exit_code == 0, done.output
    (one,) = json.loads(path.read_text())["cases"]
    assert one["name"] == "d16 s1/32 b2 h2 causal" and one["best_peer"] == "unfused"
    assert one["results"]["cuflash"]["tb_per_s"] > 0 and one["results"]["cuflash"]["queued"]["median_s"] > 0
    assert "TB/s of keys and values" in done.output and "| us a call" in CliRunner().invoke(table.main, [str(path)]).output
    refused = CliRunner().invoke(command.bench, ["--device", "cpu", "--decode", "--varlen"])
    assert refused.exit_code == 2 and "--decode goes without --varlen" in refused.output


def test_the_record_alone_on_standard_output():
    done = CliRunner().invoke(command.bench, ["--device", "cpu", *SMALL_TABLE, "--full", "--json", "-"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["cases"]) == 1 and "d16 s32" in done.stderr


def test_cuflash_bench_refuses_a_tier_on_the_cpu():
    done = CliRunner().invoke(command.bench, ["--device", "cpu", "--tier", "simt"])
    assert done.exit_code == 2 and "--tier simt needs a GPU" in done.output


def test_bench_is_a_command_of_cuflash():
    assert "bench" in cuflash_main.commands


def test_a_checkout_runs_it_as_a_package_too():
    done = subprocess.run(
        [sys.executable, "-m", "bench.run", "--device", "cpu", "--help"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "python -m bench.run" in done.stdout


def test_the_library_is_found_without_a_checkout_or_missing(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("cuflash.bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(command, "__file__", str(tmp_path / "a" / "b" / "bench.py"))
    if importlib.util.find_spec("cuflash.bench") is None:
        with pytest.raises(click.ClickException, match="the benchmarks of cuflash are missing"):
            command.library("run")
    with contextlib.suppress(click.ClickException):
        command.library("cases")
