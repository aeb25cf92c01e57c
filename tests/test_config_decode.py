"""Decoding from a problem to what is launched: configs on every device, params, grids, scratch, prepared calls. No CUDA."""

import ctypes
import dataclasses
import itertools

import numpy as np
import pytest
from test_config import H200, SMEM_KIB, driver, limited  # noqa: F401

from cuflash import jit, launch
from cuflash.arrays import View
from cuflash.config import DEVICES, TIERS, Config, Device, choose, kernels_of, refusal
from cuflash.memory import contiguous_strides
from cuflash.problem import DTYPES, DecodeProblem

HEAD_DIMS = ((1, 1), (33, 20), (64, 64), (96, 96), (128, 128), (192, 128), (128, 256), (256, 256), (257, 64), (576, 512))
ROWS = (1, 2, 5, 8, 16, 17, 32, 33, 64, 65, 1000)


def problem(dtype="float16", head_dim=128, head_dim_v=None, **changes) -> DecodeProblem:
    sizes = dict(batch=3, seqlen_q=1, seqlen_k=4096, heads_q=32, heads_k=8, softmax_scale=0.125, num_slots=3)
    return DecodeProblem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v or head_dim, **sizes | changes)


def latent(dtype="float16", head_dim=576, head_dim_v=512, **changes) -> DecodeProblem:
    return problem(dtype, head_dim, head_dim_v, **dict(heads_q=128, heads_k=1, v_is_k=True) | changes)


def many_rows(dtype="float16", head_dim=128, head_dim_v=None, **changes) -> DecodeProblem:
    return problem(dtype, head_dim, head_dim_v, **dict(heads_q=320) | changes)


def constants_of(made: Config) -> dict[str, int]:
    return dict(made.constants)


COMMON = {
    "DTYPE", "MASK_LEFT", "MASK_RIGHT", "SCORE", "VARLEN", "PAGED", "APPENDS", "FIXED_SPLITS", "V_IS_K", "ITEM_COST",
    "BLOCK_M", "BLOCK_N", "HEAD_DIM", "HEAD_DIM_V", "VEC_BYTES", "OUT_VEC_BYTES", "SMEM_BYTES",
}  # fmt: skip
OWN = {
    "decode_sm90": {"WHOLE_HEADS", "TMA"},
    "decode_rows_sm90": {"WHOLE_HEADS", "KEEPS_Q", "STAGES"},
    "decode_sm80": {"WHOLE_HEADS", "MTILES", "WARPS_M", "WARPS_N", "GROUP_KEYS", "KEEPS_Q", "STAGES", "MERGE_COLS"},
    "decode_simt": {"WARPS", "KEYS", "CHUNK_K", "CHUNK_V", "STAGES", "MIN_BLOCKS"},
}
OF_COMBINE = COMMON - {"SCORE", "HEAD_DIM", "VEC_BYTES", "SMEM_BYTES"} | {"THREADS"}


def combine_of(kernel: str) -> str:
    """The kernel that joins the parts of another."""
    return "decode_combine_wide" if kernel == "decode_sm90" else "decode_combine"


