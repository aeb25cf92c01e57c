"""choose(): a config or a reason for every problem on every device, and what a forced tier does. No CUDA."""

import ctypes
import dataclasses
import itertools
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from test_tma import MadeUpDriver, layout_of, pointers_of

from cuflash import config, jit, launch, tma
from cuflash import driver as driver_functions
from cuflash import problem as problem_module
from cuflash.arrays import View
from cuflash.config import (
    DEVICES,
    TIERS,
    Config,
    Device,
    choose,
    force_tier,
    kernels_of,
    refusal,
)
from cuflash.problem import DTYPES, BackwardProblem, Problem

HEAD_DIMS = (1, 8, 20, 31, 32, 33, 64, 80, 96, 100, 128, 129, 160, 192, 200, 224, 255, 256)
UNEQUAL = ((192, 128), (128, 256), (256, 64), (64, 8), (8, 256), (1, 33), (96, 160), (72, 40))
SMEM_KIB = (48, 64, 96, 99, 163, 227)
H200 = DEVICES["sm_90"]


def problem(dtype="float16", head_dim=64, head_dim_v=None, **changes) -> Problem:
    sizes = dict(batch=2, seqlen_q=1000, seqlen_k=1000, heads_q=8, heads_k=2, softmax_scale=0.125)
    return Problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v or head_dim, **sizes | changes)


def backward(dtype="float16", head_dim=64, head_dim_v=None, **changes) -> BackwardProblem:
    return BackwardProblem(**vars(problem(dtype, head_dim, head_dim_v)) | changes)


BOTH = pytest.mark.parametrize("problem_of", [problem, backward], ids=["forward", "backward"])
WITH_TIERS = list(itertools.product((problem, backward), TIERS))


def each_config(stated: Problem) -> list[Config]:
    """On each tier that takes it on an H200."""
    return [choose(stated, H200, tier) for tier in TIERS if refusal(tier, stated, H200) is None]


def limited(device: Device, kib: int) -> Device:
    return dataclasses.replace(device, smem_optin=kib * 1024)


def assert_sound(made: Config, stated: Problem, device: Device) -> None:
    """What must hold for any config, whoever chose its numbers."""
    constants, is_backward = dict(made.constants), isinstance(stated, BackwardProblem)
    is_hopper = made.tier == "sm90"
    is_wide = is_hopper and is_backward and max(stated.head_dim, stated.head_dim_v) > 128
    assert made.tier in TIERS
    assert made.kernel == f"{'bwd_dkv' if is_wide else 'bwd' if is_backward else 'fwd'}_{made.tier}"
    assert (jit.kernels_dir() / f"{made.kernel}.cu").is_file()
    assert made.constants == tuple(sorted(made.constants)), "one spelling of the same constants"
    assert all(type(value) is int for value in constants.values())
    assert 0 < made.smem_bytes <= device.smem_optin
    assert constants["SMEM_BYTES"] == made.smem_bytes
    assert made.threads <= 1024 and made.block_n == constants.get("BLOCK_N", 64)
    assert made.dq_block_m == (128 if is_wide else 0)
    if is_wide:
        # A warpgroup loads, one has dk of 64 keys, one dv; dq has a kernel of its own, whose two have 64 queries each.
        assert (made.threads, made.block_m, made.block_n) == (384, 64, 64) and stated.tma
        assert constants["HEAD_DIM"] in (192, 256)
        assert constants["WHOLE_HEADS"] == (stated.head_dim == stated.head_dim_v == constants["HEAD_DIM"])
        *_, dq = kernels_of(stated, made)
        assert dq.kernel == "bwd_dq_sm90" and dq.threads == 384 and 0 < dq.smem_bytes <= device.smem_optin
        assert made.max_blocks == device.num_sms and made.counts_tiles
    elif is_hopper and is_backward:
        # A warpgroup loads, and each of two others has 64 keys; half of dq of a query tile is rows of one wgmma or columns.
        # 80 rows are none of a wgmma: there dq is computed transposed, and bwd_cast turns it.
        assert (made.threads, made.block_n) == (384, 128) and made.block_m == constants["BLOCK_M"] in (64, 80, 128)
        dq_columns = constants["HEAD_DIM"] // (128 // made.block_m)
        *_, cast = kernels_of(stated, made)
        assert dict(cast.constants)["TRANSPOSED"] == (made.block_m == 80)
        assert not (constants["STAGES_DQ"] and stated.deterministic)
        assert constants["K_SLOTS"] == 2 or constants["V_SLOTS"] == 1, "V is free before K"
        assert not constants["ASCENDS"] or (stated.deterministic and stated.window_right is not None and not stated.varlen)
        assert dq_columns % constants["K_PANEL"] == 0 and constants["K_PANEL"] in (16, 32, 64)
        assert stated.alignment == 16 and stated.tma
        assert made.max_blocks == device.num_sms and made.counts_tiles
        assert constants["WHOLE_HEADS"] == (stated.head_dim == stated.head_dim_v == constants["HEAD_DIM"])
    elif is_hopper:
        # A warpgroup loads, and each of the others has the 64 rows of one wgmma; keys are 16 at a time.
        assert made.threads == 128 * (1 + constants["CONSUMERS"]) and made.block_m == 64 * constants["CONSUMERS"]
        assert made.block_n % 16 == 0 and made.block_n <= 256
        # A block stays on its multiprocessor: no more than there are, and a counter where tiles take different time.
        is_even = stated.window_left is None and stated.window_right is None
        tiles = -(-stated.seqlen_q // made.block_m) * stated.batch * stated.heads_q
        counts = stated.varlen or (not is_even and tiles > device.num_sms)
        assert made.max_blocks == device.num_sms and made.counts_tiles == counts
        assert stated.alignment == 16 and stated.tma
    else:
        assert made.threads == 32 * constants["WARPS"] and made.block_m == constants["BLOCK_M"]
        # Another block next to it must have room: its own memory and what the driver takes of each.
        blocks = constants["MIN_BLOCKS"]
        assert blocks >= 1 and (blocks == 1 or blocks * (made.smem_bytes + 1024) <= device.smem_optin + 1024)
        assert constants["VEC_BYTES"] <= stated.alignment
        assert made.max_blocks == 0 and not made.counts_tiles
    assert constants["HEAD_DIM"] >= stated.head_dim and constants.get("HEAD_DIM_V", constants["HEAD_DIM"]) >= stated.head_dim_v
    assert constants["OUT_VEC_BYTES"] <= stated.out_alignment
    assert made.is_accelerated == is_hopper
    assert 1 <= made.heads_in_group <= stated.batch * (stated.heads_k if is_backward else stated.heads_q)
    assert constants["VARLEN"] == stated.varlen
    assert is_wide or constants.get("DETERMINISTIC", 0) == getattr(stated, "deterministic", 0)
    assert constants["DTYPE"] == DTYPES.index(stated.dtype)
    assert constants["MASK_LEFT"] == (stated.window_left is not None)
    assert constants["MASK_RIGHT"] == (stated.window_right is not None)
    assert made.reasons and all("#" in reason and len(reason.split("#")[1]) > 5 for reason in made.reasons)
    for number in (made.block_m, made.block_n, made.smem_bytes):
        assert any(str(number) in reason for reason in made.reasons), f"no reason gives {number}"
    assert hash(made) == hash(dataclasses.replace(made))


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
def test_every_problem_has_a_config_on_every_device(problem_of, dtype, arch):
    """Also on one of its kind with less or more shared memory than it has."""
    for device in (DEVICES[arch], *(limited(DEVICES[arch], kib) for kib in SMEM_KIB)):
        for head_dim, head_dim_v in (*zip(HEAD_DIMS, HEAD_DIMS, strict=True), *UNEQUAL):
            stated = problem_of(dtype, head_dim, head_dim_v)
            made = choose(stated, device)
            assert_sound(made, stated, device)
            assert made == choose(dataclasses.replace(stated), dataclasses.replace(device)), "same in, same out"
            # The predicate, the refusals that a config carries and a forced tier say the same.
            better = TIERS[: TIERS.index(made.tier)]
            assert made.refused == tuple((tier, refusal(tier, stated, device)) for tier in better)
            for tier in TIERS:
                if (reason := refusal(tier, stated, device)) is None:
                    assert_sound(choose(stated, device, tier), stated, device)
                    assert choose(stated, device, tier).tier == tier
                else:
                    with pytest.raises(NotImplementedError) as raised:
                        choose(stated, device, tier)
                    assert str(raised.value) == f"tier {tier}: {reason}"


@pytest.mark.parametrize("arch", [arch for arch in DEVICES if arch >= "sm_75" or len(arch) > 5])
def test_tensor_cores_are_used_where_they_are(arch):
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            expected = "sm80" if dtype == "float16" or dtype == "bfloat16" and arch != "sm_75" else "simt"
            if expected == "sm80" and arch == "sm_90":
                expected = "sm90"
            assert choose(problem(dtype, head_dim), DEVICES[arch]).tier == expected, (dtype, head_dim)
            expected = "sm80" if dtype in ("float16", "bfloat16") and arch != "sm_75" else "simt"
            if expected == "sm80" and arch == "sm_90":
                expected = "sm90"
            assert choose(backward(dtype, head_dim), DEVICES[arch]).tier == expected, (
                dtype,
                head_dim,
            )


@pytest.mark.parametrize("arch", ["sm_60", "sm_61", "sm_70"])
def test_older_gpus_get_plain_arithmetic(arch):
    for dtype, problem_of in itertools.product(DTYPES, (problem, backward)):
        made = choose(problem_of(dtype), DEVICES[arch])
        assert made.tier == "simt" and [tier for tier, _ in made.refused] == ["sm90", "sm80"]


@pytest.mark.parametrize("capability", [(8, 7), (9, 0), (9, 1), (10, 3), (12, 1), (13, 7), (20, 0)])
def test_a_newer_gpu_gets_the_best_tier_it_can_run(capability):
    """wgmma is of 9.0 alone: neither of its successors nor of another of its major version."""
    for dtype, problem_of in itertools.product(("float16", "bfloat16"), (problem, backward)):
        made = choose(problem_of(dtype), dataclasses.replace(H200, compute_capability=capability, name="unheard of"))
        if capability == (9, 0):
            assert made.tier == "sm90" and made.refused == ()
        else:
            assert made.tier == "sm80" and [tier for tier, _ in made.refused] == ["sm90"]


@pytest.mark.parametrize("change", [dict(alignment=8, tma=False), dict(tma=False)], ids=str)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    "problem_of, arrays", [(problem, "q, k and v"), (backward, "q, k, v and dout")], ids=["forward", "backward"]
)
def test_arrays_that_tma_cannot_address_go_to_the_next_tier(problem_of, arrays, change, varlen):
    for dtype, head_dim in itertools.product(("float16", "bfloat16"), HEAD_DIMS):
        stated = problem_of(dtype, head_dim, varlen=varlen, **change)
        made = choose(stated, H200)
        assert_sound(made, stated, H200)
        ((tier, reason),) = made.refused
        assert (made.tier, tier) == ("sm80", "sm90") and reason.startswith(f"TMA cannot address {arrays}: ")
        assert dataclasses.replace(made, refused=()) == choose(stated, H200, "sm80")
        with pytest.raises(NotImplementedError, match=f"tier sm90: TMA cannot address {arrays}: "):
            choose(stated, H200, "sm90")


