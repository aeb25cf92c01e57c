"""Every message about a wrong input of decoding, by its text; what a problem says of caches, pages and lengths.

Through `check_attention_with_kvcache` on views that are made up; what reads lengths through `check_cache_lengths` on NumPy
arrays and through `cuflash.attention_with_kvcache`.
"""

import dataclasses
import math
import re

import numpy as np
import pytest

import cuflash
from cuflash.arrays import View
from cuflash.problem import (
    DecodeProblem,
    check_attention_with_kvcache,
    check_cache_lengths,
    check_workspace_size,
    fixed_length,
    pairs_to_keep_apart,
)

# 3 requests with room for 40 keys each, or 10 pages of 16 keys of which a request may have 5.
SHAPES = {
    "q": (3, 2, 4, 64),
    "k_cache": (3, 40, 2, 64),
    "v_cache": (3, 40, 2, 32),
    "k": (3, 2, 2, 64),
    "v": (3, 2, 2, 32),
    "cache_seqlens": (3,),
    "cache_batch_idx": (3,),
    "block_table": (3, 5),
    "workspace": (4096,),
    "out": (3, 2, 4, 32),
}
PAGES = {"k_cache": (10, 16, 2, 64), "v_cache": (10, 16, 2, 32)}
KINDS = {"cache_seqlens": "int32", "cache_batch_idx": "int32", "block_table": "int32", "workspace": "uint8"}
LEAST = ("q", "k_cache", "v_cache")
NEW = ("k", "v")


def view(shape, strides=None, dtype="float16", ptr=1 << 20, device="cuda:0", framework="cupy", **more) -> View:
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))) if strides is None else strides
    if len(shape) == 3 and "was_3d" not in more:  # as a door makes it
        shape, strides, more = (1, *shape), (1, *strides), {"was_3d": True, **more}
    return View(shape, strides, dtype, device, ptr, framework, **more)


def call(*names, **changes) -> dict:
    """The views of a call by name: q and the caches, those in `names`, and those that `changes` name.

    A change is a dict of what `view` is given otherwise, or what stands there as it is. A table of pages makes pages of the
    caches.
    """
    names = dict.fromkeys((*LEAST, *names, *(name for name in changes if name in SHAPES)))
    shapes = SHAPES | (PAGES if "block_table" in names else {})
    made = {}
    for name in names:
        own = changes.pop(name, {})
        if isinstance(own, dict):
            place = list(SHAPES).index(name) + 1
            own = {"shape": shapes[name], "dtype": KINDS.get(name, "float16"), "ptr": place << 32} | own
            made[name] = view(own.pop("shape"), own.pop("strides", None), **own)
        else:
            made[name] = own
    return made | changes


def stated(*names, **changes) -> DecodeProblem:
    return check_attention_with_kvcache(**call(*names, **changes))


# ------------------------------------------------------------------------------------------------------------
# What is refused