def assert_sound(made: Config, stated: DecodeProblem, device: Device) -> None:
    """What must hold for any config, whoever chose its numbers."""
    constants = constants_of(made)
    assert made.tier in TIERS and made.kernel in OWN and made.kernel.endswith(f"_{made.tier}")
    assert (jit.kernels_dir() / f"{made.kernel}.cu").is_file()
    assert made.constants == tuple(sorted(made.constants)) and set(constants) == COMMON | OWN[made.kernel]
    assert all(type(value) is int for value in constants.values())
    assert 0 < made.smem_bytes == constants["SMEM_BYTES"] <= device.smem_optin
    assert (made.block_m, made.block_n) == (constants["BLOCK_M"], constants["BLOCK_N"])
    assert constants["HEAD_DIM"] >= stated.head_dim and constants["HEAD_DIM_V"] >= stated.head_dim_v
    assert constants["VEC_BYTES"] <= stated.alignment and constants["OUT_VEC_BYTES"] <= stated.out_alignment
    assert constants["PAGED"] == stated.paged and constants["APPENDS"] == (stated.seqlen_new > 0)
    assert constants["FIXED_SPLITS"] == (stated.num_splits > 0) and constants["V_IS_K"] == stated.v_is_k
    assert constants["DTYPE"] == DTYPES.index(stated.dtype) and constants["VARLEN"] == 0
    assert constants["MASK_LEFT"] == (stated.window_left is not None)
    assert constants["MASK_RIGHT"] == (stated.window_right is not None)
    # Every multiprocessor has its blocks, all of them at a time; a few may be left out.
    blocks = constants.get("MIN_BLOCKS", 1)
    if made.kernel == "decode_sm90":
        assert device.num_sms * 23 // 24 <= made.max_blocks <= device.num_sms
    else:
        assert made.max_blocks == device.num_sms * blocks
    assert not made.counts_tiles
    assert blocks == 1 or blocks * (made.smem_bytes + 1024) <= device.smem_optin + 1024
    if made.tier == "sm80":
        mtiles, warps_m, warps_n = (constants[name] for name in ("MTILES", "WARPS_M", "WARPS_N"))
        assert made.block_m == 16 * mtiles * warps_m and made.block_n == constants["GROUP_KEYS"] * warps_n
        assert made.threads == 32 * warps_m * warps_n <= 512 and 2 <= constants["STAGES"] <= 6
        assert constants["GROUP_KEYS"] in (16, 32) and constants["KEEPS_Q"] in (0, 1) and constants["KEEPS_Q"] * mtiles <= 1
        assert constants["HEAD_DIM"] % 32 == constants["HEAD_DIM_V"] % 32 == 0 and constants["ITEM_COST"] >= 1
        assert constants["HEAD_DIM_V"] % constants["MERGE_COLS"] == 0 and mtiles * max(stated.head_dim, stated.head_dim_v) <= 256
        padded = (constants["HEAD_DIM"], constants["HEAD_DIM_V"])
        assert constants["WHOLE_HEADS"] == ((stated.head_dim, stated.head_dim_v) == padded)
    elif made.tier == "simt":
        assert made.threads == 32 * constants["WARPS"] and made.block_n == 4 * constants["WARPS"] * constants["KEYS"]
        assert made.block_m in (1, 2, 4, 8) and made.smem_bytes <= 48 * 1024
        itemsize = {"float32": 4, "float64": 8}.get(stated.dtype, 2)
        assert stated.head_dim * itemsize % constants["VEC_BYTES"] == stated.head_dim_v * itemsize % constants["VEC_BYTES"] == 0
    else:
        assert made.threads == 384 and made.block_m == made.block_n == 64
        padded = (constants["HEAD_DIM"], constants["HEAD_DIM_V"])
        assert constants["WHOLE_HEADS"] == ((stated.head_dim, stated.head_dim_v) == padded)
        if made.kernel == "decode_sm90":
            assert stated.v_is_k and min(stated.head_dim, stated.head_dim_v) > 256
            assert constants["TMA"] == (stated.tma and stated.page_size % 64 == 0)
        else:
            assert stated.rows > 32 and max(padded) <= 256 and constants["HEAD_DIM"] % 64 == constants["HEAD_DIM_V"] % 64 == 0
            assert constants["STAGES"] in (2, 4, 6) and constants["KEEPS_Q"] in (0, 1)
        assert made.is_accelerated and device.compute_capability == (9, 0) and constants["VEC_BYTES"] == 16
    assert made.reasons and all("#" in reason and len(reason.split("#")[1]) > 5 for reason in made.reasons)
    for number in (made.block_m, made.block_n, made.smem_bytes, made.max_blocks):
        assert any(str(number) in reason for reason in made.reasons), f"no reason gives {number}"
    assert hash(made) == hash(dataclasses.replace(made))


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_has_a_config_on_every_device(dtype, arch):
    """Also on one of its kind with less or more shared memory than it has."""
    for device in (DEVICES[arch], *(limited(DEVICES[arch], kib) for kib in SMEM_KIB)):
        for (head_dim, head_dim_v), rows in itertools.product(HEAD_DIMS, ROWS):
            for stated in (
                problem(dtype, head_dim, head_dim_v, seqlen_q=rows, heads_q=1, heads_k=1),
                latent(dtype, head_dim, min(head_dim, head_dim_v), seqlen_q=rows, heads_q=1, paged=True, page_size=16),
            ):
                made = choose(stated, device)
                assert_sound(made, stated, device)
                better = TIERS[: TIERS.index(made.tier)]
                assert made.refused == tuple((tier, refusal(tier, stated, device)) for tier in better)
                for tier in TIERS:
                    if (reason := refusal(tier, stated, device)) is None:
                        assert_sound(choose(stated, device, tier), stated, device)
                    else:
                        with pytest.raises(NotImplementedError) as raised:
                            choose(stated, device, tier)
                        assert str(raised.value) == f"tier {tier}: {reason}"