def test_an_out_that_is_not_aligned_keeps_no_backward_from_tma():
    """It is read by bwd_delta alone; that of an odd head_dim is never aligned."""
    stated = backward(head_dim=65, alignment=2)
    assert choose(stated, H200).tier == "sm90"


@pytest.mark.parametrize(
    "block_m, changes",
    [
        (128, dict(seqlen_q=2048)),
        (128, dict(seqlen_q=2048, window_right=0)),
        (128, dict(seqlen_q=512, batch=1, heads_q=64)),
        (64, dict(seqlen_q=512, batch=1, heads_q=64, window_right=0)),  # few tiles that take different times
        (64, dict(seqlen_q=2048, batch=1, heads_q=4)),  # not one for each multiprocessor
        (64, dict(seqlen_q=64, batch=64)),  # half of each would be empty
        (64, dict(seqlen_q=2048, varlen=True)),
        (64, dict(seqlen_q=0)),
    ],
)
def test_float32_of_head_dim_128_has_large_tiles_where_there_are_many(block_m, changes):
    stated = problem("float32", 128, **dict(batch=4, heads_q=16, heads_k=4, seqlen_k=2048) | changes)
    made = choose(stated, H200)
    assert (made.tier, made.block_m, made.threads) == ("simt", block_m, 2 * block_m)


def test_the_name_of_a_gpu_decides_nothing():
    for dtype in DTYPES:
        assert choose(problem(dtype), dataclasses.replace(H200, name="")) == choose(problem(dtype), H200)


# ------------------------------------------------------------------------------------------------------------
# What a variant depends on


