"""choose(): a config or a reason for every problem on every device, and what a forced tier does. No CUDA."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from cuflash import config, jit, launch
from cuflash.config import DEVICES, TIERS, Config, Device, choose, force_tier, refusal
from cuflash.problem import DTYPES, Problem

HEAD_DIMS = (1, 8, 20, 31, 32, 33, 64, 80, 96, 100, 128, 129, 160, 192, 200, 224, 255, 256)
UNEQUAL = ((192, 128), (128, 256), (256, 64), (64, 8), (8, 256), (1, 33), (96, 160), (72, 40))
SMEM_KIB = (48, 64, 96, 99, 163, 227)
H200 = DEVICES["sm_90"]


def problem(dtype="float16", head_dim=64, head_dim_v=None, **changes) -> Problem:
    sizes = dict(batch=2, seqlen_q=1000, seqlen_k=1000, heads_q=8, heads_k=2, softmax_scale=0.125)
    return Problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v or head_dim, **sizes | changes)


def limited(device: Device, kib: int) -> Device:
    return dataclasses.replace(device, smem_optin=kib * 1024)


def assert_sound(made: Config, stated: Problem, device: Device) -> None:
    """What must hold for any config, whoever chose its numbers."""
    constants = dict(made.constants)
    assert made.tier in TIERS and made.kernel == f"fwd_{made.tier}"
    assert (jit.kernels_dir() / f"{made.kernel}.cu").is_file()
    assert made.constants == tuple(sorted(made.constants)), "one spelling of the same constants"
    assert all(type(value) is int for value in constants.values())
    assert 0 < made.smem_bytes <= device.smem_optin
    assert constants["SMEM_BYTES"] == made.smem_bytes
    assert made.threads == 32 * constants["WARPS"] and made.threads <= 1024
    assert (made.block_m, made.block_n) == (constants["BLOCK_M"], constants["BLOCK_N"])
    # Another block next to it must have room: its own memory and what the driver takes of each.
    blocks = constants["MIN_BLOCKS"]
    assert blocks >= 1 and (blocks == 1 or blocks * (made.smem_bytes + 1024) <= device.smem_optin + 1024)
    assert constants["HEAD_DIM"] >= stated.head_dim and constants["HEAD_DIM_V"] >= stated.head_dim_v
    assert constants["VEC_BYTES"] <= stated.alignment and constants["OUT_VEC_BYTES"] <= stated.out_alignment
    assert 1 <= made.heads_in_group <= stated.batch * stated.heads_q
    assert constants["DTYPE"] == DTYPES.index(stated.dtype)
    assert constants["MASK_LEFT"] == (stated.window_left is not None)
    assert constants["MASK_RIGHT"] == (stated.window_right is not None)
    assert made.reasons and all("#" in reason and len(reason.split("#")[1]) > 5 for reason in made.reasons)
    for number in (made.block_m, made.block_n, made.smem_bytes):
        assert any(str(number) in reason for reason in made.reasons), f"no reason gives {number}"
    assert hash(made) == hash(dataclasses.replace(made))


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_has_a_config_on_every_device(dtype, arch):
    """Also on one of its kind with less or more shared memory than it has."""
    for device in (DEVICES[arch], *(limited(DEVICES[arch], kib) for kib in SMEM_KIB)):
        for head_dim, head_dim_v in (*zip(HEAD_DIMS, HEAD_DIMS, strict=True), *UNEQUAL):
            stated = problem(dtype, head_dim, head_dim_v)
            made = choose(stated, device)
            assert_sound(made, stated, device)
            assert made == choose(dataclasses.replace(stated), dataclasses.replace(device)), (
                "same in, same out"
            )
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
            assert choose(problem(dtype, head_dim), DEVICES[arch]).tier == expected, (dtype, head_dim)


@pytest.mark.parametrize("arch", ["sm_60", "sm_61", "sm_70"])
def test_older_gpus_get_plain_arithmetic(arch):
    for dtype in DTYPES:
        made = choose(problem(dtype), DEVICES[arch])
        assert made.tier == "simt" and made.refused[0][0] == "sm80"


@pytest.mark.parametrize("capability", [(8, 7), (9, 0), (10, 3), (12, 1), (13, 7), (20, 0)])
def test_a_newer_gpu_gets_the_best_tier_it_can_run(capability):
    for dtype in ("float16", "bfloat16"):
        made = choose(
            problem(dtype), dataclasses.replace(H200, compute_capability=capability, name="unheard of")
        )
        assert made.tier == "sm80" and made.refused == ()


def test_the_name_of_a_gpu_decides_nothing():
    for dtype in DTYPES:
        assert choose(problem(dtype), dataclasses.replace(H200, name="")) == choose(problem(dtype), H200)


# ------------------------------------------------------------------------------------------------------------
# What a variant depends on


@pytest.mark.parametrize("tier", TIERS)
def test_a_variant_serves_all_sizes_and_scales(tier):
    """One compile a model, not one a batch: sizes, heads and the values of scale, cap and window are data."""
    base = problem(window_right=3, softcap=5.0)
    constants = choose(base, H200, tier).constants
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
        assert choose(dataclasses.replace(base, **change), H200, tier).constants == constants, change


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "change",
    [
        dict(dtype="bfloat16"),
        dict(head_dim=128, head_dim_v=128),
        dict(head_dim_v=128),
        dict(window_left=3),
        dict(window_right=3),
        dict(softcap=5.0),
        dict(softmax_scale=0.0),
        dict(softmax_scale=-0.125),
        dict(alignment=2),
    ],
    ids=str,
)
def test_what_the_kernel_is_compiled_for_changes_the_variant(tier, change):
    base = problem()
    assert (
        choose(dataclasses.replace(base, **change), H200, tier).constants
        != choose(base, H200, tier).constants
    )


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
    scores = {
        dict(choose(problem(softmax_scale=scale, softcap=cap), H200).constants)["SCORE"] for cap in (0.0, 5.0)
    }
    assert scores == ({0, 2} if folded else {1, 2})


@pytest.mark.parametrize("seqlen_k, expected", [(1, 16), (100, 16), (2**17, 4), (2**20, 4), (2**30 - 1, 4)])
def test_heads_that_run_together_share_the_cache(seqlen_k, expected):
    # K and V of 2**17 keys take 32 MiB a head: half an L2 holds no more than one, with its 4 query heads.
    assert choose(problem(seqlen_k=seqlen_k), H200).heads_in_group == expected


def test_no_keys_at_all():
    for tier in TIERS:
        assert choose(problem(seqlen_k=0), H200, tier).heads_in_group == 16


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
    ],
)
def test_a_forced_tier_says_why_it_refuses(stated, device, message):
    with pytest.raises(NotImplementedError, match=message):
        choose(stated, device, "sm80")


def test_all_tiers_refusing_are_all_named():
    with pytest.raises(NotImplementedError) as raised:
        choose(problem("float32", 256), limited(H200, 1))
    assert all(f"tier {tier}: " in str(raised.value) for tier in TIERS)
    assert "1024 bytes of shared memory" in str(raised.value)


def test_an_unknown_tier():
    for name in ("sm90", "fwd_simt", "", "SIMT"):
        with pytest.raises(ValueError, match=f"tier must be one of sm80, simt; got '{name}'"):
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


@pytest.mark.parametrize(
    "value, expected", [("simt", "simt"), ("sm80", "sm80"), ("", "None"), (None, "None"), ("sm99", "sm99")]
)
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
    for tier in TIERS:
        for seqlen_q in (1, 127, 128, 129, 1000):
            stated = problem(seqlen_q=seqlen_q)
            made = choose(stated, H200, tier)
            tiles = launch.num_m_blocks(stated, made)
            assert (tiles - 1) * made.block_m < seqlen_q <= tiles * made.block_m
            assert launch.grid_of(stated, made) == tiles * stated.batch * stated.heads_q


def test_a_grid_that_one_launch_cannot_hold():
    stated = problem(batch=65536, heads_q=65536, seqlen_q=1)
    with pytest.raises(
        ValueError,
        match="batch .* heads .* query tiles must be at most 2147483647; got 65536 .* 65536 .* 1: split",
    ):
        launch.grid_of(stated, choose(stated, H200))
    stated = problem(batch=65536, heads_q=32767, seqlen_q=1)
    assert launch.grid_of(stated, choose(stated, H200)) == 65536 * 32767


def test_the_params_record_says_what_the_problem_says():
    from cuflash.arrays import View

    stated = problem(
        head_dim=64, head_dim_v=80, window_left=7, window_right=9, softcap=2.0, softmax_scale=0.5
    )
    strides = [(10**12, -(2**40), 3, 1), (0, 80, 5, 1), (11, 12, 13, 1), (14, 15, 16, 1)]
    views = [View((2, 1000, 8, 64), stride, "float16", "cuda:0", 1 << 20, "cupy") for stride in strides[:3]]
    record = launch.forward_params(stated, choose(stated, H200), *views, strides[3])
    for name, stride in zip(("q", "k", "v", "out"), strides, strict=True):
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
    ):
        assert record[name] == getattr(stated, name)
    np.testing.assert_allclose(record["scale_log2"], 0.5 / np.log(2))
    np.testing.assert_allclose(record["tanh_scale"], 0.25)
    np.testing.assert_allclose(record["cap_log2"], 2.0 / np.log(2))
    assert record["num_m_blocks"] == launch.num_m_blocks(stated, choose(stated, H200))