def test_which_tier_takes_what():
    for arch, device in DEVICES.items():
        for dtype, head_dim in itertools.product(DTYPES, (64, 256)):
            tensor_cores = dtype == "float16" and device.compute_capability >= (7, 5)
            tensor_cores |= dtype == "bfloat16" and device.compute_capability >= (8, 0)
            assert choose(problem(dtype, head_dim), device).tier == ("sm80" if tensor_cores else "simt")
            for rows in (32, 33, 64, 500):
                is_many = arch == "sm_90" and tensor_cores and rows > 32
                expected = "sm90" if is_many else "sm80" if tensor_cores else "simt"
                made = choose(problem(dtype, head_dim, seqlen_q=rows, heads_q=8), device)
                assert made.tier == expected and (made.kernel == "decode_rows_sm90") == is_many
        wide = choose(latent(), device).tier
        assert wide == ("sm90" if arch == "sm_90" else "simt")
    assert choose(problem(head_dim=257), H200).tier == choose(problem(head_dim_v=512), H200).tier == "simt"
    assert choose(latent(v_is_k=False), H200).tier == choose(latent(alignment=8), H200).tier == "simt"
    assert choose(latent(head_dim_v=256), H200).tier == "simt"
    assert choose(latent(head_dim=320, head_dim_v=320), H200).kernel == choose(latent(), H200).kernel == "decode_sm90"
    assert choose(latent(head_dim=128, head_dim_v=64), H200).kernel == "decode_rows_sm90"
    assert choose(problem(seqlen_q=16, alignment=8), H200).tier == "sm80"


@pytest.mark.parametrize(
    "stated, device, message",
    [
        (problem("float32"), H200, "tier sm90: tensor cores take float16 and bfloat16; float32 would be rounded"),
        (latent(), DEVICES["sm_100"], "tier sm90: needs compute capability 9.0"),
        (problem(), H200, "tier sm90: made for more than 32 query rows a key head, up to which sm80 is as fast as memory; got 4"),
        (problem(seqlen_q=8), H200, "tier sm90: made for more than 32 query rows a key head, .*; got 32"),
        (problem(seqlen_q=9, alignment=4), H200, "tier sm90: addresses and strides .* must be multiples of 16 bytes"),
        (problem(seqlen_q=9), limited(H200, 64), "tier sm90: no tile for head_dim 128 and 128 fits the 65536 bytes"),
        (problem(head_dim=257), H200, r"tier sm90: .* above 256 values must be the first columns .* k_cache\[..., :head_dim_v\]"),
        (latent(head_dim_v=128), H200, "tier sm90: made for head_dim and head_dim_v both above 256 or both not; got 576 and 128"),
        (latent(alignment=8), H200, "tier sm90: addresses and strides .* must be multiples of 16 bytes"),
        (latent(), limited(H200, 163), "tier sm90: no tile for head_dim 576 and 512 fits the 166912 bytes"),
        (latent(), H200, "tier sm80: O of head_dim above 256 takes more registers than a warp has"),
        (problem("float16"), DEVICES["sm_70"], "tier sm80: needs compute capability 7.5 or newer"),
        (problem("bfloat16"), DEVICES["sm_75"], "tier sm80: bfloat16 tensor cores need compute capability 8.0 or newer"),
        (problem(head_dim=256), limited(H200, 16), "tier sm80: no tile for head_dim 256 and 256 fits the 16384 bytes"),
        (problem("float32"), limited(H200, 1), "tier simt: no tile fits into 1024 bytes of shared memory; 48 KiB always do"),
    ],
)
def test_a_forced_tier_says_why_it_refuses(stated, device, message):
    with pytest.raises(NotImplementedError, match=message):
        choose(stated, device, message[5:9])