APPEND = dict(k={}, v={}, cache_seqlens={})
WRONG = {
    # shapes
    "q of 3 axes": (
        dict(q=dict(shape=(2, 4, 64))),
        "q must have 4 axes (batch, seqlen, heads, head_dim); got shape (2, 4, 64)",
    ),
    "q of 2 axes": (dict(q=dict(shape=(4, 64))), "q must have 4 axes (batch, seqlen, heads, head_dim); got shape (4, 64)"),
    "k_cache of 3 axes": (
        dict(k_cache=dict(shape=(40, 2, 64))),
        "k_cache must have 4 axes (batch, max_seqlen, heads, head_dim); got shape (40, 2, 64)",
    ),
    "v_cache of 5 axes, pages": (
        dict(block_table={}, v_cache=dict(shape=(1, 10, 16, 2, 32))),
        "v_cache must have 4 axes (num_pages, page_size, heads, head_dim); got shape (1, 10, 16, 2, 32)",
    ),
    "k of 3 axes": (
        APPEND | dict(k=dict(shape=(3, 2, 64))),
        "k must have 4 axes (batch, seqlen, heads, head_dim); got shape (3, 2, 64)",
    ),
    "batch of the caches": (
        dict(k_cache=dict(shape=(4, 40, 2, 64)), v_cache=dict(shape=(4, 40, 2, 32))),
        "batch must be the same in q, k_cache and v_cache unless cache_batch_idx says which is whose; got 3, 4 and 4",
    ),
    "batch of v_cache": (
        dict(v_cache=dict(shape=(4, 40, 2, 32))),
        "batch must be the same in k_cache and v_cache; got 3 and 4",
    ),
    "pages of v_cache": (
        dict(block_table={}, v_cache=dict(shape=(9, 16, 2, 32))),
        "num_pages must be the same in k_cache and v_cache; got 10 and 9",
    ),
    "max_seqlen": (
        dict(v_cache=dict(shape=(3, 41, 2, 32))),
        "max_seqlen must be the same in k_cache and v_cache; got 40 and 41",
    ),
    "page_size": (
        dict(block_table={}, v_cache=dict(shape=(10, 8, 2, 32))),
        "page_size must be the same in k_cache and v_cache; got 16 and 8",
    ),
    "page_size 0": (
        dict(block_table={}, k_cache=dict(shape=(10, 0, 2, 64)), v_cache=dict(shape=(10, 0, 2, 32))),
        "page_size of k_cache and v_cache must be 1 or more; got 0 in shape (10, 0, 2, 64)",
    ),
    "heads of the caches": (
        dict(v_cache=dict(shape=(3, 40, 1, 32))),
        "heads must be the same in k_cache and v_cache; got 2 and 1",
    ),
    "heads that do not divide": (
        dict(q=dict(shape=(3, 2, 5, 64))),
        "heads of q must be a multiple of the heads of k_cache and v_cache; got 5 and 2",
    ),
    "head_dim": (
        dict(q=dict(shape=(3, 2, 4, 32))),
        "head_dim must be the same in q and k_cache; got 32 and 64",
    ),
    "head_dim 577": (
        dict(q=dict(shape=(3, 2, 4, 577)), k_cache=dict(shape=(3, 40, 2, 577))),
        "head_dim of q and k_cache must be 1 to 576; got 577",
    ),
    "head_dim_v 513": (
        dict(v_cache=dict(shape=(3, 40, 2, 513))),
        "head_dim of v_cache must be 1 to 512; got 513",
    ),
    "head_dim_v 0": (dict(v_cache=dict(shape=(3, 40, 2, 0))), "head_dim of v_cache must be 1 to 512; got 0"),
    "capacity": (
        dict(k_cache=dict(shape=(3, 2**30, 2, 64)), v_cache=dict(shape=(3, 2**30, 2, 32))),
        f"max_seqlen of k_cache must be at most {2**30 - 1}; got {2**30}",
    ),
    "capacity of pages": (
        dict(block_table=dict(shape=(3, 2**26))),
        f"max_pages * page_size must be at most {2**30 - 1}; got {2**26} * 16",
    ),
    "rows of a key head": (
        dict(q=dict(shape=(3, 2**29, 4, 64))),
        f"seqlen of q * query heads a key head must be at most {2**30 - 1}; got {2**29} * 2",
    ),
    # k and v
    "k alone": (dict(k={}, cache_seqlens={}), "k and v are appended together: k was given, v was not"),
    "v alone": (dict(v={}, cache_seqlens={}), "k and v are appended together: v was given, k was not"),
    "batch of k": (
        APPEND | dict(k=dict(shape=(2, 2, 2, 64)), v=dict(shape=(2, 2, 2, 32))),
        "batch must be the same in q, k and v; got 3, 2 and 2",
    ),
    "batch of v": (APPEND | dict(v=dict(shape=(2, 2, 2, 32))), "batch must be the same in k and v; got 3 and 2"),
    "seqlen of v": (APPEND | dict(v=dict(shape=(3, 1, 2, 32))), "seqlen must be the same in k and v; got 2 and 1"),
    "heads of k": (
        APPEND | dict(k=dict(shape=(3, 2, 1, 64))),
        "heads must be the same in k and k_cache; got 1 and 2",
    ),
    "head_dim of v": (
        APPEND | dict(v=dict(shape=(3, 2, 2, 64))),
        "head_dim must be the same in v and v_cache; got 64 and 32",
    ),
    "seqlen of k": (
        APPEND | dict(k=dict(shape=(3, 2**30, 2, 64)), v=dict(shape=(3, 2**30, 2, 32))),
        f"seqlen of k must be at most {2**30 - 1}; got {2**30}",
    ),
    "k and v without lengths": (
        dict(k={}, v={}),
        "cache_seqlens must be given where k and v are appended: it says behind which keys",
    ),
    # strides
    "k_cache, last axis": (
        dict(k_cache=dict(strides=(10240, 256, 128, 2))),
        "k_cache must be contiguous in its last axis (stride 1 element); got strides (10240, 256, 128, 2) elements",
    ),
    "v_cache, last axis": (
        dict(v_cache=dict(strides=(2560, 1, 40, 80))),
        "v_cache must be contiguous in its last axis (stride 1 element); got strides (2560, 1, 40, 80) elements",
    ),
    "k, last axis": (APPEND | dict(k=dict(strides=(512, 256, 128, 2))), "k must be contiguous in its last axis"),
    "k_cache expanded": (
        APPEND | dict(k_cache=dict(strides=(0, 128, 64, 1))),
        "k_cache must not overlap itself where k and v are appended; got strides (0, 128, 64, 1) elements for shape "
        "(3, 40, 2, 64)",
    ),
    "v_cache expanded": (
        APPEND | dict(v_cache=dict(strides=(2560, 64, 0, 1))),
        "v_cache must not overlap itself where k and v are appended",
    ),
    "read-only k_cache": (
        APPEND | dict(k_cache=dict(readonly=True)),
        "k_cache must be writable where k and v are appended; got a read-only array",
    ),
    "read-only v_cache": (APPEND | dict(v_cache=dict(readonly=True)), "v_cache must be writable where k and v are appended"),
    # memory that is shared
    "k in k_cache": (APPEND | dict(k=dict(ptr=(2 << 32) + 128)), "k_cache must not overlap k: they share memory"),
    "v in k_cache": (APPEND | dict(v=dict(ptr=2 << 32)), "k_cache must not overlap v: they share memory"),
    "k in v_cache": (APPEND | dict(k=dict(ptr=3 << 32)), "v_cache must not overlap k: they share memory"),
    "q in v_cache": (APPEND | dict(q=dict(ptr=3 << 32)), "v_cache must not overlap q: they share memory"),
    "lengths in k_cache": (
        APPEND | dict(cache_seqlens=dict(ptr=2 << 32)),
        "k_cache must not overlap cache_seqlens: they share memory",
    ),
    "v_cache in k_cache": (
        APPEND | dict(v_cache=dict(strides=(5120, 128, 64, 1), ptr=(2 << 32) + 32)),
        "v_cache must not overlap k_cache where k and v are appended, unless it is k_cache[..., :head_dim_v]: they share memory",
    ),
    "out in k_cache": (dict(out=dict(ptr=2 << 32)), "out must not overlap k_cache: they share memory"),
    "out in v_cache": (dict(out=dict(ptr=(3 << 32) + 64)), "out must not overlap v_cache: they share memory"),
    "out in q": (dict(out=dict(ptr=1 << 32)), "out must not overlap q: they share memory"),
    "out in the table": (dict(block_table={}, out=dict(ptr=8 << 32)), "out must not overlap block_table: they share memory"),
    "out in k": (APPEND | dict(out=dict(ptr=4 << 32)), "out must not overlap k: they share memory"),
    "shape of out": (dict(out=dict(shape=(3, 2, 4, 64))), "out must have shape (3, 2, 4, 32); got (3, 2, 4, 64)"),
    # lengths
    "lengths of 2 axes": (
        dict(cache_seqlens=dict(shape=(3, 1))),
        "cache_seqlens must have 1 axis; got shape (3, 1)",
    ),
    "lengths of 0 axes": (dict(cache_seqlens=dict(shape=())), "cache_seqlens must have 1 axis; got shape ()"),
    "lengths of other requests": (
        dict(cache_seqlens=dict(shape=(4,))),
        "cache_seqlens must have an element for each request of q, shape (3,); got (4,)",
    ),
    "lengths with gaps": (
        dict(cache_seqlens=dict(strides=(2,))),
        "cache_seqlens must be contiguous; got strides (2,) elements for shape (3,)",
    ),
    "lengths elsewhere": (
        dict(cache_seqlens=dict(device="cpu")),
        "cache_seqlens must be on the device of q, cuda:0; got cpu",
    ),
    "indices of 2 axes": (
        dict(cache_batch_idx=dict(shape=(3, 1))),
        "cache_batch_idx must have 1 axis; got shape (3, 1)",
    ),
    "indices of other requests": (
        dict(cache_batch_idx=dict(shape=(2,))),
        "cache_batch_idx must have an element for each request of q, shape (3,); got (2,)",
    ),
    "indices elsewhere": (
        dict(cache_batch_idx=dict(device="cuda:1")),
        "cache_batch_idx must be on the device of q, cuda:0; got cuda:1",
    ),
    "negative": (
        dict(cache_seqlens=-1),
        "cache_seqlens must be 0 to 40, the keys that the cache can hold of a request; got -1",
    ),
    "beyond the cache": (
        dict(cache_seqlens=np.int32(41)),
        "cache_seqlens must be 0 to 40, the keys that the cache can hold of a request; got 41",
    ),
    "beyond the pages": (
        dict(block_table={}, cache_seqlens=81),
        "cache_seqlens must be 0 to 80, the keys that the cache can hold of a request; got 81",
    ),
    "no room": (
        APPEND | dict(cache_seqlens=39),
        "cache_seqlens must leave room for the 2 tokens of k and v, 38 or less of 40; got 39",
    ),
    "more tokens than room": (
        APPEND | dict(cache_seqlens=0, k=dict(shape=(3, 41, 2, 64)), v=dict(shape=(3, 41, 2, 32))),
        "cache_seqlens must leave room for the 41 tokens of k and v, -1 or less of 40; got 0",
    ),
    # pages
    "table with indices": (
        dict(block_table={}, cache_batch_idx={}),
        "cache_batch_idx is for a cache that is not paged: block_table says which pages are a request's",
    ),
    "table of 1 axis": (
        dict(block_table=dict(shape=(5,))),
        "block_table must have shape (batch, max_pages) with the batch of q, 3; got (5,)",
    ),
    "table of 3 axes": (
        dict(block_table=dict(shape=(3, 5, 1))),
        "block_table must have shape (batch, max_pages) with the batch of q, 3; got (3, 5, 1)",
    ),
    "table of other requests": (
        dict(block_table=dict(shape=(2, 5))),
        "block_table must have shape (batch, max_pages) with the batch of q, 3; got (2, 5)",
    ),
    "table by columns": (
        dict(block_table=dict(strides=(1, 3))),
        "block_table must be contiguous in its last axis (stride 1 element); got strides (1, 3) elements",
    ),
    "table off its element": (
        dict(block_table=dict(ptr=(8 << 32) + 2)),
        "block_table must be aligned to its element (4 bytes); its address is 0x800000002",
    ),
    "table elsewhere": (
        dict(block_table=dict(device="cuda:1")),
        "block_table must be on the device of q, cuda:0; got cuda:1",
    ),
    # splits, workspace, options
    "negative splits": (dict(num_splits=-1), "num_splits must be 0 (chosen) to 4096; got -1"),
    "too many splits": (dict(num_splits=4097), "num_splits must be 0 (chosen) to 4096; got 4097"),
    "workspace of 2 axes": (
        dict(workspace=dict(shape=(64, 64))),
        "workspace must have 1 axis; got shape (64, 64)",
    ),
    "workspace with gaps": (dict(workspace=dict(strides=(2,))), "workspace must be contiguous; got strides (2,) elements"),
    "workspace off 16 bytes": (
        dict(workspace=dict(ptr=(9 << 32) + 8)),
        "workspace must be aligned to 16 bytes; its address is 0x900000008",
    ),
    "read-only workspace": (dict(workspace=dict(readonly=True)), "workspace must be writable; got a read-only array"),
    "workspace elsewhere": (
        dict(workspace=dict(device="cuda:1")),
        "workspace must be on the device of q, cuda:0; got cuda:1",
    ),
    "workspace in k_cache": (dict(workspace=dict(ptr=2 << 32)), "workspace must not overlap k_cache: they share memory"),
    "workspace in out": (dict(out={}, workspace=dict(ptr=10 << 32)), "workspace must not overlap out: they share memory"),
    "window": (dict(window=(-2, 0)), "window left must be 0 or more, or None (or -1) for unbounded; got -2"),
    "scale": (dict(softmax_scale=math.nan), "softmax_scale must be finite; got nan"),
    "softcap": (dict(softcap=-1.0), "softcap must be finite and 0 (off) or more; got -1.0"),
}


