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

from cuflash import config, jit, launch
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


def limited(device: Device, kib: int) -> Device:
    return dataclasses.replace(device, smem_optin=kib * 1024)


def assert_sound(made: Config, stated: Problem, device: Device) -> None:
    """What must hold for any config, whoever chose its numbers."""
    constants, is_backward = dict(made.constants), isinstance(stated, BackwardProblem)
    assert made.tier in TIERS and made.kernel == f"{'bwd' if is_backward else 'fwd'}_{made.tier}"
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
    assert 1 <= made.heads_in_group <= stated.batch * (stated.heads_k if is_backward else stated.heads_q)
    assert constants["VARLEN"] == stated.varlen and constants.get("DETERMINISTIC", 0) == getattr(
        stated, "deterministic", 0
    )
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
            expected = "sm80" if dtype in ("float16", "bfloat16") and arch != "sm_75" else "simt"
            assert choose(backward(dtype, head_dim), DEVICES[arch]).tier == expected, (
                dtype,
                head_dim,
            )


@pytest.mark.parametrize("arch", ["sm_60", "sm_61", "sm_70"])
def test_older_gpus_get_plain_arithmetic(arch):
    for dtype, problem_of in itertools.product(DTYPES, (problem, backward)):
        made = choose(problem_of(dtype), DEVICES[arch])
        assert made.tier == "simt" and made.refused[0][0] == "sm80"


@pytest.mark.parametrize("capability", [(8, 7), (9, 0), (10, 3), (12, 1), (13, 7), (20, 0)])
def test_a_newer_gpu_gets_the_best_tier_it_can_run(capability):
    for dtype, problem_of in itertools.product(("float16", "bfloat16"), (problem, backward)):
        made = choose(
            problem_of(dtype), dataclasses.replace(H200, compute_capability=capability, name="unheard of")
        )
        assert made.tier == "sm80" and made.refused == ()


def test_the_name_of_a_gpu_decides_nothing():
    for dtype in DTYPES:
        assert choose(problem(dtype), dataclasses.replace(H200, name="")) == choose(problem(dtype), H200)


# ------------------------------------------------------------------------------------------------------------
# What a variant depends on


@pytest.mark.parametrize("tier", TIERS)
@BOTH
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
        dict(varlen=True),
    ],
    ids=str,
)
@BOTH
def test_what_the_kernel_is_compiled_for_changes_the_variant(problem_of, tier, change):
    base = problem_of()
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


@pytest.mark.parametrize("seqlen_q, expected", [(1, 4), (2**11, 4), (2**12, 3), (2**20, 1)])
def test_key_heads_of_a_backward_that_run_together_share_the_cache(seqlen_q, expected):
    # q, dout and dq_sum of 2**12 rows of 4 query heads of 64 take 8 MiB, half of the L2 is 25.
    assert choose(backward(seqlen_q=seqlen_q), H200).heads_in_group == expected
    assert choose(backward(seqlen_q=seqlen_q, deterministic=True), H200).heads_in_group == 4, (
        "waiting for each other"
    )


def test_sequences_of_a_packed_batch_share_their_heads():
    assert choose(problem(varlen=True, batch=100), H200).heads_in_group == 8
    assert choose(backward(varlen=True, batch=100, deterministic=True), H200).heads_in_group == 2


def test_no_keys_at_all():
    for tier in TIERS:
        assert choose(problem(seqlen_k=0), H200, tier).heads_in_group == 16
        assert choose(backward(seqlen_q=0, seqlen_k=0), H200, tier).heads_in_group == 4


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
    ],
)
def test_a_forced_tier_says_why_it_refuses(stated, device, message):
    with pytest.raises(NotImplementedError, match=message):
        choose(stated, device, "sm80")


