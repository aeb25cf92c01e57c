"""Every variant compiles, for every architecture, without spilling; and what the kernel files must keep to.

NVRTC needs no GPU. A variant takes about a second, so each is compiled once: a set of problems for each
architecture, chosen so that together they meet every value of every constant.
"""

import dataclasses
import functools
import itertools
import re
import shutil
from pathlib import Path

import pytest

from cuflash import config, jit, launch
from cuflash.config import DEVICES, choose
from cuflash.problem import Problem

KERNELS = ("fwd_simt", "fwd_sm80")
SIXTEEN_BIT = ("float16", "bfloat16")
TUNED_HEAD_DIMS = (64, 96, 128, 256)
OTHER_HEAD_DIMS = (32, 160, 192, 224)
MASKS = {"none": (None, None), "causal": (None, 0), "left": (9, None), "window": (9, 5)}
SCORES = {
    "scale": dict(softmax_scale=0.1),
    "any scale": dict(softmax_scale=-0.1),
    "softcap": dict(softcap=9.0),
}

# Where every option is compiled: one GPU with much shared memory, one with little.
MAIN = ("sm_90", "sm_86")


@functools.cache
def known_archs() -> tuple[int, ...]:
    try:
        return jit.supported_archs()
    except jit.NvrtcMissing:
        return ()


needs_nvrtc = pytest.mark.skipif(not known_archs(), reason="no NVRTC")


def problem(dtype, head_dim, head_dim_v=None, mask="none", score="scale", **more) -> Problem:
    left, right = MASKS[mask]
    sizes = dict(batch=2, seqlen_q=1000, seqlen_k=1000, heads_q=8, heads_k=2, softmax_scale=0.1)
    return Problem(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        window_left=left,
        window_right=right,
        **sizes | SCORES[score] | more,
    )


def tensor_core_groups(arch):
    """(group, problem, whether it must not spill at all) for fwd_sm80."""
    dtypes = ("float16",) if arch == "sm_75" else SIXTEEN_BIT
    last = dtypes[-1]
    for dtype in dtypes:
        for head_dim, mask in itertools.product(TUNED_HEAD_DIMS, ("none", "causal")):
            yield f"{dtype}", problem(dtype, head_dim, mask=mask), arch != "sm_75"
    for head_dim, mask in itertools.product(OTHER_HEAD_DIMS, ("none", "causal")):
        yield "other head dims", problem(last, head_dim, mask=mask), False
    for head_dim in (20, 100):
        yield "other head dims", problem(last, head_dim, alignment=8, out_alignment=8), False
    if arch not in MAIN:
        return
    for head_dim, mask, score in itertools.product((64, 128, 256), MASKS, SCORES):
        # Nobody is in a hurry with a scale of 0 or below.
        stated = problem("bfloat16", head_dim, mask=mask, score=score)
        yield f"options of head_dim {head_dim}", stated, score != "any scale"
    for head_dim, (vec, out) in itertools.product((40, 64, 128, 256), ((2, 16), (4, 2), (8, 4), (16, 8))):
        stated = problem("float16", head_dim, mask="window", alignment=vec, out_alignment=out)
        yield "alignments", stated, False
    for head_dim, head_dim_v in ((192, 128), (128, 256), (64, 8), (8, 256), (256, 64), (96, 160)):
        for mask in ("none", "causal"):
            yield "unequal head dims", problem("bfloat16", head_dim, head_dim_v, mask), False


def plain_groups(arch):
    """The same for fwd_simt."""
    for dtype, head_dim in (("float32", 64), ("float32", 128), ("float64", 64), ("float16", 128)):
        for mask in ("none", "causal"):
            yield "plain", problem(dtype, head_dim, mask=mask), dtype == "float32"
    if arch != "sm_90":
        return
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for head_dim in sorted(TUNED_HEAD_DIMS + OTHER_HEAD_DIMS):
            yield f"plain {dtype}", problem(dtype, head_dim, mask="causal"), False
        for vec in (2, 4, 8):
            itemsize = {"float32": 4, "float64": 8}.get(dtype, 2)
            if vec >= itemsize:
                stated = problem(dtype, 64, mask="window", alignment=vec, out_alignment=vec)
                yield f"plain {dtype}", stated, False
    for dtype in ("float32", "float64"):
        for mask, score in itertools.product(MASKS, SCORES):
            yield f"options of plain {dtype}", problem(dtype, 64, mask=mask, score=score), False
    for head_dim, head_dim_v in ((192, 128), (8, 256), (256, 8), (33, 100)):
        yield (
            "unequal plain head dims",
            problem("float32", head_dim, head_dim_v, alignment=4, out_alignment=4),
            False,
        )


def small_memory_groups(arch):
    """Tiles of GPUs with less shared memory than `arch` has."""
    if arch == "sm_86":
        for kib, head_dim in itertools.product((48, 64), (64, 128, 256)):
            yield "little shared memory", problem("bfloat16", head_dim, mask="causal"), kib * 1024