@pytest.mark.parametrize("changes, message", WRONG.values(), ids=WRONG)
def test_wrong_values(changes, message):
    with pytest.raises(ValueError) as raised:
        stated(**changes)
    assert message in str(raised.value)


WRONG_KINDS = {
    "dtypes": (
        dict(v_cache=dict(dtype="bfloat16")),
        "q, k_cache, v_cache must have one dtype; got float16, float16, bfloat16",
    ),
    "dtypes of the new": (
        APPEND | dict(k=dict(dtype="float32")),
        "q, k_cache, v_cache, k, v must have one dtype; got float16, float16, float16, float32, float16",
    ),
    "no floats": (
        {name: dict(dtype="int32") for name in LEAST},
        "q, k_cache, v_cache must be one of float16, bfloat16, float32, float64; got int32",
    ),
    "frameworks": (
        dict(k_cache=dict(framework="torch")),
        "q, k_cache, v_cache must come from one framework; got cupy, torch, cupy",
    ),
    "framework of lengths": (
        dict(cache_seqlens=dict(framework="torch")),
        "cache_seqlens must come from the framework of q, cupy; got torch",
    ),
    "framework of the table": (
        dict(block_table=dict(framework="torch")),
        "block_table must come from the framework of q, cupy; got torch",
    ),
    "lengths": (
        dict(cache_seqlens=dict(dtype="float32")),
        "cache_seqlens must be one of int32, int64; got float32",
    ),
    "indices": (dict(cache_batch_idx=dict(dtype="int16")), "cache_batch_idx must be one of int32, int64; got int16"),
    "table": (dict(block_table=dict(dtype="int64")), "block_table must be int32; got int64"),
    "bool as a length": (dict(cache_seqlens=True), "cache_seqlens must be an integer, an array or None; got True"),
    "float as a length": (dict(cache_seqlens=3.0), "cache_seqlens must be an integer, an array or None; got 3.0"),
    "splits of float": (dict(num_splits=2.0), "num_splits must be an integer; got 2.0"),
    "splits of bool": (dict(num_splits=True), "num_splits must be an integer; got True"),
    "no splits": (dict(num_splits=None), "num_splits must be an integer; got None"),
    "workspace": (dict(workspace=dict(dtype="float32")), "workspace must be uint8; got float32"),
    "framework of the workspace": (
        dict(workspace=dict(framework="torch")),
        "workspace must come from the framework of q, cupy; got torch",
    ),
    "dtype of out": (dict(out=dict(dtype="float32")), "out must have the dtype of q, float16; got float32"),
    "causal": (dict(causal=1), "causal must be a bool; got 1"),
}