@pytest.mark.parametrize("problem_of, tier", WITH_TIERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_variant_serves_all_sizes_and_scales(problem_of, tier):
    """One compile a model, not one a batch: sizes, heads and the values of scale, cap and window are data."""
    base = problem_of(window_right=3, softcap=5.0)
    variants = variants_of(base, tier)
    for change in (
        dict(batch=1),
        dict(seqlen_q=1),
        dict(seqlen_q=16),
        dict(seqlen_k=1),
        dict(seqlen_k=65),
        dict(seqlen_q=100_000),
        dict(heads_q=2),
        dict(heads_q=96, heads_k=8),
        dict(softmax_scale=0.3),
        dict(softmax_scale=-1.0),
        dict(softcap=50.0),
        dict(window_right=0),
        dict(return_lse=True),
    ):
        assert variants_of(dataclasses.replace(base, **change), tier) == variants, change


def variants_of(stated, tier):
    return [(kernel.kernel, kernel.constants) for kernel in kernels_of(stated, choose(stated, H200, tier))]


COMPILED_FOR = [
    dict(dtype="bfloat16"),
    dict(head_dim=128, head_dim_v=128),
    dict(head_dim_v=128),
    dict(window_left=3),
    dict(window_right=3),
    dict(softcap=5.0),
    dict(softmax_scale=0.0),
    dict(softmax_scale=-0.125),
    dict(out_alignment=2),
    dict(varlen=True),
]


@pytest.mark.parametrize(
    "problem_of, tier, change",
    [
        *((problem_of, tier, change) for problem_of, tier in WITH_TIERS for change in COMPILED_FOR),
        *((problem_of, tier, dict(alignment=2)) for problem_of, tier in WITH_TIERS if tier != "sm90"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_the_kernel_is_compiled_for_changes_the_variant(problem_of, tier, change):
    base = problem_of()
    assert choose(dataclasses.replace(base, **change), H200, tier).constants != choose(base, H200, tier).constants


def test_window_sides_are_told_apart():
    sides = {
        (left, right): dict(choose(problem(window_left=left, window_right=right), H200).constants)
        for left in (None, 0)
        for right in (None, 0)
    }
    for (left, right), constants in sides.items():
        assert (constants["MASK_LEFT"], constants["MASK_RIGHT"]) == (left is not None, right is not None)


@pytest.mark.parametrize(
    "scale, folded", [(0.125, True), (1e-20, True), (1e4, True), (0.0, False), (-0.5, False), (1e-44, False)]
)
def test_a_scale_is_folded_only_where_that_is_exact(scale, folded):
    scores = {dict(choose(problem(softmax_scale=scale, softcap=cap), H200).constants)["SCORE"] for cap in (0.0, 5.0)}
    assert scores == ({0, 2} if folded else {1, 2})


@pytest.mark.parametrize("seqlen_k, expected", [(1, 16), (100, 16), (2**17, 4), (2**20, 4), (2**30 - 1, 4)])
def test_heads_that_run_together_share_the_cache(seqlen_k, expected):
    # K and V of 2**17 keys take 32 MiB a head: half an L2 holds no more than one, with its 4 query heads.
    assert choose(problem(seqlen_k=seqlen_k), H200, "sm80").heads_in_group == expected


@pytest.mark.parametrize(
    "head_dim, sides, block_n",
    [
        (64, (256, 0), 64),
        (64, (200, 57), 128),
        (64, (256, None), 128),
        (64, (None, 0), 128),
        (128, (1024, 0), 64),
        (128, (1000, 25), 80),
        (128, (1024, None), 80),
        (256, (100, 0), 64),
    ],
)
def test_a_narrow_window_has_smaller_key_tiles_on_hopper(head_dim, sides, block_n):
    left, right = sides
    sizes = dict(seqlen_q=8192, seqlen_k=8192, window_left=left, window_right=right)
    assert choose(problem("float16", head_dim, **sizes), H200).block_n == block_n
    # Short sequences have the rows of their own tile.
    if head_dim == 128:
        made = choose(problem("float16", head_dim, **sizes | dict(seqlen_q=1024)), H200)
        assert (made.block_m, made.block_n) == (128, 128)


@pytest.mark.parametrize(
    "seqlen_q, window_right, expected",
    [
        (192, None, 132),  # a tile a head
        (193, None, 68),  # two, and whole groups of four
        (193, 0, 128),  # of two the longer one, and a power of two
        (2**14, None, 16),
        (2**14, 0, 16),
    ],
)
def test_heads_of_a_hopper_forward_that_run_together_fill_it(seqlen_q, window_right, expected):
    sizes = dict(batch=50, seqlen_q=seqlen_q, window_right=window_right)
    assert choose(problem(**sizes), H200).heads_in_group == expected
    # Query heads that share keys run together.
    grouped = choose(problem(**sizes | dict(heads_q=14, heads_k=2)), H200).heads_in_group
    assert grouped % 7 == 0 and (window_right is None or grouped // 7 in (2, 16))
    assert window_right is not None or grouped == -(-expected // 7) * 7


@pytest.mark.parametrize("seqlen_q, expected", [(1, 4), (2**11, 4), (2**12, 3), (2**20, 1)])
def test_key_heads_of_a_backward_that_run_together_share_the_cache(seqlen_q, expected):
    # q, dout and dq_sum of 2**12 rows of 4 query heads of 64 take 8 MiB, half of the L2 is 25.
    assert choose(backward(seqlen_q=seqlen_q), H200, "sm80").heads_in_group == expected
    waiting = choose(backward(seqlen_q=seqlen_q, deterministic=True), H200, "sm80")
    assert waiting.heads_in_group == 4, "waiting for each other"


@pytest.mark.parametrize(
    "seqlen_k, window_right, deterministic, expected",
    [
        (128, None, False, 256),  # a tile a head, two for each of 132 multiprocessors, and a power of two
        (257, 0, False, 64),
        (2048, 0, False, 16),
        (2**14, 0, False, 4),
        (2**14, None, False, 4),
        (257, None, True, 64),
        (2**14, None, True, 8),
    ],
)
def test_key_heads_of_a_hopper_backward_that_run_together_fill_it(seqlen_k, window_right, deterministic, expected):
    sizes = dict(batch=200, seqlen_k=seqlen_k, window_right=window_right, deterministic=deterministic)
    assert choose(backward(**sizes), H200).heads_in_group == expected


FULL, CAUSAL = dict(window_right=None), dict(window_right=0)


@pytest.mark.parametrize(
    "head_dim, seqlen_q, heads_q, expected, ascends",
    [
        (64, 2048, 8, 32, 1),  # their q, dout and dq_sum take 32 MiB
        (64, 2**14, 8, 4, 1),
        (128, 2048, 8, 16, 1),
        (128, 2**14, 8, 2, 1),
        (128, 2**14, 16, 64, 0),  # no two stay in the L2 cache
        (128, 2048, 32, 4, 1),
    ],
)
def test_heads_whose_key_tiles_wait_under_a_right_mask(head_dim, seqlen_q, heads_q, expected, ascends):
    sizes = dict(batch=16, heads_q=heads_q, heads_k=8, seqlen_q=seqlen_q, seqlen_k=seqlen_q, window_right=0)
    made = choose(backward("bfloat16", head_dim, deterministic=True, **sizes), H200)
    assert (made.heads_in_group, dict(made.constants)["ASCENDS"]) == (expected, ascends)


@pytest.mark.parametrize(
    "seqlen_q, changes, block_m, stages_dq",
    [
        (2048, FULL, 80, 0),
        (2047, FULL, 64, 1),
        (8191, CAUSAL, 64, 1),
        (8192, CAUSAL, 80, 0),
        (2**14, CAUSAL | dict(varlen=True), 64, 1),
        (2**14, dict(window_left=100), 64, 1),
        (2**14, CAUSAL | dict(window_left=100), 64, 1),
        (100, FULL | dict(deterministic=True), 80, 0),
        (1023, CAUSAL | dict(deterministic=True), 64, 0),
        (1024, CAUSAL | dict(deterministic=True), 80, 0),
        (1024, CAUSAL | dict(deterministic=True, window_left=100), 80, 0),
        (2**14, CAUSAL | dict(deterministic=True, varlen=True), 64, 0),
        (2**14, FULL | dict(varlen=True), 64, 1),
        (2**14, FULL | dict(head_dim=96, head_dim_v=96), 64, 0),
        (2**14, FULL | dict(head_dim=104, head_dim_v=8), 80, 0),
        (2**14, FULL | dict(head_dim=64, head_dim_v=64), 128, 0),
    ],
)
def test_tiles_of_a_hopper_backward(seqlen_q, changes, block_m, stages_dq):
    sizes = dict(head_dim=128, head_dim_v=128, seqlen_q=seqlen_q, seqlen_k=seqlen_q) | changes
    made = choose(backward(**sizes), H200)
    constants = dict(made.constants)
    assert (made.kernel, made.block_m, constants["STAGES_DQ"]) == ("bwd_sm90", block_m, stages_dq)
    assert constants["V_SLOTS"] == (1 if block_m == 80 or stages_dq else 2)
    has_three_stages = changes == CAUSAL and block_m == 80
    assert (constants["STAGES"], constants["K_SLOTS"]) == ((3, 1) if has_three_stages else (2, 2))


@pytest.mark.parametrize("heads_k, expected", [(4, 4), (8, 4), (32, 8)])
def test_grouped_heads_of_a_hopper_backward_run_together_by_fewer(heads_k, expected):
    sizes = dict(batch=2, seqlen_q=8192, seqlen_k=8192, window_right=0, heads_q=32, heads_k=heads_k)
    assert choose(backward(**sizes), H200).heads_in_group == expected


@pytest.mark.parametrize("seqlen_k, expected", [(64, 132), (129, 44), (2**14, 8)])
def test_key_heads_of_a_wide_backward_that_run_together_fill_it(seqlen_k, expected):
    sizes = dict(batch=100, seqlen_k=seqlen_k, head_dim=256, head_dim_v=256)
    assert choose(backward(**sizes), H200).heads_in_group == expected


def test_sequences_of_a_packed_batch_share_their_heads():
    assert choose(problem(varlen=True, batch=100), H200).heads_in_group == 8
    assert choose(backward(varlen=True, batch=100, deterministic=True), H200).heads_in_group == 2


def test_no_keys_at_all():
    assert [made.heads_in_group for made in each_config(problem(seqlen_k=0))] == [16, 16, 16]
    assert [made.heads_in_group for made in each_config(backward(seqlen_q=0, seqlen_k=0))] == [4, 4, 4]


# ------------------------------------------------------------------------------------------------------------
# Refusals and forced tiers


@pytest.mark.parametrize(
    "stated, device, message",
    [
        (
            problem("float32"),
            H200,
            "tier sm80: tensor cores take float16 and bfloat16; float32 would be rounded",
        ),
        (
            problem("float64"),
            H200,
            "tier sm80: tensor cores take float16 and bfloat16; float64 would be rounded",
        ),
        (problem("float16"), DEVICES["sm_70"], "tier sm80: needs compute capability 7.5 or newer"),
        (
            problem("bfloat16"),
            DEVICES["sm_75"],
            "tier sm80: bfloat16 tensor cores need compute capability 8.0 or newer",
        ),
        (
            problem("float16", 256),
            limited(H200, 16),
            "tier sm80: no tile for head_dim 256 and 256 fits the 16384 bytes",
        ),
        (
            backward("float32"),
            H200,
            "tier sm80: tensor cores take float16 and bfloat16; float32 would be rounded",
        ),
        (
            backward("float16"),
            DEVICES["sm_75"],
            "tier sm80: the backward needs compute capability 8.0 or newer",
        ),
        (
            backward("bfloat16", 64),
            limited(H200, 64),
            "tier sm80: no tile for head_dim 64 and 64 fits the 65536 bytes",
        ),
        (
            problem("float32"),
            H200,
            "tier sm90: tensor cores take float16 and bfloat16; float32 would be rounded",
        ),
        (problem("float16"), DEVICES["sm_89"], r"tier sm90: needs compute capability 9.0 \(wgmma, TMA\)"),
        (problem("bfloat16"), DEVICES["sm_100"], r"tier sm90: needs compute capability 9.0 \(wgmma, TMA\)"),
        (
            problem("float16", alignment=8, tma=False),
            H200,
            "tier sm90: TMA cannot address q, k and v: their addresses and strides must be multiples of 16 bytes, "
            "and strides neither negative nor 1 TiB or more",
        ),
        (problem("float16", tma=False), H200, "tier sm90: TMA cannot address q, k and v: "),
        (backward("float16", tma=False), H200, "tier sm90: TMA cannot address q, k, v and dout: "),
        (backward("float16"), DEVICES["sm_80"], r"tier sm90: needs compute capability 9.0 \(wgmma, TMA\)"),
        (backward("float32"), H200, "tier sm90: tensor cores take float16 and bfloat16; float32 would be rounded"),
        (backward("bfloat16"), limited(H200, 160), "tier sm90: no tile for head_dim 64 and 64 fits the 163840 bytes"),
        (backward("bfloat16", 256), limited(H200, 220), "tier sm90: no tile for head_dim 256 and 256 fits the 225280"),
    ],
)
def test_a_forced_tier_says_why_it_refuses(stated, device, message):
    with pytest.raises(NotImplementedError, match=message):
        choose(stated, device, message[5:9])


@BOTH
def test_all_tiers_refusing_are_all_named(problem_of):
    with pytest.raises(NotImplementedError) as raised:
        choose(problem_of("float32", 256), limited(H200, 1))
    assert all(f"tier {tier}: " in str(raised.value) for tier in TIERS)
    assert "1024 bytes of shared memory" in str(raised.value)


def test_an_unknown_tier():
    for name in ("sm100", "fwd_simt", "", "SIMT"):
        with pytest.raises(ValueError, match=f"tier must be one of sm90, sm80, simt; got '{name}'"):
            choose(problem(), H200, name)


def test_force_tier_nests_and_ends():
    before = config.forced_tier()
    with force_tier("simt"):
        assert config.forced_tier() == "simt"
        with force_tier("sm80"):
            assert config.forced_tier() == "sm80"
        with force_tier(None):
            assert config.forced_tier() is None
        assert config.forced_tier() == "simt"
        with pytest.raises(KeyError), force_tier("sm80"):
            raise KeyError
        assert config.forced_tier() == "simt"
    assert config.forced_tier() == before


@pytest.mark.parametrize("value, expected", [("simt", "simt"), ("sm80", "sm80"), ("", "None"), (None, "None"), ("sm99", "sm99")])
def test_the_environment_forces_a_tier(value, expected):
    environment = {name: text for name, text in os.environ.items() if name != "CUFLASH_TIER"}
    if value is not None:
        environment["CUFLASH_TIER"] = value
    code = "from cuflash import config; print(config.forced_tier())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=jit.kernels_dir().parent,
    )
    assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr


# ------------------------------------------------------------------------------------------------------------
# From a config to a launch


def test_the_grid_covers_every_row_of_every_head():
    for size in (1, 127, 128, 129, 191, 193, 1000, 100_000):
        stated = problem(seqlen_q=size)
        for made in each_config(stated):
            tiles = launch.num_tiles(stated, made)
            assert (tiles - 1) * made.block_m < size <= tiles * made.block_m
            blocks = tiles * stated.batch * stated.heads_q
            # Blocks of sm90 stay on their multiprocessors, of which there are 132.
            assert launch.grid_of(stated, made) == (min(blocks, 132) if made.tier == "sm90" else blocks)
        stated = backward(seqlen_k=size)
        for made in each_config(stated):
            tiles = launch.num_tiles(stated, made)
            assert (tiles - 1) * made.block_n < size <= tiles * made.block_n
            blocks = tiles * stated.batch * stated.heads_k
            assert launch.grid_of(stated, made) == (min(blocks, 132) if made.tier == "sm90" else blocks)


@pytest.mark.parametrize("lengths", [(), (0,), (1,) * 300, (1000,), (128, 128), (129, 0, 1, 127, 64), (64,) * 8, (0, 0, 65)])
@pytest.mark.parametrize("uncovered", [0, 1, 128, 1000])
def test_the_tiles_of_a_packed_batch_fit_the_list(lengths, uncovered):
    total = sum(lengths) + uncovered
    sizes = dict(varlen=True, batch=len(lengths), seqlen_q=total, seqlen_k=total)
    for stated in (problem(**sizes), backward(deterministic=True, **sizes)):
        for made in each_config(stated):
            is_backward = isinstance(stated, BackwardProblem)
            block, heads = (made.block_n, 2) if is_backward else (made.block_m, 8)
            tiles = sum(-(-rows // block) for rows in (*lengths, uncovered))
            assert tiles <= launch.num_tiles(stated, made)
            blocks = launch.num_tiles(stated, made) * heads
            assert launch.grid_of(stated, made) == (min(blocks, 132) if made.tier == "sm90" else blocks)
            # A header of four words, eight for a tile, and the histogram of as many levels as kernels/varlen_tiles.cu counts.
            levels = total // block + 2
            words = 4 + 8 * launch.num_tiles(stated, made) + levels
            assert launch.scratch_of(stated, made)["tiles"] >= 4 * words


def test_a_grid_that_one_launch_cannot_hold():
    stated = problem(batch=65536, heads_q=65536, seqlen_q=1)
    with pytest.raises(
        ValueError,
        match="batch .* heads .* query tiles must be at most 2147483647; got 65536 .* 65536 .* 1: split",
    ):
        launch.grid_of(stated, choose(stated, H200))
    for made in each_config(stated):  # however few blocks take them
        with pytest.raises(ValueError, match="query tiles must be at most 2147483647"):
            launch.grid_of(stated, made)
    stated = problem(batch=65536, heads_q=32767, seqlen_q=1)
    assert [launch.grid_of(stated, made) for made in each_config(stated)] == [132, 65536 * 32767, 65536 * 32767]
    stated = backward(batch=65536, heads_k=65536, heads_q=65536, seqlen_k=1)
    with pytest.raises(ValueError, match="key tiles must be at most 2147483647; got 65536 .* 65536 .* 1: split the batch"):
        launch.grid_of(stated, choose(stated, H200))
    stated = backward(batch=65536, heads_q=32768, seqlen_q=1, seqlen_k=1, heads_k=1)
    with pytest.raises(ValueError, match=r"batch \* heads \* seqlen of q must be at most \d+; got 65536 \* 32768 \* 1: split"):
        launch.steps_of(stated, choose(stated, H200))


def launched(stated, tier=None):
    return {kernel.kernel: grid for kernel, grid in launch.steps_of(stated, choose(stated, H200, tier))}


def test_the_launches_of_a_call_in_their_order():
    assert list(launched(problem())) == ["fwd_sm90"] and list(launched(problem(), "sm80")) == ["fwd_sm80"]
    assert list(launched(problem(varlen=True))) == ["varlen_tiles", "fwd_sm90"]
    assert list(launched(problem(varlen=True, alignment=4, tma=False))) == ["varlen_tiles", "fwd_sm80"]
    assert list(launched(backward(), "simt")) == ["bwd_delta", "bwd_simt", "bwd_cast"]
    assert list(launched(backward(varlen=True))) == ["varlen_tiles", "bwd_delta", "bwd_sm90", "bwd_cast"]
    assert list(launched(backward(alignment=8, tma=False))) == ["bwd_delta", "bwd_sm80", "bwd_cast"]
    assert list(launched(backward(head_dim=160))) == ["bwd_delta", "bwd_dkv_sm90", "bwd_dq_sm90"]
    stated = backward(head_dim=160, varlen=True)
    steps = launch.steps_of(stated, choose(stated, H200))
    assert [kernel.kernel for kernel, _ in steps] == ["varlen_tiles", "bwd_delta", "bwd_dkv_sm90", "varlen_tiles", "bwd_dq_sm90"]
    lists = [dict(kernel.constants) for kernel, _ in steps if kernel.kernel == "varlen_tiles"]
    assert [(made["SIDE"], made["TILE"]) for made in lists] == [(1, 64), (0, 128)], "the second takes the place of the first"
    assert launched(problem(varlen=True))["varlen_tiles"] == 1


def test_only_the_hopper_tier_has_an_arch_of_its_own():
    calls = [
        (stated, made)
        for problem_of, varlen, head_dim in itertools.product((problem, backward), (False, True), (64, 192))
        for stated in (problem_of(head_dim=head_dim, varlen=varlen),)
        for made in each_config(stated)
    ]
    archs = {kernel.kernel: launch.arch_of(kernel, "sm_90") for stated, made in calls for kernel in kernels_of(stated, made)}
    for kernel in ("fwd_sm90", "bwd_sm90", "bwd_dkv_sm90", "bwd_dq_sm90"):
        assert archs.pop(kernel) == "sm_90a"
    assert set(archs.values()) == {"sm_90"} and {"varlen_tiles", "fwd_sm80", "bwd_sm80", "fwd_simt"} <= set(archs)
    assert launch.arch_of(choose(problem(), DEVICES["sm_120"]), "compute_120") == "compute_120"


def test_no_kernel_is_launched_without_work():
    """Zeros are written all the same: those of dq by bwd_cast, those of dk and dv by the kernel of the tiles."""
    for varlen in (False, True):
        assert list(launched(backward(seqlen_k=0, varlen=varlen))) == ["bwd_delta", "bwd_cast"]
        first = ["varlen_tiles"] * varlen
        assert list(launched(backward(seqlen_q=0, varlen=varlen), "sm80")) == [*first, "bwd_sm80"]
        # Blocks take their numbers from a counter that bwd_delta sets to 0.
        for tier, deterministic in (("sm90", False), ("sm90", True), ("sm80", True)):
            made = launched(backward(seqlen_q=0, varlen=varlen, deterministic=deterministic), tier)
            assert list(made) == [*first, "bwd_delta", f"bwd_{tier}"] and made["bwd_delta"] == 1
        # Of wide heads the kernel of the keys sets the counter of that of dq to 0.
        made = launched(backward(head_dim=256, seqlen_q=0, varlen=varlen))
        assert list(made) == [*first, "bwd_delta", "bwd_dkv_sm90"]
        made = launched(backward(head_dim=256, seqlen_k=0))
        assert list(made) == ["bwd_delta", "bwd_dkv_sm90", "bwd_dq_sm90"] and made["bwd_dkv_sm90"] == 1


@pytest.mark.parametrize(
    "dtype, head_dim, head_dim_v, alignment",
    [
        ("float16", 64, 64, 16),
        ("bfloat16", 96, 8, 16),
        ("float16", 33, 7, 2),
        ("float32", 100, 256, 16),
        ("float64", 1, 129, 8),
    ],
)
def test_kernels_before_and_behind_fit_the_one_between(dtype, head_dim, head_dim_v, alignment):
    stated = backward(dtype, head_dim, head_dim_v, alignment=alignment, out_alignment=alignment, deterministic=True)
    made = choose(stated, H200)
    delta, middle, cast = kernels_of(stated, made)
    itemsize = np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize
    assert middle is made and (delta.kernel, cast.kernel) == ("bwd_delta", "bwd_cast")
    for kernel in (delta, cast):
        assert dict(kernel.constants)["HEAD_DIM"] == dict(made.constants)["HEAD_DIM"], "the columns of dq_sum"
    constants, size = dict(delta.constants), head_dim_v * itemsize
    vec, lanes = constants["VEC_BYTES"], constants["LANES"]
    assert itemsize <= vec <= alignment and size % vec == 0 and constants["DETERMINISTIC"] == 1
    assert constants["COUNTS_TILES"] == made.counts_tiles
    assert lanes in (1, 2, 4, 8, 16, 32) and (lanes == 32 or lanes * 16 >= size)
    heads = stated.batch * stated.heads_q
    assert launched(stated)["bwd_delta"] == -(-heads * stated.seqlen_q // (delta.threads // lanes))
    # A warp takes 16 rows and 32 columns.
    warps = heads * -(-stated.seqlen_q // 16) * (dict(cast.constants)["HEAD_DIM"] // 32)
    assert launched(stated)["bwd_cast"] == -(-warps // (cast.threads // 32))
    assert dict(cast.constants)["OUT_VEC_BYTES"] == alignment


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("dtype, real", [("float16", 4), ("float32", 4), ("float64", 8)])
def test_scratch_is_what_the_documentation_says(dtype, real, varlen):
    stated = backward(dtype, 80, seqlen_q=1000, varlen=varlen)
    heads = stated.batch_axis * 8
    groups = 1000 // 16 + stated.batch + 1 if varlen else -(-1000 // 16)
    for made in each_config(problem(dtype)):
        assert launch.scratch_of(problem(dtype), made) == {}
    # Tiles that take different time are counted, unless each has a block of its own.
    for batch in (2, 200):
        for change in (dict(window_right=0), dict(window_left=5)):
            masked = problem(dtype, batch=batch, **change)
            for made in each_config(masked):
                tiles = -(-masked.seqlen_q // made.block_m) * batch * masked.heads_q
                counted = made.tier == "sm90" and tiles > made.max_blocks
                assert counted == (made.tier == "sm90" and batch == 200)
                assert launch.scratch_of(masked, made) == ({"tiles": 16} if counted else {})
    for made in each_config(stated):
        sizes = launch.scratch_of(stated, made)
        # Blocks that stay on their multiprocessors count the tiles they take.
        assert list(sizes) == ["tiles"] * varlen + ["rows", "dq_sum"] + ["turns"] * (made.tier == "sm90")
        assert sizes.get("turns", 4) == 4
        assert sizes["rows"] == heads * 1000 * 2 * real and sizes["dq_sum"] == heads * groups * 16 * 96 * real
        ordered = launch.scratch_of(dataclasses.replace(stated, deterministic=True), made)
        tiles = 1000 // made.block_m + 3 if varlen else -(-1000 // made.block_m)
        assert ordered == sizes | {"turns": 4 * (1 + stated.batch_axis * 8 * tiles)}


@pytest.mark.parametrize("deterministic", [False, True])
def test_wide_gradients_on_hopper_are_summed_nowhere(deterministic):
    """Not in memory: their scratch is the facts of rows and two counters of tiles."""
    stated = backward("bfloat16", 256, seqlen_q=1000, deterministic=deterministic)
    made = choose(stated, H200)
    assert launch.scratch_of(stated, made) == {"rows": stated.batch * 8 * 1000 * 2 * 4, "turns": 8}
    delta, middle, dq = kernels_of(stated, made)
    assert middle is made and (delta.kernel, dq.kernel) == ("bwd_delta", "bwd_dq_sm90")
    constants = dict(delta.constants)
    assert (constants["HEAD_DIM"], constants["DETERMINISTIC"], constants["COUNTS_TILES"]) == (0, 0, 1)
    packed = dataclasses.replace(stated, varlen=True)
    assert list(launch.scratch_of(packed, made)) == ["tiles", "rows", "turns"]


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (1, 5000), (5000, 1), (300, 300)])
def test_both_lists_of_a_packed_backward_fit_one_place(seqlen_q, seqlen_k):
    stated = backward(head_dim=256, varlen=True, batch=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    made = choose(stated, H200)
    tiles = launch.num_tiles(stated, made)
    assert tiles >= max(seqlen_q // 128, seqlen_k // 64) + 3 + 1
    assert launch.scratch_of(stated, made)["tiles"] >= 4 * (4 + 8 * tiles + max(seqlen_q, seqlen_k) // 64 + 2)


def test_blocks_of_dq_are_no_more_than_its_tiles():
    for seqlen_q, blocks in ((0, 0), (1, 16), (128, 16), (129, 32), (1000, 128), (2000, 132)):
        stated = backward(head_dim=256, seqlen_q=seqlen_q)
        assert launch.dq_grid_of(stated, choose(stated, H200)) == blocks
    stated = backward(head_dim=256, batch=65536, heads_q=65536, heads_k=1, seqlen_q=1, seqlen_k=1)
    with pytest.raises(ValueError, match="query tiles must be at most 2147483647; got 65536 .* 65536 .* 1: split the batch"):
        launch.dq_grid_of(stated, choose(stated, H200))


@BOTH
def test_the_params_record_says_what_the_problem_says(problem_of):
    stated = problem_of(head_dim=64, head_dim_v=80, window_left=7, window_right=9, softcap=2.0, softmax_scale=0.5)
    names = ("q", "k", "v", "out") + (("dout", "dq", "dk", "dv") if problem_of is backward else ())
    strides = {name: (10**12 * i, -(2**40), 3 + i, 1) for i, name in enumerate(names)}
    made = choose(stated, H200)
    record = launch.params_of(stated, made, strides)
    for name, stride in strides.items():
        assert tuple(record[f"{name}_strides"]) == stride[:3] and record[name] == 0
    for name in (
        "batch",
        "seqlen_q",
        "seqlen_k",
        "heads_q",
        "heads_k",
        "head_dim",
        "head_dim_v",
        "window_left",
        "window_right",
        "int64_lengths",
    ):
        assert record[name] == getattr(stated, name)
    np.testing.assert_allclose(record["scale_log2"], 0.5 / np.log(2))
    np.testing.assert_allclose(record["tanh_scale"], 0.25)
    np.testing.assert_allclose(record["cap_log2"], 2.0 / np.log(2))
    tiles = launch.num_tiles(stated, made)
    assert record["num_tiles"] == tiles and not made.short_tiles_last
    for short_last in (True, False):
        other = launch.params_of(stated, dataclasses.replace(made, short_tiles_last=short_last), strides)
        assert other["num_short_tiles"] == tiles // 2 * short_last
    assert record["heads_in_group"] == made.heads_in_group
    if problem_of is backward:
        assert record["softmax_scale"] == 0.5 and record["num_query_tiles"] == -(-1000 // made.block_m)
    unmasked, packed = (dataclasses.replace(stated, **change) for change in (dict(window_right=None), dict(varlen=True)))
    assert launch.params_of(unmasked, choose(unmasked, H200), strides)["num_short_tiles"] == 0
    # Packed it says whether there are any, which varlen_tiles then counts.
    has_short = launch.params_of(packed, choose(packed, H200), strides)["num_short_tiles"] > 0
    assert has_short == (problem_of is problem)


def test_the_params_of_a_backward_begin_with_those_of_a_forward():
    for name in launch.FWD_PARAMS.names:
        assert launch.BWD_PARAMS.fields[name] == launch.FWD_PARAMS.fields[name]
    assert launch.BWD_PARAMS.fields["dout"][1] == launch.FWD_PARAMS.itemsize == 256
    # A call writes its pointers in two runs.
    for pointers, first in (
        ("q k v out lse cu_seqlens_q cu_seqlens_k seqused_q seqused_k tiles", 0),
        ("dout dlse dq dk dv rows dq_sum turns", 256),
    ):
        places = [launch.BWD_PARAMS.fields[name][1] for name in pointers.split()]
        assert places == list(range(first, first + 8 * len(places), 8))


# ------------------------------------------------------------------------------------------------------------
# Prepared calls, with a driver that is made up


# Where a kernel looks for tensor maps in its params.
MAPS = {
    "fwd_sm90": launch.TENSOR_MAPS_OFFSET,
    **dict.fromkeys(("bwd_sm90", "bwd_dkv_sm90", "bwd_dq_sm90"), launch.BWD_TENSOR_MAPS_OFFSET),
}


class Driver(list):
    """What is launched: (function, grid, threads, dynamic shared memory, stream, params record).

    ``events``: the names of the launches, and (pointer, value, bytes, stream) of each memset, in order. ``maps``: the driver
    of tensor maps; ``launched_maps``: what stood behind the params of each launch that has them.
    """

    def __init__(self):
        super().__init__()
        self.events, self.maps, self.launched_maps, self.loaded = [], MadeUpDriver(), [], []

    def load(self, kernel, constants, arch, device_id, smem_bytes, *, stream):
        self.loaded.append((kernel, arch))
        return types.SimpleNamespace(function=len(self.loaded) - 1, registers=99)

    def launch_kernel(self, function, grid, _y, _z, threads, _ty, _tz, smem, stream, argv, _extra):
        kernel = self.loaded[function][0]
        layout = layout_of(kernel)
        address = ctypes.cast(argv, ctypes.POINTER(ctypes.c_uint64))[0]
        record = np.frombuffer(ctypes.string_at(address, layout.itemsize), layout)[0]
        self.append((kernel, grid, threads, smem, stream, record))
        self.events.append(kernel)
        if kernel in MAPS:
            size = (4 if "bwd" in kernel else 3) * tma.MAP_BYTES
            self.launched_maps.append(ctypes.string_at(address + MAPS[kernel], size))

    def cuLaunchKernelEx(self, config, function, argv, extra):
        config = driver_functions._LaunchConfig.from_address(config)
        shape = *config.grid, *config.block
        self.launch_kernel(function, *shape, config.smem_bytes, config.stream, argv, extra)
        return 0

    def memset(self, pointer, value, num_bytes, stream):
        self.events.append((pointer, value, num_bytes, stream))


@pytest.fixture
def driver(monkeypatch):
    from cupy_backends.cuda.api import driver as cuda
    from cupy_backends.cuda.api import runtime

    made = Driver()
    monkeypatch.setattr(cuda, "launchKernel", made.launch_kernel)
    monkeypatch.setattr(runtime, "memsetAsync", made.memset)
    monkeypatch.setattr(tma, "_driver", lambda: made.maps)
    monkeypatch.setattr(driver_functions, "library", lambda: made)
    monkeypatch.setattr(jit, "load", made.load)
    monkeypatch.setattr(jit, "arch_for", lambda capability: "sm_90")
    monkeypatch.setattr(launch, "device_of", lambda device_id: H200)
    return made


def prepared(stated, written, was_3d=False, tier=None, **given):
    shapes = problem_module.result_shapes(vars(stated))
    sides = {
        "q": shapes["dq"],
        "k": shapes["dk"],
        "v": shapes["dv"],
        "out": shapes["out"],
        "dout": shapes["out"],
    }
    names = ("q", "k", "v", "out") if written == ("out",) else ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")
    views = {name: None for name in names}
    for i, name in enumerate(names):
        if name in sides and (name not in written or name in given):
            shape = sides[name]
            views[name] = View(shape, launch.contiguous_strides(shape), "float16", "cuda:0", (i + 1) << 30, "cupy", was_3d)
    return launch.Prepared(stated, views | given, written, 0, 7, tier)


GRADIENTS = ("dq", "dk", "dv")


def test_a_forward_is_one_launch_with_its_pointers(driver):
    call = prepared(problem(return_lse=True), ("out",), tier="sm80")
    assert call.written_shapes == [(2, 1000, 8, 64)] and call.lse_shape == (2, 8, 1000) and call.scratch_bytes == 0
    call.launch(7, 11, 12, 13, 14, 15)
    ((kernel, grid, threads, smem, stream, record),) = driver
    assert (kernel, grid, threads, stream) == ("fwd_sm80", 8 * 16, 128, 7) and smem > 0
    assert [int(record[name]) for name in ("q", "k", "v", "out", "lse", "cu_seqlens_q", "tiles")] == [
        11,
        12,
        13,
        14,
        15,
        0,
        0,
    ]


def test_a_packed_forward_lists_its_tiles_first(driver):
    call = prepared(problem(varlen=True), ("out",), was_3d=True, tier="sm80")
    assert call.written_shapes == [(1000, 8, 64)] and call.lse_shape == (8, 1000) and call.scratch_bytes % 256 == 0
    call.launch(7, *range(1, 11))
    assert [step[0] for step in driver] == ["varlen_tiles", "fwd_sm80"]
    assert [step[1:4] for step in driver][0] == (1, 512, 0)
    for step in driver:
        assert [int(step[5][name]) for name in launch.FWD_PARAMS.names[:10]] == list(range(1, 11))
    assert driver.events == ["varlen_tiles", "fwd_sm80"] and driver.maps.encoded == []


def pointers_in(record) -> list[int]:
    return [int(record[name]) for name in launch.FWD_PARAMS.names[:10]]


@pytest.mark.parametrize("heads, is_all", [(1, False), (2, False), (33, True), (64, True)])
def test_a_hopper_forward_has_as_many_blocks_as_multiprocessors_at_most(driver, heads, is_all):
    call = prepared(problem(heads_q=heads, heads_k=1), ("out",))
    assert call.scratch_bytes == 0 and call.scratch_offsets == {}
    call.launch(7, *(16 * i for i in range(1, 6)))
    ((kernel, grid, threads, smem, stream, record),) = driver
    made = choose(call.problem, H200)
    tiles = -(-1000 // made.block_m)
    assert grid == (132 if is_all else 2 * heads * tiles) <= 132 and record["num_tiles"] == tiles
    assert (kernel, threads, smem, stream) == ("fwd_sm90", made.threads, made.smem_bytes, 7)
    assert pointers_in(record) == [16, 32, 48, 64, 80, 0, 0, 0, 0, 0], "without a mask no block counts tiles"
    assert driver.loaded == [("fwd_sm90", "sm_90a")] and driver.events == ["fwd_sm90"]


def test_a_hopper_forward_describes_its_arrays_to_the_driver(driver):
    call = prepared(problem("float16", 192, 96), ("out",))
    q, k, v = driver.maps.encoded
    constants = dict(choose(call.problem, H200).constants)
    assert (constants["HEAD_DIM"], constants["HEAD_DIM_V"]) == (192, 96)
    assert [made.pointer for made in (q, k, v)] == [1 << 30, 2 << 30, 3 << 30]
    assert q.sizes == (192, 1000, 8, 2) and k.sizes == (192, 1000, 2, 2) and v.sizes == (96, 1000, 2, 2)
    assert q.strides == (8 * 192 * 2, 192 * 2, 1000 * 8 * 192 * 2)
    # A copy takes a panel of 64 columns, or 32 where 64 do not divide them: of the rows of a warpgroup, or of a key tile.
    block_n = constants["BLOCK_N"]
    assert [made.box[:2] for made in (q, k, v)] == [(64, 64), (64, block_n), (32, block_n)]
    first = q.place
    assert [made.place for made in (q, k, v)] == [first, first + 128, first + 256]
    call.launch(7, 1 << 30, 2 << 30, 3 << 30, 4 << 30, 0)
    (maps,) = driver.launched_maps
    assert pointers_of(maps) == [1 << 30, 2 << 30, 3 << 30], "where the kernel looks for them"


def test_a_tensor_map_is_changed_only_when_its_pointer_is(driver):
    call = prepared(problem(), ("out",))
    q, k, v = (made.place for made in driver.maps.encoded)
    replaced = driver.maps.replaced
    same = 1 << 30, 2 << 30, 3 << 30
    for _ in range(2):
        call.launch(7, *same, 4 << 30, 0)
    assert replaced == [] and pointers_of(driver.launched_maps[-1]) == list(same)
    for pointers, expected in (
        ((1 << 30, 5 << 30, 3 << 30), [(k, 5 << 30)]),
        ((1 << 30, 5 << 30, 3 << 30), []),
        ((1 << 31, 5 << 30, 7 << 30), [(q, 1 << 31), (v, 7 << 30)]),
        (same, list(zip((q, k, v), same, strict=True))),
        (same, []),
    ):
        replaced.clear()
        call.launch(7, *pointers, 4 << 30, 0)
        assert replaced == expected and pointers_of(driver.launched_maps[-1]) == list(pointers)
        assert pointers_in(driver[-1][5])[:4] == [*pointers, 4 << 30]
    assert len(driver.maps.encoded) == 3


@pytest.mark.parametrize("change", [dict(window_right=0), dict(window_left=3), dict(window_left=3, window_right=9)], ids=str)
def test_a_masked_hopper_forward_counts_its_tiles_from_zero(driver, change):
    call = prepared(problem(batch=100, **change), ("out",))
    assert call.scratch_bytes == 256 and call.scratch_offsets == {"tiles": 0}
    tiles = 9 << 30
    for _ in range(2):
        driver.events.clear()
        call.launch(7, 1 << 30, 2 << 30, 3 << 30, 4 << 30, 5 << 30, 0, 0, 0, 0, tiles)
        assert driver.events == [(tiles, 0, 16, 7), "fwd_sm90"], "the header of a list of tiles, before each launch"
        assert pointers_in(driver[-1][5]) == [1 << 30, 2 << 30, 3 << 30, 4 << 30, 5 << 30, 0, 0, 0, 0, tiles]


@pytest.mark.parametrize("change", [dict(), dict(window_right=0)], ids=str)
def test_a_packed_hopper_forward_counts_in_its_list(driver, change):
    """varlen_tiles sets the counter: it writes the header all the same. TMA would write past the end of a sequence."""
    call = prepared(problem(varlen=True, **change), ("out",), was_3d=True)
    assert call.written_shapes == [(1000, 8, 64)] and call.scratch_bytes % 256 == 0
    pointers = [1 << 30, 2 << 30, 3 << 30, *range(4, 11)]
    call.launch(7, *pointers)
    assert driver.events == ["varlen_tiles", "fwd_sm90"]
    assert driver.loaded == [("varlen_tiles", "sm_90"), ("fwd_sm90", "sm_90a")]
    for step in driver:
        assert pointers_in(step[5]) == pointers
    assert [made.sizes for made in driver.maps.encoded] == [(64, 1000, 8, 1), (64, 1000, 2, 1), (64, 1000, 2, 1)]


def test_a_hopper_forward_without_keys(driver):
    """The driver describes no empty array; zeros are written all the same."""
    prepared(problem(seqlen_k=0), ("out",)).launch(7, 1 << 30, 0, 0, 4 << 30, 0)
    assert [made.sizes[1] for made in driver.maps.encoded] == [1000, 1, 1]
    assert driver.events == ["fwd_sm90"] and driver[0][5]["seqlen_k"] == 0


def test_a_tensor_map_that_the_driver_refuses(driver):
    driver.maps.status = 1
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled failed with 1 for shape \(2, 1000, 8, 64\)"):
        prepared(problem(), ("out",))
    driver.maps.status = 0
    call = prepared(problem(), ("out",))
    driver.maps.status = 700
    with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress failed with 700 for address 0x50"):
        call.launch(7, 80, 2 << 30, 3 << 30, 4 << 30, 0)
    assert driver.events == []


def test_params_have_room_for_a_backward(driver):
    """One buffer serves every launch: that of a backward with maps is the longest."""
    room = launch.BWD_TENSOR_MAPS_OFFSET + len(launch._TENSOR_MAPS) * tma.MAP_BYTES
    assert launch.FWD_PARAMS.itemsize <= launch.TENSOR_MAPS_OFFSET
    assert launch.BWD_PARAMS.itemsize <= launch.BWD_TENSOR_MAPS_OFFSET
    for call in (prepared(problem(), ("out",)), prepared(backward(), GRADIENTS)):
        assert ctypes.addressof(call.launch._params) % 64 == 0 and len(call.launch._params) >= room


@pytest.mark.parametrize(
    "head_dim, head_dim_v, boxes",
    [
        (64, 64, [(64, 128), (64, 128), (64, 128), (64, 128)]),
        (128, 72, [(64, 64), (64, 128), (64, 128), (64, 64)]),
        (80, 96, [(32, 64), (16, 128), (32, 128), (32, 64)]),
    ],
)
def test_a_hopper_backward_describes_its_arrays_to_the_driver(driver, head_dim, head_dim_v, boxes):
    """K comes in narrower panels where a half of the columns of dq would begin in the middle of one."""
    call = prepared(backward("float16", head_dim, head_dim_v), GRADIENTS)
    assert [made.pointer for made in driver.maps.encoded] == [1 << 30, 2 << 30, 3 << 30, 6 << 30]
    assert [made.sizes for made in driver.maps.encoded] == [
        (head_dim, 1000, 8, 2),
        (head_dim, 1000, 2, 2),
        (head_dim_v, 1000, 2, 2),
        (head_dim_v, 1000, 8, 2),
    ]
    assert [made.box[:2] for made in driver.maps.encoded] == boxes
    places = [made.place for made in driver.maps.encoded]
    assert places == [places[0] + i * tma.MAP_BYTES for i in range(4)]
    pointers = [(i + 1) << 30 for i in range(18)]
    pointers[10] = 99 << 30  # another dout
    call.launch(7, *pointers)
    assert driver.maps.replaced == [(places[3], 99 << 30)]
    (maps,) = driver.launched_maps
    assert pointers_of(maps) == [1 << 30, 2 << 30, 3 << 30, 99 << 30], "where the kernel looks for them"
    assert driver.events == ["bwd_delta", "bwd_sm90", "bwd_cast"]


def test_a_backward_is_three_launches_over_one_record(driver):
    call = prepared(backward(deterministic=True), GRADIENTS)
    assert call.written_shapes == [(2, 1000, 8, 64), (2, 1000, 2, 64), (2, 1000, 2, 64)]
    offsets = call.scratch_offsets
    assert list(offsets) == ["rows", "dq_sum", "turns"] and all(offset % 256 == 0 for offset in offsets.values())
    sizes = launch.scratch_of(call.problem, choose(call.problem, H200))
    ends = [offsets[name] + sizes[name] for name in offsets]
    assert ends[0] <= offsets["dq_sum"] and ends[1] <= offsets["turns"] and ends[2] <= call.scratch_bytes
    call.launch(7, *range(1, 19))
    assert [step[0] for step in driver] == ["bwd_delta", "bwd_sm90", "bwd_cast"]
    first, second = (
        launch.BWD_PARAMS.names[:10],
        ("dout", "dlse", "dq", "dk", "dv", "rows", "dq_sum", "turns"),
    )
    for step in driver:
        assert [int(step[5][name]) for name in (*first, *second)] == list(range(1, 19))


@pytest.mark.parametrize("changes", [dict(batch=0), dict(seqlen_q=0, seqlen_k=0), dict(heads_q=0, heads_k=0)], ids=str)
def test_nothing_to_write_is_no_launch(driver, changes):
    for stated, written in ((problem(**changes), ("out",)), (backward(**changes), GRADIENTS)):
        call = prepared(stated, written)
        assert call.launch is None and call.scratch_bytes == 0 and stated.is_empty
    assert driver == []


def test_a_launch_that_fails_names_its_kernel(driver, monkeypatch):
    from cupy_backends.cuda.api import driver as cuda

    def launch_kernel(function, *arguments):
        if function == 1:
            raise ValueError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(cuda, "launchKernel", launch_kernel)
    with pytest.raises(
        RuntimeError,
        match=r"launch of bwd_sm90 failed: CUDA_ERROR_INVALID_VALUE; grid \d+, 384 threads, \d+ "
        "bytes of shared memory, 99 registers a thread",
    ):
        prepared(backward(), GRADIENTS).launch(7, *range(18))


def test_addresses_that_may_overlap(driver):
    size = 2 * 1000 * 8 * 64 * 2
    out = View((2, 1000, 8, 64), launch.contiguous_strides((2, 1000, 8, 64)), "float16", "cuda:0", 1 << 40, "cupy")
    call = prepared(problem(), ("out",), out=out)
    assert call.writes_given and not prepared(problem(), ("out",)).writes_given
    for place, expected in ((0, True), (size, False), (size - 2, True), (1 << 40, False)):
        assert call.may_overlap([0, 1 << 40, 1 << 41, place]) == (expected or place == 1 << 40)
    call = prepared(backward(), GRADIENTS, dq=out, dk=None, dv=None)
    inputs = [(i + 1) << 30 for i in range(7)]
    assert not call.may_overlap([*inputs, 1 << 40, 0, 0])
    assert call.may_overlap([*inputs, inputs[5] + 2, 0, 0]), "dout"


@pytest.mark.parametrize("arch", [name for name, device in DEVICES.items() if device.compute_capability >= (8, 0)])
def test_the_warps_of_a_group_share_the_columns_of_gradients_evenly(arch):
    for head_dim, head_dim_v in itertools.product((1, 33, 64, 80, 96, 128, 130, 192, 256), repeat=2):
        constants = dict(choose(backward("float16", head_dim, head_dim_v), DEVICES[arch], "sm80").constants)
        for name, size in (("HEAD_DIM", head_dim), ("HEAD_DIM_V", head_dim_v)):
            padded, group = constants[name], constants["GROUP"]
            assert padded % 32 == padded % (16 * group) == 0 and size <= padded < size + max(32, 16 * group)
