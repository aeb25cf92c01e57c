"""The plain kernels of decoding, decode_combine and merge, executed on the host: results against the oracle, without a GPU.

From the problem to the launches all is as in a call; the device has few multiprocessors, so that requests are shared by
blocks. Caches are NaN where a request has no key.
"""

import dataclasses

import numpy as np
import pytest
from emulation import needs_compiler, run
from support import DTYPES, normal

from cuflash import launch, merge, oracle, problem
from cuflash.arrays import NumpyDoor
from cuflash.config import DEVICES, choose

pytestmark = needs_compiler

view = NumpyDoor().view
POINTERS = {"k": "k_new", "v": "v_new", "k_cache": "k", "v_cache": "v"}  # where the params have another name


def call(
    dtype,
    lengths,
    *,
    capacity=150,
    seqlen_q=1,
    heads_q=4,
    heads_k=2,
    head_dim=64,
    head_dim_v=None,
    seqlen_new=0,
    page_size=0,
    batch_idx=False,
    latent=False,
    num_sms=3,
    asynchronous=True,
    step=1,
    offset=0,
    seed=0,
    **options,
):
    """Judges what the kernels make of random arrays. ``offset``: elements by which all miss an address of 16 bytes."""
    rng, batch, head_dim_v = np.random.default_rng(seed), len(lengths), head_dim_v or head_dim
    max_pages = -(-capacity // page_size) if page_size else 0
    slots = batch * max_pages + 2 if page_size else batch + 2 * batch_idx
    rows = page_size or capacity

    def array(*shape):
        memory = np.zeros(int(np.prod(shape)) + 16, DTYPES[dtype])
        placed = memory[(-memory.ctypes.data // memory.itemsize) % (16 // memory.itemsize) + offset :][: int(np.prod(shape))]
        placed[...] = normal(placed.shape, dtype, int(rng.integers(1 << 30)))
        return placed.reshape(shape)

    x = dict.fromkeys(("k", "v", "cache_seqlens", "cache_batch_idx", "block_table"))
    x["q"], x["k_cache"] = array(batch, seqlen_q, heads_q, head_dim), array(slots, rows, heads_k, head_dim)
    x["v_cache"] = x["k_cache"][..., :head_dim_v] if latent else array(slots, rows, heads_k, head_dim_v)
    if seqlen_new:
        x["k"] = array(batch, seqlen_new, heads_k, head_dim)
        x["v"] = x["k"][..., :head_dim_v] if latent else array(batch, seqlen_new, heads_k, head_dim_v)
    x["cache_seqlens"] = np.array(lengths, np.int64 if batch_idx else np.int32)
    if page_size:
        x["block_table"] = rng.permutation(slots)[: batch * max_pages].astype(np.int32).reshape(batch, max_pages)
    elif batch_idx:
        x["cache_batch_idx"] = rng.permutation(slots)[:batch]
    held = np.zeros((slots, rows), bool)
    for b, key in ((b, key) for b, length in enumerate(lengths) for key in range(length)):
        if page_size:
            held[x["block_table"][b, key // page_size], key % page_size] = True
        else:
            held[x["cache_batch_idx"][b] if batch_idx else b, key] = True
    x["k_cache"][~held] = x["v_cache"][~held] = np.nan

    before = {name: None if value is None else value.copy() for name, value in x.items()}
    num_splits = options.pop("num_splits", 0)
    views = {name: None if value is None else view(value) for name, value in x.items()}
    stated = problem.check_attention_with_kvcache(**views, num_splits=num_splits, return_lse=True, **options)
    config = choose(stated, dataclasses.replace(DEVICES["sm_80"], num_sms=num_sms), "simt")
    out = np.full((*x["q"].shape[:3], head_dim_v), np.nan, DTYPES[dtype])
    lse = np.full((batch, heads_q, seqlen_q), np.nan, stated.lse_dtype)
    record = launch.params_of(stated, config, launch.strides_of(stated, views | {"out": None}))
    offsets, size = launch.scratch_places(stated, config)
    scratch = np.full(size + 16, 0xFF, np.uint8)
    scratch = scratch[-scratch.ctypes.data % 16 :]
    for name, value in (x | {"out": out, "lse": lse}).items():
        record[POINTERS.get(name, name)] = 0 if value is None else value.ctypes.data
    for name, place in offsets.items():
        record[name] = scratch.ctypes.data + place
    for kernel, blocks in launch.steps_of(stated, config):
        run(kernel, launch.kernel_constants(kernel), record, blocks, asynchronous=asynchronous, step=step)

    named = {name: before[name] for name in ("k", "v", "cache_seqlens", "cache_batch_idx", "block_table")}
    given = [before[name] for name in ("q", "k_cache", "v_cache")]
    judgement = oracle.judge_with_kvcache(out, lse, *given, **named, **options)
    assert judgement.ok, judgement.why
    *_, k_cache, v_cache = oracle.attention_with_kvcache(*given, **named, **options)
    for after, expected in ((x["k_cache"], k_cache), (x["v_cache"], v_cache)):
        np.testing.assert_array_equal(after.astype(np.float64), expected.astype(np.float64))


CASES = {
    "one request": dict(dtype="float32", lengths=(150,)),
    "skewed lengths": dict(dtype="float32", lengths=(0, 150, 1, 64, 65), num_sms=2),
    "few rows of many": dict(dtype="float16", lengths=(70, 9), heads_q=14, seqlen_q=3, head_dim=128, step=33),
    "one row": dict(dtype="bfloat16", lengths=(130, 66), heads_q=2, head_dim=96, head_dim_v=80),
    "two rows": dict(dtype="float64", lengths=(99, 3), head_dim=40, head_dim_v=200, num_splits=1),
    "pages": dict(dtype="float32", lengths=(17, 0, 149), page_size=16, seqlen_q=2, asynchronous=False),
    "pages of one key": dict(dtype="float16", lengths=(40, 7), page_size=1, capacity=41, seqlen_new=1),
    "append": dict(dtype="float32", lengths=(0, 147, 64), seqlen_new=3, seqlen_q=3, num_splits=2, step=127),
    "append across pages": dict(dtype="float64", lengths=(14, 60), seqlen_new=20, page_size=16, num_splits=5),
    "numbers of requests": dict(dtype="float32", lengths=(80, 5, 33), batch_idx=True, seqlen_new=2),
    "window": dict(dtype="float32", lengths=(150, 31), seqlen_q=9, window=(20, 3), causal=False),
    "left alone": dict(dtype="float16", lengths=(150, 2), seqlen_q=5, window=(70, None), causal=False, num_splits=3),
    "no mask": dict(dtype="float64", lengths=(150, 2), seqlen_q=5, causal=False, softmax_scale=-0.1),
    "softcap": dict(dtype="float32", lengths=(150, 40), softcap=2.0),
    "any address": dict(dtype="float16", lengths=(150, 40), offset=1, seqlen_new=1),
    "any address, odd widths": dict(dtype="float32", lengths=(150, 40), offset=1, head_dim=33, head_dim_v=7, asynchronous=False),
    "latent": dict(dtype="float32", lengths=(90, 40), heads_q=8, heads_k=1, head_dim=576, head_dim_v=512, latent=True),
    "latent, float64": dict(
        dtype="float64",
        lengths=(35,),
        heads_q=3,
        heads_k=1,
        head_dim=576,
        head_dim_v=512,
        latent=True,
        seqlen_new=1,
        num_splits=4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decoding(name):
    call(**CASES[name])


@pytest.mark.parametrize("dtype, head_dim_v", [("float16", 64), ("bfloat16", 129), ("float32", 128), ("float64", 8)])
@pytest.mark.parametrize("count", [1, 5, 32])
def test_merge(dtype, head_dim_v, count):
    shape = 2, 5, 3, head_dim_v
    outs = [normal(shape, dtype, seed) for seed in range(count)]
    lses = [(9 * normal((2, 3, 5), "float64", seed)).astype(problem.lse_dtype(dtype)) for seed in range(count)]
    lses[0][:, 1], outs[0][:, :, 1] = -np.inf, np.nan
    for out, lse in zip(outs, lses):
        lse[1, 2], out[1, :, 2] = -np.inf, np.nan
    expected, expected_lse = oracle.merge_attention(outs, lses)
    views = {f"{name}[{i}]": view(x) for name, group in (("outs", outs), ("lses", lses)) for i, x in enumerate(group)}
    stated = problem.check_merge(views | {"out": None}, count)
    record, kernel = merge.params_of(stated, views | {"out": None}), merge.kernel_of(stated)
    out, lse = np.full(shape, np.nan, DTYPES[dtype]), np.full((2, 3, 5), np.nan, stated.lse_dtype)
    record["outs"][:count], record["lses"][:count] = ([x.ctypes.data for x in group] for group in (outs, lses))
    record["out"], record["lse"] = out.ctypes.data, lse.ctypes.data
    run(kernel, launch.kernel_constants(kernel), record, -(-2 * 5 * 3 // 8))
    rounding = 2 * oracle.ROUNDOFF[dtype] + (1e-15 if dtype == "float64" else 1e-6)
    np.testing.assert_allclose(out.astype(float), expected, rtol=rounding, atol=4 * rounding)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