@pytest.mark.parametrize("changes, message", WRONG_KINDS.values(), ids=WRONG_KINDS)
def test_wrong_kinds(changes, message):
    with pytest.raises(TypeError) as raised:
        stated(**changes)
    assert message in str(raised.value)


def test_devices():
    with pytest.raises(ValueError, match="q, k_cache, v_cache, k, v must be on one device; got .*cuda:1"):
        stated(**APPEND | dict(v=dict(device="cuda:1")))


def test_a_workspace_that_is_too_small():
    check_workspace_size(None, 1000)
    check_workspace_size(view((1000,), dtype="uint8"), 1000)
    message = r"workspace must have 1000 bytes or more \(cuflash.kvcache_workspace_bytes\); got 999"
    with pytest.raises(ValueError, match=message):
        check_workspace_size(view((999,), dtype="uint8"), 1000)


# ------------------------------------------------------------------------------------------------------------
# What a problem says


def test_a_problem_says_what_was_asked():
    assert stated("k", "v", "cache_batch_idx", cache_seqlens=dict(dtype="int64"), num_splits=3, softcap=30, return_lse=True) == (
        DecodeProblem(
            dtype="float16",
            batch=3,
            seqlen_q=2,
            seqlen_k=40,
            heads_q=4,
            heads_k=2,
            head_dim=64,
            head_dim_v=32,
            softmax_scale=0.125,
            softcap=30.0,
            window_right=0,
            return_lse=True,
            seqlen_new=2,
            num_slots=3,
            has_cache_seqlens=True,
            has_cache_batch_idx=True,
            num_splits=3,
            decode_int64_lengths=1,
        )
    )
    paged = stated("block_table")
    assert (paged.paged, paged.page_size, paged.num_slots, paged.seqlen_k) == (True, 16, 10, 80)
    assert (paged.seqlen_new, paged.has_cache_seqlens, paged.decode_int64_lengths) == (0, False, 0)
    assert stated(cache_batch_idx=dict(dtype="int64")).decode_int64_lengths == 2