@pytest.mark.parametrize(
    "dims, stages, keeps_q",
    [
        ((64, 64), 6, 1),
        ((128, 128), 6, 1),
        ((65, 40), 6, 1),
        ((192, 128), 4, 0),
        ((128, 64), 6, 1),
        ((256, 64), 4, 0),
        ((128, 256), 4, 0),
        ((192, 192), 2, 0),
        ((256, 256), 2, 0),
    ],
)
def test_tiles_of_many_rows(dims, stages, keeps_q):
    made = choose(many_rows("bfloat16", *dims), H200)
    assert made.kernel == "decode_rows_sm90" and (made.block_m, made.block_n) == (64, 64)
    assert (constants_of(made)["STAGES"], constants_of(made)["KEEPS_Q"]) == (stages, keeps_q)


@pytest.mark.parametrize("rows, expected", [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (500, 64)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_rows_of_a_tile_are_those_of_the_problem(rows, expected, head_dim):
    made = choose(problem(head_dim=head_dim, seqlen_q=rows, heads_q=8), H200, "sm80")
    assert made.block_m == expected
    assert constants_of(made)["MTILES"] == 1 or head_dim <= 128


def test_query_heads_that_share_a_key_head_are_rows():
    for seqlen_q, heads_q in ((1, 256), (32, 8), (8, 32)):
        stated = problem(seqlen_q=seqlen_q, heads_q=heads_q)
        assert stated.rows == 32 and choose(stated, H200, "sm80").block_m == 32


@pytest.mark.parametrize(
    "tier, make", [("sm90", latent), ("sm90", many_rows), ("sm80", problem), ("simt", problem), ("simt", latent)]
)
def test_a_variant_serves_all_sizes_and_lengths(tier, make):
    """One compile a model, not one a step: but for the rows of a key head, sizes are data."""
    base = make(window_right=3, softcap=5.0, seqlen_q=2, seqlen_new=1, num_splits=2)
    variants = [(kernel.kernel, kernel.constants) for kernel in kernels_of(base, choose(base, H200, tier))]
    for change in (
        dict(batch=1),
        dict(seqlen_k=65),
        dict(seqlen_k=100_000, num_slots=99),
        dict(heads_q=8 * base.heads_q, heads_k=8 * base.heads_k),
        dict(softmax_scale=0.3),
        dict(window_right=0),
        dict(return_lse=True),
        dict(num_splits=7),
        dict(seqlen_new=40),
        dict(has_cache_seqlens=True, has_cache_batch_idx=True, decode_int64_lengths=3),
    ):
        changed = dataclasses.replace(base, **change)
        made = choose(changed, H200, tier)
        assert [(kernel.kernel, kernel.constants) for kernel in kernels_of(changed, made)] == variants, change
    for change in (
        dict(paged=True, page_size=16),
        dict(seqlen_new=0),
        dict(num_splits=0),
        dict(window_right=None),
        dict(softcap=0.0),
        dict(out_alignment=2),
    ):
        changed = dataclasses.replace(base, **change)
        assert choose(changed, H200, tier).constants != variants[0][1], change


# ------------------------------------------------------------------------------------------------------------
# From a config to a launch

WITH_TIERS = [
    ("sm80", problem()),
    ("simt", problem()),
    ("simt", problem("float64")),
    ("sm90", latent()),
    ("sm90", many_rows()),
    ("simt", latent()),
]


def launched(stated, tier=None):
    return {kernel.kernel: grid for kernel, grid in launch.steps_of(stated, choose(stated, H200, tier))}


@pytest.mark.parametrize("tier, stated", WITH_TIERS)
def test_grids_and_scratch(tier, stated):
    real = 8 if stated.dtype == "float64" else 4
    for seqlen_q, batch, num_splits in itertools.product((1, 3, 70), (1, 40), (0, 1, 2, 50, 4096)):
        changed = dataclasses.replace(stated, seqlen_q=seqlen_q, batch=batch, num_splits=num_splits)
        made = choose(changed, H200, tier)
        items = batch * -(-changed.rows // made.block_m) * changed.heads_k
        blocks = min(made.max_blocks, items * num_splits) if num_splits else made.max_blocks
        name = combine_of(made.kernel)
        combine = {0: {name: blocks - 1}, 1: {}}.get(num_splits, {name: items})
        if made.kernel == "decode_sm90":
            combine = {name: 2 * count for name, count in combine.items()}
        assert launched(changed, tier) == {made.kernel: blocks} | combine
        slots = items * num_splits if num_splits else 2 * blocks
        sizes = {"partial_out": constants_of(made)["HEAD_DIM_V"], "partial_lse": 1}
        expected = {} if num_splits == 1 else {name: slots * made.block_m * size * real for name, size in sizes.items()}
        if made.kernel == "decode_sm90" and not num_splits:
            expected["partial_lse"] += 40 * blocks  # which parts there are
        assert launch.scratch_of(changed, made) == expected
        offsets, size = launch.scratch_places(changed, made)
        assert list(offsets) == list(expected) and all(offset % 256 == 0 for offset in offsets.values())
        assert size >= sum(expected.values()) and (num_splits != 1 or size == 0)


@pytest.mark.parametrize("tier, stated", WITH_TIERS)
def test_the_combine_fits_the_kernel_before(tier, stated):
    changed = dataclasses.replace(stated, out_alignment=8, paged=True, page_size=4, seqlen_new=1, num_splits=3)
    main, combine = kernels_of(changed, choose(changed, H200, tier))
    constants = dict(combine.constants)
    assert combine.kernel == combine_of(main.kernel)
    own = {"BLOCKS"} if main.kernel == "decode_sm90" else set()
    assert set(constants) == OF_COMBINE | own and combine.threads == constants["THREADS"] and combine.smem_bytes == 0
    for name in OF_COMBINE - {"THREADS", "OUT_VEC_BYTES"}:
        assert constants[name] == dict(main.constants)[name]
    assert constants["OUT_VEC_BYTES"] == 8
    assert launch.arch_of(combine, "sm_90") == "sm_90" and launch.arch_of(main, "sm_90") == "sm_90" + "a" * (tier == "sm90")


def test_new_keys_without_a_query_are_appended_all_the_same():
    for num_splits in (0, 1, 3):
        stated = problem(seqlen_q=0, seqlen_new=2, num_splits=num_splits)
        assert not stated.is_empty and launched(stated) == {"decode_sm80": 132}
        assert not any(launch.scratch_of(stated, choose(stated, H200)).values())


def test_more_items_than_one_launch_counts():
    stated = problem(batch=2**20, heads_q=2**12, heads_k=2**12)
    with pytest.raises(ValueError, match=r"batch \* heads \* query tiles must be at most 2147483647; got 1048576 \* 4096 \* 1"):
        launch.steps_of(stated, choose(stated, H200))


@pytest.mark.parametrize("tier, stated", WITH_TIERS)
def test_more_tiles_than_the_kernels_count(tier, stated):
    """Of all items, each with one more than its keys have, where a window begins inside of a tile, and what it costs beside."""
    stated = dataclasses.replace(stated, seqlen_k=2**20, num_slots=4)
    made = choose(stated, H200, tier)
    items = -(-stated.rows // made.block_m) * stated.heads_k
    key_tiles = 2**20 // made.block_n + 1 + constants_of(made)["ITEM_COST"]
    limit = 2**31 - 1 - made.max_blocks  # a block counts on to what would be its next
    most = limit // (items * key_tiles)
    assert launch.grid_of(dataclasses.replace(stated, batch=most), made) == made.max_blocks
    more = dataclasses.replace(stated, batch=most + 1)
    with pytest.raises(ValueError, match=rf"\* key tiles must be at most {limit}; .* \* {key_tiles}: split the batch"):
        launch.grid_of(more, made)
    short = dataclasses.replace(stated, seqlen_k=1, num_splits=4096, batch=limit // (items * 4096) + 1)
    with pytest.raises(ValueError, match=r"query tiles \* num_splits must be at most .* \* 4096: split the batch"):
        launch.grid_of(short, made)


STRIDES = {
    "q": (1, 2, 3, 1),
    "k": (2**40, 5, 6, 1),
    "v": (7, 8, 9, 1),
    "out": (10, 11, 12, 1),
    "k_new": (13, 14, 15, 1),
    "v_new": (16, 17, -18, 1),
}


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_the_params_record_says_what_the_problem_says(num_splits):
    stated = problem(
        seqlen_q=3, window_left=7, window_right=2, softcap=2.0, paged=True, page_size=16, seqlen_new=2, num_slots=99,
        num_splits=num_splits, decode_int64_lengths=1,
    )  # fmt: skip
    made = choose(stated, H200)
    record = launch.params_of(stated, made, STRIDES | {"block_table": (77, 1)})
    assert record.dtype == launch.DECODE_PARAMS
    for name, strides in STRIDES.items():
        assert tuple(record[f"{name}_strides"]) == strides[:3]
    assert record["block_table_stride"] == 77
    for name in (
        "batch seqlen_q seqlen_k heads_q heads_k head_dim head_dim_v window_left window_right num_slots page_size seqlen_new "
        "num_splits decode_int64_lengths"
    ).split():
        assert record[name] == getattr(stated, name)
    assert record["num_row_tiles"] == -(-stated.rows // made.block_m) == 1
    assert record["num_blocks"] == launch.grid_of(stated, made)
    np.testing.assert_allclose(record["scale_log2"], 0.125 / np.log(2))
    assert all(record[name] == 0 for name in ("k_new", "partial_out", "fixed_seqlen"))


def test_the_params_of_decoding_begin_with_those_of_a_forward():
    for name in launch.FWD_PARAMS.names:
        assert launch.DECODE_PARAMS.fields[name] == launch.FWD_PARAMS.fields[name]
    # A call writes its pointers in two runs, and its fixed length.
    first = launch.FWD_PARAMS.itemsize
    pointers = "k_new v_new cache_seqlens cache_batch_idx block_table partial_out partial_lse".split()
    places = [launch.DECODE_PARAMS.fields[name][1] for name in pointers]
    assert places == list(range(first, first + 8 * len(places), 8))
    assert launch.DECODE_PARAMS.itemsize <= launch.BWD_TENSOR_MAPS_OFFSET, "one buffer serves every launch"
    constants = launch.params_constants()
    assert constants["DECODE_PARAMS_BYTES"] == launch.DECODE_PARAMS.itemsize
    assert all(constants[f"OFFSET_{name}"] == offset for name, (_, offset) in launch.DECODE_PARAMS.fields.items())


# ------------------------------------------------------------------------------------------------------------
# Prepared calls, with a driver that is made up

NAMES = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "cache_batch_idx", "block_table", "workspace", "out")


def prepared(stated, tier=None, **given):
    """Of packed arrays; `given` views, or None for one that is not given."""
    cache = (stated.num_slots, stated.page_size or stated.seqlen_k, stated.heads_k)
    new = (stated.batch, stated.seqlen_new, stated.heads_k)
    shapes = {
        "q": (stated.batch, stated.seqlen_q, stated.heads_q, stated.head_dim),
        "k_cache": (*cache, stated.head_dim),
        "v_cache": (*cache, stated.head_dim_v),
    }
    if stated.seqlen_new:
        shapes |= {"k": (*new, stated.head_dim), "v": (*new, stated.head_dim_v)}
    if stated.paged:
        shapes["block_table"] = (stated.batch, stated.seqlen_k // stated.page_size)
    views = dict.fromkeys(NAMES)
    for i, name in enumerate(NAMES):
        if name in shapes:
            dtype = "int32" if name == "block_table" else stated.dtype
            views[name] = View(shapes[name], contiguous_strides(shapes[name]), dtype, "cuda:0", (i + 1) << 40, "cupy")
    return launch.Prepared(stated, views | given, ("out",), 0, 7, tier)


@pytest.mark.parametrize("tier, stated", WITH_TIERS)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_call_is_one_record_for_both_kernels(driver, tier, stated, num_splits):  # noqa: F811
    stated = dataclasses.replace(stated, num_splits=num_splits, return_lse=True)
    call = prepared(stated, tier)
    assert call.written_shapes == [(3, 1, stated.heads_q, stated.head_dim_v)] and call.lse_shape == (3, stated.heads_q, 1)
    assert list(call.scratch_offsets) == [] if num_splits == 1 else ["partial_out", "partial_lse"]
    for length in (17, 4096):
        driver.clear()
        call.launch(7, length, *range(11, 23))
        names = [kernel := choose(stated, H200, tier).kernel] + [combine_of(kernel)] * (num_splits != 1)
        assert [step[0] for step in driver] == names and all(step[4] == 7 for step in driver)
        for step in driver:
            record = step[5]
            fields = "q k v out lse k_new v_new cache_seqlens cache_batch_idx block_table partial_out partial_lse".split()
            assert [int(record[name]) for name in fields] == list(range(11, 23))
            assert [int(record[name]) for name in launch.FWD_PARAMS.names[5:10]] == [0] * 5
            assert record["fixed_seqlen"] == length and record["num_blocks"] == driver[0][1]
            assert record["k_strides"].tolist() == list(contiguous_strides((3, 4096, stated.heads_k, stated.head_dim))[:3])
    boxes = launch.boxes_of(choose(stated, H200, tier)) if kernel == "decode_sm90" else {}
    assert boxes == ({"k": (64, 64)} if kernel == "decode_sm90" else {})
    made = [(made.place, made.sizes, made.strides, made.box[:2]) for made in driver.maps.encoded]
    address = ctypes.addressof(call.launch._params) + launch.DECODE_TENSOR_MAPS_OFFSET
    assert made == [(address, (576, 4096, 1, 3), (1152, 0, 4096 * 1152), (64, 64))] * len(boxes), "of the cache"


@pytest.mark.parametrize(
    "changes, by_tma",
    [
        ({}, 1),
        (dict(paged=True, page_size=64), 1),
        (dict(paged=True, page_size=192), 1),
        (dict(paged=True, page_size=16), 0),
        (dict(paged=True, page_size=96), 0),
        (dict(tma=False), 0),
    ],
)
def test_key_tiles_that_lie_in_one_piece_come_by_tma(changes, by_tma):
    made = choose(latent(**changes), H200)
    assert constants_of(made)["TMA"] == by_tma and any(reason.startswith(f"tma = {by_tma}  # ") for reason in made.reasons)


@pytest.mark.parametrize(
    "batch, heads_q, blocks",
    [(64, 16, 128), (64, 128, 128), (128, 64, 128), (16, 128, 128), (1, 128, 132), (22, 16, 132), (132, 16, 132)]
    + [(17, 16, 132), (300, 128, 132), (256, 64, 128), (0, 16, 132)],
)
def test_requests_of_one_length_have_whole_shares(batch, heads_q, blocks):
    assert choose(latent(batch=batch, heads_q=heads_q), H200).max_blocks == blocks


def test_strides_of_pages_and_of_new_keys(driver):  # noqa: F811
    stated = problem(paged=True, page_size=16, num_slots=1000, seqlen_new=2)
    table = View((3, 256), (300, 1), "int32", "cuda:0", 8 << 40, "cupy")
    call = prepared(stated, block_table=table)
    call.launch(7, 0, *range(12))
    record = driver[0][5]
    assert record["block_table_stride"] == 300 and record["num_slots"] == 1000 and record["page_size"] == 16
    assert record["k_strides"].tolist() == [16 * 8 * 128, 8 * 128, 128]
    assert record["k_new_strides"].tolist() == record["v_new_strides"].tolist() == [2 * 8 * 128, 8 * 128, 128]


def test_nothing_to_write_is_no_launch(driver):  # noqa: F811
    for changes in (dict(batch=0), dict(seqlen_q=0), dict(heads_q=0, heads_k=0)):
        call = prepared(problem(**changes))
        assert call.launch is None and call.scratch_bytes == 0
    assert driver == []


def test_a_workspace_must_be_large_enough(driver):  # noqa: F811
    needed = launch.scratch_places(problem(), choose(problem(), H200))[1]
    workspace = View((needed,), (1,), "uint8", "cuda:0", 9 << 40, "cupy")
    assert prepared(problem(), workspace=workspace).scratch_bytes == needed
    with pytest.raises(ValueError, match=f"workspace must have {needed} bytes or more .*; got {needed - 1}"):
        prepared(problem(), workspace=workspace._replace(shape=(needed - 1,)))
    assert prepared(problem(num_splits=1), workspace=workspace._replace(shape=(0,))).scratch_bytes == 0
    assert len(driver.loaded) == 3, "what is too small is refused before anything is compiled"


def test_addresses_that_may_overlap(driver):  # noqa: F811
    plain = prepared(problem())
    assert not plain.writes_given
    call = prepared(problem(seqlen_new=1))
    assert call.writes_given
    size = 3 * 4096 * 8 * 128 * 2
    pointers = [i << 40 for i in range(1, 6)] + [0] * 5
    assert not call.may_overlap(pointers)
    for other, place in itertools.product((0, 2, 3, 4), (0, size - 2)):
        wrong = list(pointers)
        wrong[other] = pointers[1] + place
        assert call.may_overlap(wrong), (other, place)
    beside = [*pointers[:2], pointers[1] + size, *pointers[3:]]
    for _ in range(2):      # the second time what was found is known
        assert not call.may_overlap(beside)
    for i in range(1000):
        call.may_overlap([*pointers[:4], pointers[4] + 16 * i, *pointers[5:]])
    assert len(call._apart) <= 257
    # What is known to share no element is not asked about again, wherever both lie.
    inside = [*pointers[:2], pointers[1] + 256, *pointers[3:]]
    assert call.may_overlap(inside)
    call.are_apart(inside)
    assert not call.may_overlap(inside) and not call.may_overlap([x + 512 for x in inside[:5]] + [0] * 5)
    assert call.may_overlap([*inside[:2], inside[2] + 16, *inside[3:]])


def test_values_in_keys_may_share_their_memory(driver):  # noqa: F811
    call = prepared(latent(seqlen_new=1))
    pointers = [1 << 40, 2 << 40, 2 << 40, 4 << 40, 4 << 40] + [0] * 5
    assert not call.may_overlap(pointers)
    assert call.may_overlap([2 << 40, *pointers[1:]])