@functools.cache
def groups() -> dict[tuple[str, str], dict]:
    """(arch, group) -> {(kernel, constants): (config, problem, must it not spill)}, each variant once."""
    made, seen = {}, set()

    def add(arch, group, stated, device, tier, tuned):
        if (reason := config.refusal(tier, stated, device)) is not None:
            assert tier == "sm80" and "shared memory" in reason
            return
        chosen = choose(stated, device, tier)
        variant = arch, chosen.kernel, chosen.constants
        if variant not in seen:
            seen.add(variant)
            made.setdefault((arch, group), {})[variant[1:]] = chosen, stated, tuned

    for arch, device in DEVICES.items():
        if device.compute_capability >= (7, 5):
            for group, stated, tuned in tensor_core_groups(arch):
                add(arch, group, stated, device, "sm80", tuned)
        for group, stated, smem in small_memory_groups(arch):
            add(arch, group, stated, dataclasses.replace(device, smem_optin=smem), "sm80", False)
        for group, stated, tuned in plain_groups(arch):
            add(arch, group, stated, device, "simt", tuned)
    return made


# What the compilers say when something is not as it should be; that an old GPU is old is no complaint.
COMPLAINT = re.compile(
    r"(?i)(?!.*architectures prior to)(?=.*(warning|performance loss|\bC7\d\d\d\b|serializ))"
)
OTHER_SPILLS = 64  # bytes a thread, where a variant is not among the tuned ones


def faults_of(chosen, stated, arch, tuned) -> list[str]:
    what = (
        f"{chosen.kernel} {arch} {stated.dtype} head_dim {stated.head_dim}/{stated.head_dim_v} "
        f"window {stated.window_left}, {stated.window_right} {dict(chosen.constants)}"
    )
    try:
        built = jit.build(chosen.kernel, launch.kernel_constants(chosen), arch)
    except RuntimeError as error:
        return [f"{what}: {error}"]
    faults = []
    if built.registers == 0:
        faults.append("no figures in the log")
    if built.spill_bytes > (0 if tuned else OTHER_SPILLS):
        faults.append(f"{built.spill_bytes} bytes of spills and stack with {built.registers} registers")
    blocks = dict(chosen.constants)["MIN_BLOCKS"]
    registers = -(-built.registers // 8) * 8  # what a thread is given
    if registers > 256 or registers * chosen.threads * blocks > 65536:
        faults.append(
            f"{built.registers} registers leave no room for {blocks} blocks of {chosen.threads} threads"
        )
    if built.static_smem:
        faults.append(f"{built.static_smem} bytes of static shared memory that config.py does not know of")
    faults += [line.strip() for line in built.log.splitlines() if COMPLAINT.match(line)]
    return [f"{what}: {fault}" for fault in faults]


@needs_nvrtc
@pytest.mark.parametrize("arch, group", groups(), ids=["-".join(key).replace(" ", "_") for key in groups()])
def test_variants_compile_without_spills(arch, group):
    if int(arch.removeprefix("sm_")) not in known_archs():
        pytest.skip(f"NVRTC {'.'.join(map(str, jit.nvrtc_version()))} does not know {arch}")
    faults = []
    for chosen, stated, tuned in groups()[arch, group].values():
        faults += faults_of(chosen, stated, arch, tuned)
    assert not faults, "\n".join(faults)


def test_the_variants_meet_every_value_of_every_constant():
    values = {}
    for variants in groups().values():
        for kernel, constants in variants:
            for name, value in constants:
                values.setdefault((kernel, name), set()).add(value)
    for kernel in KERNELS:
        assert values[kernel, "SCORE"] == {0, 1, 2}
        assert values[kernel, "MASK_LEFT"] == values[kernel, "MASK_RIGHT"] == {0, 1}
        assert values[kernel, "VEC_BYTES"] >= {2, 4, 8, 16}
    assert values["fwd_sm80", "HEAD_DIM"] == values["fwd_sm80", "HEAD_DIM_V"] == set(range(32, 257, 32))
    assert values["fwd_simt", "HEAD_DIM"] == set(range(32, 257, 32))
    assert values["fwd_sm80", "DTYPE"] == {0, 1} and values["fwd_simt", "DTYPE"] == {0, 1, 2, 3}
    assert values["fwd_sm80", "WHOLE_HEADS"] == {0, 1} and values["fwd_sm80", "OUT_VEC_BYTES"] == {
        2,
        4,
        8,
        16,
    }
    assert {arch for arch, _ in groups()} == set(DEVICES)


@needs_nvrtc
@pytest.mark.parametrize("kernel", KERNELS)
def test_ptx_for_a_gpu_that_nvrtc_does_not_know(kernel):
    """A newer GPU gets PTX of the newest architecture known."""
    stated = problem("float16", 64)
    chosen = choose(stated, DEVICES["sm_90"], kernel.removeprefix("fwd_"))
    built = jit.build(kernel, launch.kernel_constants(chosen), jit.arch_for((99, 0)))
    text = built.cubin.decode()
    assert f".entry {kernel}(" in text and f".target sm_{max(known_archs())}" in text


@needs_nvrtc
def test_sm90a_compiles_too():
    chosen = choose(problem("bfloat16", 128), DEVICES["sm_90"])
    assert not faults_of(chosen, problem("bfloat16", 128), "sm_90a", True)


# ------------------------------------------------------------------------------------------------------------
# Host and kernel agree


@needs_nvrtc
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "name", ["OFFSET_q", "OFFSET_v_strides", "OFFSET_window_right", "OFFSET_heads_in_group", "PARAMS_BYTES"]
)
def test_another_params_layout_does_not_compile(kernel, name):
    chosen = choose(problem("float16", 32), DEVICES["sm_90"], kernel.removeprefix("fwd_"))
    constants = launch.kernel_constants(chosen)
    with pytest.raises(RuntimeError, match=f"(?s)cannot compile {kernel}.*static"):
        jit.build(kernel, constants | {name: constants[name] + 8}, "sm_80")