def test_a_number_is_no_part_of_the_problem():
    assert stated(cache_seqlens=7) == stated(cache_seqlens=np.int64(40)) == stated()
    assert stated("k", "v", cache_seqlens=0) == stated("k", "v", cache_seqlens=38)


def test_what_a_number_means():
    plain, appending = stated(), stated("k", "v", cache_seqlens=0)
    assert [fixed_length(plain, given) for given in (None, 0, 40, np.uint8(9))] == [40, 0, 40, 9]
    assert type(fixed_length(plain, np.int32(3))) is int
    assert [fixed_length(appending, given) for given in (0, 38)] == [0, 38]
    assert fixed_length(stated("cache_seqlens"), None) == 0


def test_a_cache_of_other_requests():
    """With indices the cache may hold fewer requests than the batch, or more."""
    for slots in (1, 2, 7):
        caches = {name: dict(shape=(slots, *SHAPES[name][1:])) for name in ("k_cache", "v_cache")}
        assert stated("cache_batch_idx", **caches).num_slots == slots


@pytest.mark.parametrize(
    "causal, window, expected",
    [
        (True, None, (None, 0)),
        (False, None, (None, None)),
        (True, (39, 0), (None, 0)),
        (True, (38, 5), (38, 0)),
        (False, (3, 1), (3, None)),
    ],
)
def test_windows_are_cut_to_what_they_can_reach(causal, window, expected):
    """Of the keys that there may be: a request that has fewer sees them all from a window as wide."""
    problem = stated(causal=causal, window=window)
    assert (problem.window_left, problem.window_right) == expected