@BOTH
def test_all_tiers_refusing_are_all_named(problem_of):
    with pytest.raises(NotImplementedError) as raised:
        choose(problem_of("float32", 256), limited(H200, 1))
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
    for tier, size in itertools.product(TIERS, (1, 127, 128, 129, 1000)):
        stated = problem(seqlen_q=size)
        made = choose(stated, H200, tier)
        tiles = launch.num_tiles(stated, made)
        assert (tiles - 1) * made.block_m < size <= tiles * made.block_m
        assert launch.grid_of(stated, made) == tiles * stated.batch * stated.heads_q
        stated = backward(seqlen_k=size)
        made = choose(stated, H200, tier)
        tiles = launch.num_tiles(stated, made)
        assert (tiles - 1) * made.block_n < size <= tiles * made.block_n
        assert launch.grid_of(stated, made) == tiles * stated.batch * stated.heads_k


@pytest.mark.parametrize(
    "lengths", [(), (0,), (1,) * 300, (1000,), (128, 128), (129, 0, 1, 127, 64), (64,) * 8, (0, 0, 65)]
)
@pytest.mark.parametrize("uncovered", [0, 1, 128, 1000])
def test_the_tiles_of_a_packed_batch_fit_the_list(lengths, uncovered):
    total = sum(lengths) + uncovered
    sizes = dict(varlen=True, batch=len(lengths), seqlen_q=total, seqlen_k=total)
    for tier, stated in itertools.product(TIERS, (problem(**sizes), backward(deterministic=True, **sizes))):
        made = choose(stated, H200, tier)
        block, heads = (made.block_n, 2) if stated.__class__ is BackwardProblem else (made.block_m, 8)
        tiles = sum(-(-rows // block) for rows in (*lengths, uncovered))
        assert tiles <= launch.num_tiles(stated, made)
        assert launch.grid_of(stated, made) == launch.num_tiles(stated, made) * heads
        # A header of two, pairs, and the histogram of as many levels as kernels/varlen_tiles.cu counts.
        levels = total // block + 2
        words = 2 + 2 * launch.num_tiles(stated, made) + levels
        assert launch.scratch_of(stated, made)["tiles"] >= 4 * words


def test_a_grid_that_one_launch_cannot_hold():
    stated = problem(batch=65536, heads_q=65536, seqlen_q=1)
    with pytest.raises(
        ValueError,
        match="batch .* heads .* query tiles must be at most 2147483647; got 65536 .* 65536 .* 1: split",
    ):
        launch.grid_of(stated, choose(stated, H200))
    stated = problem(batch=65536, heads_q=32767, seqlen_q=1)
    assert launch.grid_of(stated, choose(stated, H200)) == 65536 * 32767
    stated = backward(batch=65536, heads_k=65536, heads_q=65536, seqlen_k=1)
    with pytest.raises(
        ValueError, match="key tiles must be at most 2147483647; got 65536 .* 65536 .* 1: split the batch"
    ):
        launch.grid_of(stated, choose(stated, H200))
    stated = backward(batch=65536, heads_q=32768, seqlen_q=1, seqlen_k=1, heads_k=1)
    with pytest.raises(
        ValueError, match=r"batch \* heads \* seqlen of q must be at most \d+; got 65536 \* 32768 \* 1: split"
    ):
        launch.steps_of(stated, choose(stated, H200))


def launched(stated, tier=None):
    return {kernel.kernel: grid for kernel, grid in launch.steps_of(stated, choose(stated, H200, tier))}


def test_the_launches_of_a_call_in_their_order():
    assert list(launched(problem())) == ["fwd_sm80"]
    assert list(launched(problem(varlen=True))) == ["varlen_tiles", "fwd_sm80"]
    assert list(launched(backward(), "simt")) == ["bwd_delta", "bwd_simt", "bwd_cast"]
    assert list(launched(backward(varlen=True))) == ["varlen_tiles", "bwd_delta", "bwd_sm80", "bwd_cast"]
    assert launched(problem(varlen=True))["varlen_tiles"] == 1


def test_no_kernel_is_launched_without_work():
    """Zeros are written all the same: those of dq by bwd_cast, those of dk and dv by the kernel of the tiles."""
    for varlen in (False, True):
        assert list(launched(backward(seqlen_k=0, varlen=varlen))) == ["bwd_delta", "bwd_cast"]
        first = ["varlen_tiles"] * varlen
        assert list(launched(backward(seqlen_q=0, varlen=varlen))) == [*first, "bwd_sm80"]
        # Blocks take their numbers from a counter that bwd_delta sets to 0.
        made = launched(backward(seqlen_q=0, varlen=varlen, deterministic=True))
        assert list(made) == [*first, "bwd_delta", "bwd_sm80"] and made["bwd_delta"] == 1


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
    stated = backward(
        dtype, head_dim, head_dim_v, alignment=alignment, out_alignment=alignment, deterministic=True
    )
    made = choose(stated, H200)
    delta, middle, cast = kernels_of(stated, made)
    itemsize = np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize
    assert middle is made and (delta.kernel, cast.kernel) == ("bwd_delta", "bwd_cast")
    for kernel in (delta, cast):
        assert dict(kernel.constants)["HEAD_DIM"] == dict(made.constants)["HEAD_DIM"], "the columns of dq_sum"
    constants, size = dict(delta.constants), head_dim_v * itemsize
    vec, lanes = constants["VEC_BYTES"], constants["LANES"]
    assert itemsize <= vec <= alignment and size % vec == 0 and constants["DETERMINISTIC"] == 1
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
    for tier in ("simt",) if real == 8 or dtype == "float32" else TIERS:
        made = choose(stated, H200, tier)
        assert launch.scratch_of(problem(dtype), choose(problem(dtype), H200)) == {}
        sizes = launch.scratch_of(stated, made)
        assert list(sizes) == ["tiles"] * varlen + ["rows", "dq_sum"]
        assert sizes["rows"] == heads * 1000 * 2 * real and sizes["dq_sum"] == heads * groups * 16 * 96 * real
        ordered = launch.scratch_of(dataclasses.replace(stated, deterministic=True), made)
        tiles = 1000 // made.block_m + 3 if varlen else -(-1000 // made.block_m)
        assert ordered == sizes | {"turns": 4 * (1 + stated.batch_axis * 8 * tiles)}


@BOTH
def test_the_params_record_says_what_the_problem_says(problem_of):
    stated = problem_of(
        head_dim=64, head_dim_v=80, window_left=7, window_right=9, softcap=2.0, softmax_scale=0.5
    )
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
    assert (record["num_tiles"], record["num_short_tiles"]) == (tiles, tiles // 2)
    assert record["heads_in_group"] == made.heads_in_group
    if problem_of is backward:
        assert record["softmax_scale"] == 0.5 and record["num_query_tiles"] == -(-1000 // made.block_m)
    for change in (dict(window_right=None), dict(varlen=True)):  # a packed batch counts its own
        changed = dataclasses.replace(stated, **change)
        assert launch.params_of(changed, choose(changed, H200), strides)["num_short_tiles"] == 0


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


@pytest.fixture
def driver(monkeypatch):
    """What is launched: (function, grid, threads, dynamic shared memory, stream, params record)."""
    from cupy_backends.cuda.api import driver as cuda

    launches, names = [], []

    def launch_kernel(function, grid, _y, _z, threads, _ty, _tz, smem, stream, argv, _extra):
        address = ctypes.cast(argv, ctypes.POINTER(ctypes.c_uint64))[0]
        data = (
            (ctypes.c_char * launch.BWD_PARAMS.itemsize).from_address(address)
            if "bwd" in names[function]
            else (ctypes.c_char * launch.FWD_PARAMS.itemsize).from_address(address)
        )
        record = launch.BWD_PARAMS if "bwd" in names[function] else launch.FWD_PARAMS
        launches.append((names[function], grid, threads, smem, stream, np.frombuffer(bytes(data), record)[0]))

    def load(kernel, constants, arch, device_id, smem_bytes, *, stream):
        names.append(kernel)
        return types.SimpleNamespace(function=len(names) - 1, registers=99)

    monkeypatch.setattr(cuda, "launchKernel", launch_kernel)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(jit, "arch_for", lambda capability: "sm_90")
    monkeypatch.setattr(launch, "device_of", lambda device_id: H200)
    return launches


def prepared(stated, written, was_3d=False, **given):
    shapes = problem_module.result_shapes(vars(stated))
    sides = {
        "q": shapes["dq"],
        "k": shapes["dk"],
        "v": shapes["dv"],
        "out": shapes["out"],
        "dout": shapes["out"],
    }
    names = (
        ("q", "k", "v", "out")
        if written == ("out",)
        else ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")
    )
    views = {name: None for name in names}
    for i, name in enumerate(names):
        if name in sides and (name not in written or name in given):
            shape = sides[name]
            views[name] = View(
                shape, launch.contiguous_strides(shape), "float16", "cuda:0", (i + 1) << 30, "cupy", was_3d
            )
    return launch.Prepared(stated, views | given, written, 0, 7, None)


GRADIENTS = ("dq", "dk", "dv")


def test_a_forward_is_one_launch_with_its_pointers(driver):
    call = prepared(problem(return_lse=True), ("out",))
    assert call.out_shape == (2, 1000, 8, 64) and call.lse_shape == (2, 8, 1000) and call.scratch_bytes == 0
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
    call = prepared(problem(varlen=True), ("out",), was_3d=True)
    assert call.out_shape == (1000, 8, 64) and call.lse_shape == (8, 1000) and call.scratch_bytes % 256 == 0
    call.launch(7, *range(1, 11))
    assert [step[0] for step in driver] == ["varlen_tiles", "fwd_sm80"]
    assert [step[1:4] for step in driver][0] == (1, 512, 0)
    for step in driver:
        assert [int(step[5][name]) for name in launch.FWD_PARAMS.names[:10]] == list(range(1, 11))


def test_a_backward_is_three_launches_over_one_record(driver):
    call = prepared(backward(deterministic=True), GRADIENTS)
    assert call.written_shapes == [(2, 1000, 8, 64), (2, 1000, 2, 64), (2, 1000, 2, 64)]
    offsets = call.scratch_offsets
    assert list(offsets) == ["rows", "dq_sum", "turns"] and all(
        offset % 256 == 0 for offset in offsets.values()
    )
    sizes = launch.scratch_of(call.problem, choose(call.problem, H200))
    ends = [offsets[name] + sizes[name] for name in offsets]
    assert ends[0] <= offsets["dq_sum"] and ends[1] <= offsets["turns"] and ends[2] <= call.scratch_bytes
    call.launch(7, *range(1, 19))
    assert [step[0] for step in driver] == ["bwd_delta", "bwd_sm80", "bwd_cast"]
    first, second = (
        launch.BWD_PARAMS.names[:10],
        ("dout", "dlse", "dq", "dk", "dv", "rows", "dq_sum", "turns"),
    )
    for step in driver:
        assert [int(step[5][name]) for name in (*first, *second)] == list(range(1, 19))


@pytest.mark.parametrize(
    "changes", [dict(batch=0), dict(seqlen_q=0, seqlen_k=0), dict(heads_q=0, heads_k=0)], ids=str
)
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
        match=r"launch of bwd_sm80 failed: CUDA_ERROR_INVALID_VALUE; grid \d+, 128 threads, \d+ "
        "bytes of shared memory, 99 registers a thread",
    ):
        prepared(backward(), GRADIENTS).launch(7, *range(18))


def test_addresses_that_may_overlap(driver):
    size = 2 * 1000 * 8 * 64 * 2
    out = View(
        (2, 1000, 8, 64), launch.contiguous_strides((2, 1000, 8, 64)), "float16", "cuda:0", 1 << 40, "cupy"
    )
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