@needs_nvrtc
@pytest.mark.parametrize("kernel", KERNELS)
def test_another_size_of_shared_memory_does_not_compile(kernel):
    chosen = choose(problem("float16", 32), DEVICES["sm_90"], kernel.removeprefix("fwd_"))
    constants = launch.kernel_constants(chosen)
    with pytest.raises(RuntimeError, match="(?s)cannot compile.*config.py disagrees on shared memory"):
        jit.build(kernel, constants | {"SMEM_BYTES": chosen.smem_bytes + 16}, "sm_80")


def test_every_field_of_the_params_is_checked():
    text = (jit.kernels_dir() / "attn/params.cuh").read_text()
    assert set(re.findall(r"MEETS\((\w+)\);", text)) == set(launch.FWD_PARAMS.names)


# ------------------------------------------------------------------------------------------------------------
# Text closure


@pytest.fixture
def copied(monkeypatch, tmp_path) -> Path:
    """A copy of the kernels that may be changed."""
    folder = tmp_path / "kernels"
    shutil.copytree(jit.kernels_dir(), folder)
    monkeypatch.setattr(jit, "kernels_dir", lambda: folder)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def files(suffix: str) -> list[str]:
    root = jit.kernels_dir()
    return sorted(path.relative_to(root).as_posix() for path in root.rglob(f"*{suffix}"))


def reached_from(kernel: str) -> set[str]:
    return set(re.findall(r"^//// (\S+) \d+$", jit.closure(kernel), re.MULTILINE))


def test_every_header_is_reached_by_some_kernel():
    assert set().union(*(reached_from(kernel) for kernel in KERNELS)) == set(files(".cu") + files(".cuh"))


@pytest.mark.parametrize("name", files(".cu") + files(".cuh"))
def test_the_key_changes_with_every_file(copied, monkeypatch, name):
    """That of each kernel that includes it, at any depth, and of no other."""
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))

    class Asked(Exception):
        pass

    def key(kernel):
        with monkeypatch.context() as patch:
            # The first that build() does with the key is to look for its file.
            def read(folder, key, arch):
                raise Asked(key)

            patch.setattr(jit, "_read", read)
            with pytest.raises(Asked) as asked:
                jit.build(kernel, {"X": 1}, "sm_80")
            return asked.value.args[0]

    before, digest = {kernel: key(kernel) for kernel in KERNELS}, jit.digest()
    path = copied / name
    path.write_text(path.read_text() + "// changed\n")
    for kernel in KERNELS:
        assert (key(kernel) != before[kernel]) == (name in reached_from(kernel)), kernel
    assert jit.digest() != digest


# ------------------------------------------------------------------------------------------------------------
# Rules of the files


def code_of(name: str) -> str:
    """The text without comments."""
    text = (jit.kernels_dir() / name).read_text()
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", files(".cu") + files(".cuh"))
def test_rules_of_a_file(name):
    code, text = code_of(name), (jit.kernels_dir() / name).read_text()
    if not name.startswith("ptx/"):
        assert not re.search(r"\basm\b", code), "asm stands in ptx/ only"
        assert "__CUDA_ARCH__" not in code, "the file is the tier: architectures differ in ptx/ only"
    assert not re.search(r"#\s*include\s*<", code), "system headers would have to be found on every machine"
    if name.endswith(".cuh"):
        assert re.search(r"^#pragma once$", text, re.MULTILINE)
        assert "__global__" not in code, "an entry is a file of its own"
    else:
        assert re.findall(r'extern "C" __global__ [^{;]*?(\w+)\(const \w+ \w+\)', code) == [Path(name).stem]
        assert code.count("__global__") == 1, "one entry, named as its file"
    # Dependencies go down: .cu -> attn/ -> tile/ -> ptx/.
    order = ("ptx", "tile", "attn", name)
    own = next(level for level, folder in enumerate(order) if name.startswith(folder))
    for included in re.findall(r'#\s*include\s*"([^"]+)"', code):
        assert next(level for level, folder in enumerate(order) if included.startswith(folder)) <= own, (
            included
        )
    assert text.startswith("//"), "the first line says what the file is"
    assert not re.search(r"(?i)\b(TODO|FIXME|XXX)\b", text)


def test_kernels_are_those_that_config_names():
    assert (
        files(".cu")
        == [f"{kernel}.cu" for kernel in KERNELS]
        == sorted(f"fwd_{tier}.cu" for tier in config.TIERS)
    )