def test_one_query_is_causal_without_a_mask():
    problem = stated(q=dict(shape=(3, 1, 4, 64)))
    assert (problem.window_left, problem.window_right) == (None, None)


LATENT = {"k_cache": dict(shape=(3, 40, 1, 576)), "q": dict(shape=(3, 2, 4, 576))}


def latent(**changes) -> dict:
    """A call whose values are the first columns of the keys."""
    cache = dict(shape=(3, 40, 1, 512), strides=(40 * 576, 576, 576, 1), ptr=2 << 32)
    return call(**LATENT | {"v_cache": cache} | changes)


def test_values_that_are_the_first_columns_of_keys():
    assert check_attention_with_kvcache(**latent()).v_is_k
    assert not stated().v_is_k
    # An axis of one has no stride that counts; the whole of the keys are their first columns too.
    other = dict(shape=(3, 40, 1, 512), strides=(40 * 576, 576, 777, 1), ptr=2 << 32)
    assert check_attention_with_kvcache(**latent(v_cache=other)).v_is_k
    assert check_attention_with_kvcache(**latent(v_cache=dict(shape=(3, 40, 1, 512), ptr=2 << 32))).v_is_k is False
    same = call()
    assert check_attention_with_kvcache(**same | {"v_cache": same["k_cache"]}).v_is_k
    # Other columns, without anything that is appended.
    assert not check_attention_with_kvcache(**latent(v_cache=other | dict(ptr=(2 << 32) + 128))).v_is_k


def test_new_values_are_the_first_columns_of_new_keys():
    k = dict(shape=(3, 2, 1, 576))
    inside = dict(shape=(3, 2, 1, 512), strides=(2 * 576, 576, 576, 1), ptr=4 << 32)
    assert check_attention_with_kvcache(**latent(k=k, v=inside, cache_seqlens=0)).v_is_k
    message = r"v must be k\[..., :head_dim_v\], as v_cache is k_cache\[..., :head_dim_v\]; got an array at 0x500000000 with"
    with pytest.raises(ValueError, match=message):
        check_attention_with_kvcache(**latent(k=k, v=inside | dict(ptr=5 << 32), cache_seqlens=0))
    with pytest.raises(ValueError, match="v_cache must not overlap k_cache where k and v are appended, unless"):
        shifted = dict(shape=(3, 40, 1, 512), strides=(40 * 576, 576, 576, 1), ptr=(2 << 32) + 128)
        check_attention_with_kvcache(**latent(v_cache=shifted, k=k, v=inside, cache_seqlens=0))


def test_caches_in_one_buffer():
    """Keys and values side by side in every page, or in every row, share no element."""
    for strides, second in (((2 * 16 * 128, 128, 64, 1), 16 * 128), ((16 * 256, 256, 64, 1), 128)):
        caches = {
            name: dict(shape=(10, 16, 2, 64), strides=strides, ptr=(2 << 32) + 2 * second * place)
            for place, name in enumerate(("k_cache", "v_cache"))
        }
        problem = stated("k", "block_table", v=dict(shape=(3, 2, 2, 64)), cache_seqlens=0, **caches)
        assert problem.seqlen_new == 2 and not problem.v_is_k


@pytest.mark.parametrize(
    "changes, alignment, tma",
    [
        ({}, 16, True),
        (dict(k_cache=dict(ptr=(2 << 32) + 8)), 8, False),
        (dict(v_cache=dict(strides=(40 * 68, 68, 34, 1))), 4, False),
        (dict(q=dict(ptr=(1 << 32) + 2)), 2, True),
        (APPEND | dict(k=dict(ptr=(4 << 32) + 4)), 4, True),
        (dict(k_cache=dict(strides=(5120, -128, 64, 1))), 16, False),
    ],
)
def test_alignment_is_what_divides_every_address(changes, alignment, tma):
    problem = stated(**changes)
    assert (problem.alignment, problem.tma) == (alignment, tma)


def test_what_is_empty():
    assert not stated().is_empty
    no_rows = dict(q=dict(shape=(3, 0, 4, 64)))
    assert stated(**no_rows).is_empty and stated(**no_rows).rows == 0
    assert not stated(**no_rows | APPEND).is_empty, "there are keys to append"
    nothing = {name: dict(shape=(0, *SHAPES[name][1:])) for name in ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens")}
    assert stated(**nothing).is_empty
    no_tokens = dict(k=dict(shape=(3, 0, 2, 64)), v=dict(shape=(3, 0, 2, 32)))
    assert stated(**no_tokens) == stated() and stated(**no_tokens | no_rows).is_empty


@pytest.mark.parametrize(
    "changes",
    [
        dict(cache_batch_idx={}, k_cache=dict(shape=(0, 40, 2, 64)), v_cache=dict(shape=(0, 40, 2, 32))),
        dict(k_cache=dict(shape=(3, 0, 2, 64)), v_cache=dict(shape=(3, 0, 2, 32))),
        dict(block_table={}, k_cache=dict(shape=(0, 16, 2, 64)), v_cache=dict(shape=(0, 16, 2, 32))),
        dict(block_table=dict(shape=(3, 0))),
    ],
)
def test_a_cache_without_room_is_of_capacity_0(changes):
    problem = stated(**changes)
    assert problem.seqlen_k == 0 and not problem.is_empty
    with pytest.raises(ValueError, match="cache_seqlens must be 0 to 0, .*; got 1"):
        stated(**changes, cache_seqlens=1)


def test_what_must_be_apart():
    names = ("q", "k_cache", "v_cache", "k", "v", "workspace", "out")
    pairs = set(map(frozenset, pairs_to_keep_apart(stated("k", "v", cache_seqlens=0), ("out",), names)))
    assert pairs == {frozenset((x, y)) for x in names for y in names if x != y} - {
        frozenset(pair) for pair in (("q", "k"), ("q", "v"), ("k", "v"))
    }
    plain = list(pairs_to_keep_apart(stated(), ("out",), names))
    assert {name for name, _ in plain} == {"workspace", "out"}
    of_latent = check_attention_with_kvcache(**latent())
    assert ("v_cache", "k_cache") not in list(pairs_to_keep_apart(of_latent, ("out",), names))


# ------------------------------------------------------------------------------------------------------------
# What lengths, indices and tables say


def lengths(problem, cache_seqlens=None, cache_batch_idx=None, block_table=None):
    arrays = (x if x is None or isinstance(x, int) else np.array(x) for x in (cache_seqlens, cache_batch_idx, block_table))
    check_cache_lengths(problem, *arrays)


def test_lengths_that_fit():
    lengths(stated("cache_seqlens"), [0, 17, 40])
    lengths(stated("k", "v", "cache_seqlens"), [0, 17, 38])
    lengths(stated())
    lengths(stated(), 12)
    lengths(stated("cache_batch_idx"), None, [2, 2, 0])
    lengths(stated("k", "v", "cache_batch_idx", "cache_seqlens"), [1, 2, 3], [2, 1, 0])
    # What stands behind the last page of a request is not read: of 16 keys there is one.
    table = [[3, -1, 99, 5, 5], [0, 9, -7, -7, -7], [-1, -1, -1, -1, -1]]
    lengths(stated("block_table", "cache_seqlens"), [16, 17, 0], None, table)
    lengths(stated("block_table"), 0, None, table)


LENGTHS = {
    "negative": (
        ("cache_seqlens",),
        ([0, -1, 3],),
        "cache_seqlens must be 0 to 40, the keys that the cache can hold of a request; got -1 for request 1",
    ),
    "beyond": (("cache_seqlens",), ([0, 2, 2**40],), f"of a request; got {2**40} for request 2"),
    "no room": (
        ("cache_seqlens", *NEW),
        ([0, 39, 3],),
        "cache_seqlens must leave room for the 2 tokens of k and v, 38 or less of 40; got 39 for request 1",
    ),
    "index": (
        ("cache_batch_idx",),
        (None, [0, 3, 1]),
        "cache_batch_idx must be 0 to 2, below the batch of k_cache; got 3 for request 1",
    ),
    "negative index": (("cache_batch_idx",), (None, [0, 1, -1]), "below the batch of k_cache; got -1 for request 2"),
    "index twice": (
        ("cache_batch_idx", "cache_seqlens", *NEW),
        ([0, 0, 0], [1, 2, 1]),
        "cache_batch_idx must not name a part of the cache twice where k and v are appended; got 1 for requests 0, 2",
    ),
    "page": (
        ("block_table", "cache_seqlens"),
        ([33, 0, 0], None, [[0, 9, 10, 0, 0]] * 3),
        "block_table must name pages 0 to 9 of k_cache as far as a request has keys; got 10 for page 2 of request 0",
    ),
    "negative page": (
        ("block_table", "cache_seqlens"),
        ([0, 1, 0], None, [[-1, 0, 0, 0, 0]] * 3),
        "got -1 for page 0 of request 1",
    ),
    "page of new keys": (
        ("block_table", "cache_seqlens", *NEW),
        ([0, 15, 0], None, [[0, 77, 0, 0, 0]] * 3),
        "got 77 for page 1 of request 1",
    ),
    "pages of a number": (("block_table",), (17, None, [[0, -3, 0, 0, 0]] * 3), "got -3 for page 1 of request 0"),
}


@pytest.mark.parametrize("names, values, message", LENGTHS.values(), ids=LENGTHS)
def test_lengths_that_do_not_fit(names, values, message):
    with pytest.raises(ValueError) as raised:
        lengths(stated(*names), *values)
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------------------------------
# Through the function


def numpy_arrays(*names, **shapes):
    kinds = {name: KINDS.get(name, "float32") for name in SHAPES}
    return {name: np.zeros(shapes.get(name, SHAPES[name]), kinds[name]) for name in (*LEAST, *names)}


@pytest.mark.parametrize(
    "names, changes, error, message",
    [
        ((), dict(cache_seqlens=41), ValueError, "cache_seqlens must be 0 to 40"),
        ((), dict(cache_seqlens=1.0), TypeError, "cache_seqlens must be an integer, an array or None; got 1.0"),
        ((), dict(cache_seqlens=[1, 2, 3]), TypeError, "cache_seqlens must be a CuPy, PyTorch, JAX or NumPy array"),
        (("k", "v"), {}, ValueError, "cache_seqlens must be given where k and v are appended"),
        (("k",), dict(cache_seqlens=1), ValueError, "k and v are appended together: k was given, v was not"),
        (("cache_seqlens",), dict(num_splits=-2), ValueError, "num_splits must be 0"),
        ((), dict(validate=1), TypeError, "validate must be a bool; got 1"),
        ((), dict(cache_seqlens=np.array([1, 2, 41], np.int32)), ValueError, "got 41 for request 2"),
        ((), dict(block_table=np.zeros((3, 5))), TypeError, "block_table must be int32; got float64"),
        ((), dict(workspace=np.zeros(4)), TypeError, "workspace must be uint8; got float64"),
    ],
)
def test_the_function_says_so_too(names, changes, error, message):
    arrays = numpy_arrays(*names, **(PAGES if "block_table" in changes else {}))
    with pytest.raises(error, match=re.escape(message)):
        cuflash.attention_with_kvcache(**arrays, **changes)


def test_the_workspace_of_the_cpu_is_none():
    assert cuflash.kvcache_workspace_bytes(**numpy_arrays()) == 0
    with pytest.raises(ValueError, match="k_cache must have 4 axes"):
        cuflash.kvcache_workspace_bytes(**numpy_arrays(k_cache=(40, 2, 64)))


def test_a_problem_of_decoding_is_a_key():
    problem = stated()
    assert hash(problem) == hash(dataclasses.replace(problem)) and problem != stated(num_splits=1)
