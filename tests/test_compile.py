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

from cuflash import config, jit, launch, merge, tma
from cuflash.config import DEVICES, choose, kernels_of
from cuflash.problem import BackwardProblem, DecodeProblem, MergeProblem, Problem

CALLS = ("bwd", "decode", "fwd")
WIDE = ("bwd_dkv_sm90", "bwd_dq_sm90")  # dk and dv of wide heads, and their dq
OF_TIERS = (f"{call}_{tier}" for call, tier in itertools.product(CALLS, config.TIERS))
TIERED = tuple(sorted((*WIDE, "decode_rows_sm90", *OF_TIERS)))
BESIDE = ("bwd_cast", "bwd_delta", "decode_combine", "decode_combine_wide", "merge", "varlen_tiles")
KERNELS = tuple(sorted((*TIERED, *BESIDE)))
OF_DECODING = tuple(kernel for kernel in KERNELS if kernel.startswith("decode"))
SIXTEEN_BIT = ("float16", "bfloat16")
TUNED_HEAD_DIMS = (64, 96, 128, 256)
TUNED_HOPPER_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
OTHER_HEAD_DIMS = (32, 160, 192, 224)
MASKS = {"none": (None, None), "causal": (None, 0), "left": (9, None), "window": (9, 5)}
EVERY_MASK = MASKS | {"wide window": (4096, 5)}
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


LONG = dict(seqlen_q=8192, seqlen_k=8192)


def problem(dtype, head_dim, head_dim_v=None, mask="none", score="scale", **more) -> Problem:
    left, right = EVERY_MASK[mask]
    sizes = dict(batch=2, seqlen_q=1000, seqlen_k=1000, heads_q=8, heads_k=2, softmax_scale=0.1)
    return Problem(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        window_left=left,
        window_right=right,
        **sizes | SCORES[score] | more,
    )


def backward(dtype, head_dim, head_dim_v=None, mask="none", score="scale", **more) -> BackwardProblem:
    own = {name: more.pop(name) for name in ("deterministic",) if name in more}
    return BackwardProblem(**vars(problem(dtype, head_dim, head_dim_v, mask, score, **more)) | own)


def decode(dtype, head_dim, head_dim_v=None, mask="none", score="scale", rows=1, **more) -> DecodeProblem:
    """``rows``: that read a key head."""
    own = {name: more.pop(name) for name in tuple(more) if name not in Problem.__dataclass_fields__}
    base = problem(dtype, head_dim, head_dim_v, mask, score, **dict(seqlen_q=rows, heads_q=2, heads_k=2) | more)
    return DecodeProblem(**vars(base) | own)


def latent(dtype="bfloat16", head_dim=576, head_dim_v=512, mask="none", score="scale", **more) -> DecodeProblem:
    return decode(dtype, head_dim, head_dim_v, mask, score, v_is_k=True, **more)


PAGED, APPENDS, SPLITS = dict(paged=True, page_size=16), dict(seqlen_new=1), dict(num_splits=3)
WAYS = {
    "pages": PAGED,
    "appended": APPENDS,
    "appended pages": PAGED | APPENDS,
    "splits": SPLITS,
    "splits of appended pages": PAGED | APPENDS | SPLITS,
}


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
    for head_dim in (64, 128):
        yield "packed", problem(last, head_dim, mask="causal", varlen=True), arch != "sm_75"
    if arch not in MAIN:
        return
    for head_dim, mask in itertools.product((64, 128, 256), ("none", "window")):
        yield "packed", problem("bfloat16", head_dim, mask=mask, varlen=True), True
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


def hopper_groups(arch):
    """The same for fwd_sm90, which runs on one arch: options in combination."""
    if arch != "sm_90":
        return
    for (head_dim, head_dim_v), mask in itertools.product(TUNED_HOPPER_HEAD_DIMS, ("none", "causal")):
        yield f"Hopper {mask}", problem("bfloat16", head_dim, head_dim_v, mask), True
    # Long sequences have other tiles.
    for head_dim, mask, varlen in itertools.product((128, 256), ("none", "causal"), (False, True)):
        stated = problem("bfloat16", head_dim, mask=mask, varlen=varlen, **LONG)
        yield f"long sequences of head_dim {head_dim} on Hopper", stated, True
    for mask, score in (("window", "scale"), ("none", "softcap"), ("causal", "any scale")):
        yield "long sequences of head_dim 128 on Hopper", problem("float16", 128, None, mask, score, **LONG), False
    # Narrow windows have other tiles than wide ones, and both more stages than a causal mask. Two bounds leave 256 columns of O
    # too few registers.
    for (head_dim, head_dim_v), mask in itertools.product(TUNED_HOPPER_HEAD_DIMS, ("window", "wide window")):
        yield "windows on Hopper", problem("bfloat16", head_dim, head_dim_v, mask, **LONG), head_dim != 256
    yield "windows on Hopper", problem("bfloat16", 64, 128, "wide window", **LONG), True
    for head_dim, mask in ((64, "causal"), (128, "none"), (128, "causal"), (256, "none")):
        yield "Hopper float16", problem("float16", head_dim, mask=mask), True
    for head_dim, mask in ((64, "none"), (64, "causal"), (128, "none"), (128, "causal"), (128, "window"), (256, "causal")):
        yield "packed on Hopper", problem("bfloat16", head_dim, mask=mask, varlen=True), True
    for head_dim, mask, score in itertools.product((64, 128, 256), MASKS, SCORES):
        # Nobody is in a hurry with a scale of 0 or below. Two bounds, or tanh, leave 256 columns of O too few registers: some
        # numbers are spilled outside of the loop over plain key tiles.
        spills = head_dim == 256 and (mask == "window" or score == "softcap")
        stated = problem("bfloat16", head_dim, mask=mask, score=score)
        yield f"options of head_dim {head_dim} on Hopper", stated, score != "any scale" and not spills
    for head_dim, head_dim_v, mask in (
        (64, 256, "none"),
        (256, 64, "causal"),
        (40, 72, "none"),
        (8, 256, "causal"),
        (96, 160, "window"),
        (32, 160, "none"),
    ):
        yield "unequal head dims on Hopper", problem("bfloat16", head_dim, head_dim_v, mask), False
    for head_dim, out in ((64, 2), (128, 8), (256, 4)):
        yield "alignments of out on Hopper", problem("float16", head_dim, mask="causal", out_alignment=out), False
    yield "alignments of out on Hopper", problem("bfloat16", 128, 90, "causal", out_alignment=4), False


def plain_groups(arch):
    """The same for fwd_simt."""
    for dtype, head_dim in (("float32", 64), ("float32", 128), ("float64", 64), ("float16", 128)):
        for mask in ("none", "causal"):
            yield "plain", problem(dtype, head_dim, mask=mask), dtype == "float32"
    if arch != "sm_90":
        return
    # Few tiles and many: blocks of half as many warps and of all.
    for mask, more in (("none", dict(seqlen_q=64)), ("causal", LONG), ("window", LONG)):
        yield "plain", problem("float32", 128, mask=mask, **more), True
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

    for dtype, mask in (("float32", "causal"), ("float64", "window")):
        yield "packed plain", problem(dtype, 64, mask=mask, varlen=True), False


def tensor_core_gradient_groups(arch):
    """The same for bwd_sm80, whose variants take three times as long: options in combination."""
    for head_dim, mask in itertools.product((64, 128, 256), ("none", "causal")):
        # head_dim 64 spills 16 to 24 bytes on sm_80 and sm_100.
        yield f"gradients of {head_dim}", backward("bfloat16", head_dim, mask=mask), arch in MAIN
    if arch == "sm_86":
        for head_dim in (64, 128):
            stated = backward("float16", head_dim, mask="window", deterministic=True, varlen=True)
            yield f"gradients of {head_dim}", stated, False
        yield "gradients of 128", backward("float16", 96, mask="causal"), False     # groups of four warps share 96 columns
    if arch != "sm_90":
        return
    for head_dim in (64, 128, 256):
        group = f"options of gradients of {head_dim}"
        yield group, backward("bfloat16", head_dim, deterministic=True), True
        # Under a mask the turns spill 24 to 48 bytes outside of the products.
        yield group, backward("bfloat16", head_dim, mask="causal", deterministic=True), False
        yield group, backward("bfloat16", head_dim, mask="causal", varlen=True), True
        yield (
            group,
            backward("float16", head_dim, mask="window", score="softcap", alignment=8, out_alignment=4),
            False,
        )
    yield (
        "rare gradients",
        backward("float16", 64, mask="left", score="any scale", alignment=2, out_alignment=2),
        False,
    )
    yield "rare gradients", backward("float16", 40, alignment=4, varlen=True, deterministic=True), False
    for head_dim, head_dim_v in ((32, 32), (96, 96), (160, 160), (192, 128), (8, 256)):
        yield "rare gradients", backward("bfloat16", head_dim, head_dim_v, "causal"), False
    for mask, score in itertools.product(MASKS, SCORES):
        yield "masks and scores of gradients", backward("float16", 128, mask=mask, score=score), False


def hopper_gradient_groups(arch):
    """The same for bwd_sm90: no variant spills, as one that does has all its products one after the other."""
    if arch != "sm_90":
        return
    for head_dim, mask, deterministic in itertools.product((64, 96, 128), MASKS, (False, True)):
        stated = backward("bfloat16", head_dim, mask=mask, deterministic=deterministic)
        yield f"gradients of {head_dim} on Hopper", stated, True
        packed = backward("float16", head_dim, mask=mask, deterministic=deterministic, varlen=True)
        yield f"packed gradients of {head_dim} on Hopper", packed, True
    for head_dim, mask, score in itertools.product((64, 96, 128), MASKS, SCORES):
        group = f"options of gradients of {head_dim} on Hopper"
        yield group, backward("bfloat16", head_dim, mask=mask, score=score), True
        yield group, backward("float16", head_dim, mask=mask, score=score, varlen=True, deterministic=True), True
    for score in SCORES:
        group = "gradients of 128 of many queries on Hopper"
        yield group, backward("bfloat16", 128, score=score, **LONG), True
        yield group, backward("float16", 128, 104, score=score, out_alignment=8, **LONG), True
        yield group, backward("bfloat16", 128, mask="causal", score=score, **LONG), True
        for mask in MASKS:
            yield group, backward("bfloat16", 128, mask=mask, score=score, deterministic=True, **LONG), True
    # Long enough for no two heads to stay in the L2 cache.
    for head_dim, mask in itertools.product((64, 96, 128), ("causal", "window")):
        longer = dict(seqlen_q=2**17, seqlen_k=2**17)
        stated = backward("bfloat16", head_dim, mask=mask, deterministic=True, **longer)
        yield f"gradients of {head_dim} on Hopper", stated, True
    for head_dim, head_dim_v, out in ((40, 72, 16), (128, 20, 8), (8, 64, 4), (96, 90, 2)):
        stated = backward("float16", head_dim, head_dim_v, "causal", out_alignment=out)
        yield "unequal gradients on Hopper", stated, True
    # Two kernels of their own, which have nothing to do for deterministic sums.
    for head_dim, mask, varlen in itertools.product((192, 256), MASKS, (False, True)):
        stated = backward("float16" if varlen else "bfloat16", head_dim, mask=mask, varlen=varlen)
        yield f"gradients of {head_dim} on Hopper", stated, True
    for mask, score in itertools.product(MASKS, SCORES):
        yield "options of gradients of 256 on Hopper", backward("bfloat16", 256, mask=mask, score=score), True
    for head_dim, head_dim_v, out in ((136, 72, 16), (128, 180, 8), (8, 254, 4), (192, 129, 2)):
        stated = backward("float16", head_dim, head_dim_v, "causal", "softcap", varlen=True, out_alignment=out)
        yield "unequal wide gradients on Hopper", stated, True


def plain_gradient_groups(arch):
    """The same for bwd_simt."""
    yield "plain gradients", backward("float32", 64, mask="causal"), True
    if arch != "sm_90":
        return
    for dtype, head_dim in (
        ("float64", 64),
        ("bfloat16", 128),
        ("float64", 128),
        ("float32", 128),
        ("float16", 256),
    ):
        yield "plain gradients", backward(dtype, head_dim), dtype == "float32"
    for dtype, head_dim in (
        ("float32", 32),
        ("float32", 96),
        ("float64", 192),
        ("float32", 256),
        ("float64", 256),
    ):
        yield "more plain gradients", backward(dtype, head_dim, mask="causal", deterministic=True), False
    for mask, score, vec in (("left", "any scale", 4), ("window", "softcap", 8), ("none", "softcap", 16)):
        stated = backward(
            "float32", 64, mask=mask, score=score, varlen=True, alignment=vec, out_alignment=vec
        )
        yield "options of plain gradients", stated, False
    yield "options of plain gradients", backward("float16", 33, 7, alignment=2, out_alignment=2), False
    yield "options of plain gradients", backward("float64", 64, 128, varlen=True, deterministic=True), False


def tensor_core_decode_groups(arch):
    """The same for decode_sm80."""
    last = "float16" if arch == "sm_75" else "bfloat16"
    for head_dim, rows in itertools.product((64, 128), (1, 32, 64)):
        yield "decoding", decode(last, head_dim, rows=rows), arch != "sm_75"
    if arch not in MAIN:
        return
    for (head_dim, rows), way in itertools.product(((64, 1), (128, 1), (128, 64), (256, 1)), WAYS):
        yield f"ways of decoding {head_dim}", decode("bfloat16", head_dim, rows=rows, **WAYS[way]), True
    for rows, mask in itertools.product((1, 32, 64), ("causal", "window")):
        yield "masks of decoding", decode("float16", 128, mask=mask, rows=rows), True
    for head_dim, rows in itertools.product((192, 256), (1, 32, 64)):
        yield "decoding of wide heads", decode("bfloat16", head_dim, rows=rows), True
    if arch != "sm_90":
        return
    for mask, score in itertools.product(MASKS, SCORES):
        yield "masks and scores of decoding", decode("bfloat16", 128, mask=mask, score=score, rows=4), score != "any scale"
    for head_dim, (vec, out) in itertools.product((40, 128), ((2, 16), (4, 2), (8, 4), (16, 8))):
        stated = decode("float16", head_dim, mask="window", alignment=vec, out_alignment=out, **APPENDS)
        yield "alignments of decoding", stated, False
    for head_dim, head_dim_v in ((32, 32), (96, 96), (160, 160), (224, 224), (192, 128), (128, 256), (64, 8), (8, 256)):
        yield "other head dims of decoding", decode("float16", head_dim, head_dim_v, "causal", rows=16), False
    yield "other head dims of decoding", decode("bfloat16", 128, 64, rows=64, v_is_k=True, **APPENDS), False


def hopper_decode_groups(arch):
    """The same for decode_sm90 and decode_rows_sm90: no variant spills."""
    if arch != "sm_90":
        return
    for head_dim, mask, score in itertools.product((64, 128, 256), MASKS, SCORES):
        yield f"decoding of many rows, {head_dim}", decode("bfloat16", head_dim, mask=mask, score=score, rows=64), True
    for dtype, head_dim, way in itertools.product(SIXTEEN_BIT, (64, 128), WAYS):
        yield f"ways of decoding many rows, {head_dim}", decode(dtype, head_dim, mask="causal", rows=64, **WAYS[way]), True
    for (head_dim, head_dim_v), way in itertools.product(itertools.product((64, 128, 192, 256), repeat=2), ("pages", "splits")):
        if head_dim != head_dim_v:
            stated = decode("bfloat16", head_dim, head_dim_v, "window", rows=64, **APPENDS | WAYS[way])
            yield f"many rows of other head dims, {head_dim}", stated, True
    for (head_dim, head_dim_v), out in itertools.product(((40, 72), (100, 128), (136, 200)), (2, 4, 8, 16)):
        stated = decode("float16", head_dim, head_dim_v, "causal", rows=64, out_alignment=out, **APPENDS | SPLITS)
        yield "many rows of padded head dims", stated, True
    for head_dim, head_dim_v in ((128, 64), (256, 256)):
        yield "many rows of values that are keys", latent("bfloat16", head_dim, head_dim_v, "causal", rows=64, **APPENDS), True
    for mask, score in itertools.product(MASKS, SCORES):
        yield "latent decoding", latent(mask=mask, score=score), True
    large = dict(paged=True, page_size=64)
    for dtype, way in itertools.product(SIXTEEN_BIT, (*WAYS.values(), large, large | APPENDS, large | SPLITS)):
        yield "ways of latent decoding", latent(dtype, mask="causal", **way), True
    for head_dim, head_dim_v, out in ((300, 260, 2), (512, 512, 4), (576, 260, 8), (400, 400, 16)):
        yield "other latent decoding", latent("float16", head_dim, head_dim_v, out_alignment=out), True


def plain_decode_groups(arch):
    """The same for decode_simt."""
    for dtype, head_dim in (("float32", 128), ("float16", 64)):
        yield "plain decoding", decode(dtype, head_dim, rows=4), True
    if arch != "sm_90":
        return
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for head_dim, rows in itertools.product((32, 64, 128, 256), (1, 8)):
            yield f"plain decoding {dtype}", decode(dtype, head_dim, mask="causal", rows=rows), True
        for head_dim, head_dim_v in ((576, 512), (320, 320), (8, 512), (576, 32)):
            yield f"plain decoding {dtype}", decode(dtype, head_dim, head_dim_v, rows=8), True
        itemsize = {"float32": 4, "float64": 8}.get(dtype, 2)
        for vec in (2, 4, 8):
            if vec >= itemsize:
                stated = decode(dtype, 64, mask="window", alignment=vec, out_alignment=vec, rows=2, **APPENDS)
                yield f"plain decoding {dtype}", stated, False
    for dtype, way in itertools.product(("float32", "float64"), WAYS):
        yield "ways of plain decoding", decode(dtype, 128, **WAYS[way]), True
    for mask, score in itertools.product(MASKS, SCORES):
        yield "masks and scores of plain decoding", decode("float32", 128, mask=mask, score=score, rows=4), False
    for dtype, way in itertools.product(("float16", "float32"), WAYS):
        yield "plain latent decoding", latent(dtype, rows=16, **WAYS[way]), True


def small_memory_groups(arch):
    """Tiles of GPUs with less shared memory than `arch` has."""
    if arch == "sm_86":
        for kib, head_dim in itertools.product((48, 64), (64, 128, 256)):
            yield "little shared memory", problem("bfloat16", head_dim, mask="causal"), kib * 1024, "sm80"
            if head_dim < 256:
                yield "decoding with little shared memory", decode("bfloat16", head_dim, rows=64), kib * 1024, "sm80"
        for dtype, head_dim in (("float32", 64), ("float32", 128), ("float64", 256)):
            yield "gradients with little shared memory", backward(dtype, head_dim), 48 * 1024, "simt"


@functools.cache
def groups() -> dict[tuple[str, str], dict]:
    """(arch, group) -> {(kernel, constants): (kernel, problem, must it not spill)}, each variant once."""
    made, seen = {}, set()

    def add(arch, group, stated, device, tier, tuned):
        if (reason := config.refusal(tier, stated, device)) is not None:
            assert tier == "sm80" and "shared memory" in reason
            return
        for kernel in kernels_of(stated, choose(stated, device, tier)):
            variant = arch, kernel.kernel, kernel.constants
            if variant not in seen:
                seen.add(variant)
                made.setdefault((arch, group), {})[variant[1:]] = kernel, stated, tuned

    for arch, device in DEVICES.items():
        if device.compute_capability >= (7, 5):
            for group, stated, tuned in itertools.chain(tensor_core_groups(arch), tensor_core_decode_groups(arch)):
                add(arch, group, stated, device, "sm80", tuned)
        if device.compute_capability >= (8, 0):
            for group, stated, tuned in tensor_core_gradient_groups(arch):
                add(arch, group, stated, device, "sm80", tuned)
        for group, stated, tuned in itertools.chain(
            hopper_groups(arch), hopper_gradient_groups(arch), hopper_decode_groups(arch)
        ):
            add(arch, group, stated, device, "sm90", tuned)
        for group, stated, smem, tier in small_memory_groups(arch):
            add(arch, group, stated, dataclasses.replace(device, smem_optin=smem), tier, False)
        for group, stated, tuned in itertools.chain(
            plain_groups(arch), plain_gradient_groups(arch), plain_decode_groups(arch)
        ):
            add(arch, group, stated, device, "simt", tuned)
    return made


@functools.cache
def some_variants() -> dict[str, config.Kernel]:
    """A variant of each kernel."""
    made, device = {}, DEVICES["sm_90"]
    for tier, stated in itertools.product(
        config.TIERS,
        (
            problem("float16", 32),
            backward("float16", 32, varlen=True),
            backward("float16", 256),
            decode("float16", 32),
            decode("float16", 32, rows=64),
            latent("float16"),
        ),
    ):
        if config.refusal(tier, stated, device) is None:
            made |= {kernel.kernel: kernel for kernel in kernels_of(stated, choose(stated, device, tier))}
    return made | {"merge": merge.kernel_of(MergeProblem("float16", 2, 3, 4, 64, 5))}


def arch_of_any(kernel: str) -> str:
    """An arch that compiles it."""
    return launch.arch_of(some_variants()[kernel], "sm_90")


# What the compilers say when something is not as it should be; that an old GPU is old is no complaint.
COMPLAINT = re.compile(
    r"(?i)(?!.*architectures prior to)(?=.*(warning|performance loss|\bC7\d\d\d\b|serializ))"
)
OTHER_SPILLS = 96  # bytes a thread, where a variant is not among the tuned ones


def faults_of(kernel, stated, arch, tuned) -> list[str]:
    what = (
        f"{kernel.kernel} {arch} {stated.dtype} head_dim {stated.head_dim}/{stated.head_dim_v} "
        f"window {stated.window_left}, {stated.window_right} {dict(kernel.constants)}"
    )
    try:
        built = jit.build(kernel.kernel, launch.kernel_constants(kernel), launch.arch_of(kernel, arch))
    except RuntimeError as error:
        return [f"{what}: {error}"]
    faults = []
    if built.registers == 0:
        faults.append("no figures in the log")
    if built.spill_bytes > (0 if tuned and kernel.kernel in TIERED else OTHER_SPILLS):
        faults.append(f"{built.spill_bytes} bytes of spills and stack with {built.registers} registers")
    blocks = dict(kernel.constants).get("MIN_BLOCKS", 1)
    registers = -(-built.registers // 8) * 8  # what a thread is given
    if registers > 256 or registers * kernel.threads * blocks > 65536:
        faults.append(
            f"{built.registers} registers leave no room for {blocks} blocks of {kernel.threads} threads"
        )
    # The list of tiles is made in static shared memory, by a single block; results of parts are joined in a little of it.
    static = {"varlen_tiles": 48 * 1024, "decode_combine": 8 * 1024, "decode_combine_wide": 512}
    if built.static_smem > static.get(kernel.kernel, 0):
        faults.append(f"{built.static_smem} bytes of static shared memory that config.py does not know of")
    faults += [line.strip() for line in built.log.splitlines() if COMPLAINT.match(line)]
    return [f"{what}: {fault}" for fault in faults]


@needs_nvrtc
@pytest.mark.parametrize("arch, group", groups(), ids=["-".join(key).replace(" ", "_") for key in groups()])
def test_variants_compile_without_spills(arch, group):
    if int(arch.removeprefix("sm_")) not in known_archs():
        pytest.skip(f"NVRTC {'.'.join(map(str, jit.nvrtc_version()))} does not know {arch}")
    faults = []
    for kernel, stated, tuned in groups()[arch, group].values():
        faults += faults_of(kernel, stated, arch, tuned)
    assert not faults, "\n".join(faults)


def test_the_variants_meet_every_value_of_every_constant():
    values = {}
    for variants in groups().values():
        for kernel, constants in variants:
            for name, value in constants:
                values.setdefault((kernel, name), set()).add(value)
    for kernel in TIERED:
        assert values[kernel, "SCORE"] == {0, 1, 2}
        assert values[kernel, "MASK_LEFT"] == values[kernel, "MASK_RIGHT"] == {0, 1}
        assert values[kernel, "VARLEN"] == ({0} if kernel in OF_DECODING else {0, 1})
        if kernel in ("decode_sm90", "decode_rows_sm90"):
            assert values[kernel, "VEC_BYTES"] == {16}
        elif kernel.endswith("sm90"):  # TMA takes whole rows
            assert (kernel, "VEC_BYTES") not in values
        else:
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
    assert values["fwd_sm90", "HEAD_DIM"] == values["fwd_sm90", "HEAD_DIM_V"] == {64, 96, 128, 192, 256}
    assert values["fwd_sm90", "DTYPE"] == values["fwd_sm90", "WHOLE_HEADS"] == {0, 1}
    assert values["fwd_sm90", "OUT_VEC_BYTES"] == {2, 4, 8, 16}
    assert values["bwd_sm80", "DTYPE"] == {0, 1} and values["bwd_sm80", "WHOLE_HEADS"] == {0, 1}
    assert values["bwd_sm80", "HEAD_DIM"] == {32, 64, 96, 128, 192, 256}
    assert values["bwd_sm90", "HEAD_DIM"] == {64, 96, 128} and values["bwd_sm90", "DTYPE"] == {0, 1}
    assert values["bwd_sm90", "OUT_VEC_BYTES"] == {2, 4, 8, 16} and values["bwd_sm90", "WHOLE_HEADS"] == {0, 1}
    for kernel in WIDE:
        assert values[kernel, "HEAD_DIM"] == {192, 256} and values[kernel, "DTYPE"] == {0, 1}
        assert values[kernel, "OUT_VEC_BYTES"] == {2, 4, 8, 16} and values[kernel, "WHOLE_HEADS"] == {0, 1}
    assert values["bwd_delta", "COUNTS_TILES"] == {0, 1}
    for kernel in OF_DECODING:
        for name in ("PAGED", "APPENDS", "FIXED_SPLITS"):
            assert values[kernel, name] == {0, 1}
        assert values[kernel, "V_IS_K"] == ({1} if kernel in ("decode_sm90", "decode_combine_wide") else {0, 1})
        assert values[kernel, "OUT_VEC_BYTES"] == {2, 4, 8, 16}
        assert values[kernel, "DTYPE"] == ({0, 1, 2, 3} if kernel in ("decode_simt", "decode_combine") else {0, 1})
    assert values["decode_sm80", "HEAD_DIM"] == values["decode_sm80", "HEAD_DIM_V"] == set(range(32, 257, 32))
    assert values["decode_sm80", "BLOCK_M"] == {16, 32, 64} and values["decode_simt", "BLOCK_M"] == {1, 2, 4, 8}
    assert values["decode_simt", "HEAD_DIM_V"] == {32, 64, 128, 256, 384, 512}
    for kernel in ("decode_sm80", "decode_sm90", "decode_rows_sm90"):
        assert values[kernel, "WHOLE_HEADS"] == {0, 1}
    assert values["decode_rows_sm90", "HEAD_DIM"] == values["decode_rows_sm90", "HEAD_DIM_V"] == {64, 128, 192, 256}
    assert values["decode_rows_sm90", "STAGES"] == {2, 4, 6} and values["decode_rows_sm90", "KEEPS_Q"] == {0, 1}
    assert values["bwd_simt", "HEAD_DIM"] == {32, 64, 96, 128, 192, 256}
    for kernel in ("bwd_simt", "bwd_delta", "bwd_cast"):
        assert values[kernel, "DTYPE"] == {0, 1, 2, 3}
    for kernel in ("bwd_simt", "bwd_sm80", "bwd_sm90", "bwd_delta"):
        assert values[kernel, "DETERMINISTIC"] == {0, 1}
    for name in ("SIDE", "MASK_LEFT", "MASK_RIGHT"):
        assert values["varlen_tiles", name] == {0, 1}
    assert {arch for arch, _ in groups()} == set(DEVICES)


def test_the_variants_meet_every_tile_of_the_hopper_forward():
    """With and without a mask: the code of one tile may keep to its registers where that of another spills."""
    names = ("CONSUMERS", "BLOCK_N", "STAGES", "TURNS", "MASK_RIGHT")

    def tile(constants):
        return tuple(dict(constants)[name] for name in names)

    met = {tile(constants) for variants in groups().values() for kernel, constants in variants if kernel == "fwd_sm90"}
    sizes = range(32, 257, 32)
    masks = ("none", "causal", "window", "wide window")
    for head_dim, head_dim_v, mask, length in itertools.product(sizes, sizes, masks, ({}, LONG)):
        stated = problem("float16", head_dim, head_dim_v, mask, **length)
        assert tile(choose(stated, DEVICES["sm_90"], "sm90").constants) in met


def test_the_variants_meet_every_tile_of_the_hopper_backward():
    tiles = ("HEAD_DIM", "BLOCK_M", "STAGES", "K_PANEL", "K_SLOTS", "V_SLOTS", "STAGES_DQ")
    names = (*tiles, "DETERMINISTIC", "MASK_RIGHT", "ASCENDS")

    def tile(constants):
        return tuple(dict(constants)[name] for name in names)

    met = {tile(constants) for variants in groups().values() for kernel, constants in variants if kernel == "bwd_sm90"}
    sizes = range(32, 129, 32)
    options = itertools.product(("none", "causal"), (False, True), ({}, LONG))
    for head_dim, head_dim_v, (mask, deterministic, length) in itertools.product(sizes, sizes, options):
        stated = backward("float16", head_dim, head_dim_v, mask, deterministic=deterministic, **length)
        assert tile(choose(stated, DEVICES["sm_90"], "sm90").constants) in met


@needs_nvrtc
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if not some_variants()[kernel].is_accelerated])
def test_ptx_for_a_gpu_that_nvrtc_does_not_know(kernel):
    """A newer GPU gets PTX of the newest architecture known."""
    built = jit.build(kernel, launch.kernel_constants(some_variants()[kernel]), jit.arch_for((99, 0)))
    text = built.cubin.decode()
    assert f".entry {kernel}(" in text and f".target sm_{max(known_archs())}" in text


def accelerated_kernels() -> list[str]:
    return [kernel for kernel in KERNELS if some_variants()[kernel].is_accelerated]


@needs_nvrtc
@pytest.mark.parametrize("kernel", accelerated_kernels())
def test_instructions_of_one_arch_need_its_name(kernel):
    """Portable code has none of them: a kernel that compiled for sm_90 too would need no arch of its own."""
    constants = launch.kernel_constants(some_variants()[kernel])
    assert jit.build(kernel, constants, "sm_90a").registers
    with pytest.raises(RuntimeError, match=f"cannot compile {kernel} for sm_90 "):
        jit.build(kernel, constants, "sm_90")


@needs_nvrtc
@pytest.mark.parametrize(
    "kernel, head_dim",
    [("fwd_sm90", head_dim) for head_dim in (64, 96, 128, 192, 256)]
    + [("bwd_sm90", head_dim) for head_dim in (64, 96, 128)]
    + [("decode_rows_sm90", head_dim) for head_dim in (64, 128, 192, 256)]
    + [(kernel, head_dim) for kernel in WIDE for head_dim in (192, 256)]
    + [("decode_sm90", 512)],
)
def test_registers_that_warpgroups_hand_over_are_those_of_the_launch(kernel, head_dim):
    """A warpgroup that asks for more registers than a block has left waits for ever; a count must be a multiple of 8."""
    call, _, tier = kernel.rpartition("_")
    stated_of = {"fwd": problem, "decode": latent, "decode_rows": functools.partial(decode, rows=64)}
    stated = stated_of.get(call, backward)("bfloat16", head_dim)
    (chosen,) = (made for made in kernels_of(stated, choose(stated, DEVICES["sm_90"], tier)) if made.kernel == kernel)
    constants = launch.kernel_constants(chosen)
    ptx = jit.build(kernel, constants, "compute_90a").cubin.decode()
    changes = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+);", ptx)
    # One warpgroup loads, all others compute: each kind changes its count once.
    assert sorted(change for change, _ in changes) == ["dec", "inc"]
    counts = {change: int(count) for change, count in changes}
    assert all(24 <= count <= 240 and count % 8 == 0 for count in counts.values())
    given = -(-jit.build(kernel, constants, "sm_90a").registers // 8) * 8
    assert counts["dec"] <= given <= counts["inc"]
    warpgroups = chosen.threads // 128
    assert chosen.threads % 128 == 0 and given * chosen.threads <= 65536
    assert counts["dec"] + counts["inc"] * (warpgroups - 1) <= given * warpgroups


# ------------------------------------------------------------------------------------------------------------
# Host and kernel agree


# Of what every kernel checks, and what those with tensor maps do.
LAYOUT = (
    "OFFSET_q",
    "OFFSET_v_strides",
    "OFFSET_window_right",
    "OFFSET_int64_lengths",
    "FWD_PARAMS_BYTES",
    "OFFSET_dout",
    "OFFSET_num_query_tiles",
    "BWD_PARAMS_BYTES",
)
DECODE_LAYOUT = ("OFFSET_k_new", "OFFSET_block_table_stride", "OFFSET_decode_int64_lengths", "DECODE_PARAMS_BYTES")


@needs_nvrtc
@pytest.mark.parametrize(
    "name, kernel",
    [
        *itertools.product(LAYOUT, KERNELS),
        *itertools.product(DECODE_LAYOUT, OF_DECODING),
        ("TENSOR_MAPS_OFFSET", "fwd_sm90"),
        ("BWD_TENSOR_MAPS_OFFSET", "bwd_sm90"),
        ("DECODE_TENSOR_MAPS_OFFSET", "decode_sm90"),
    ],
)
def test_another_params_layout_does_not_compile(kernel, name):
    constants = launch.kernel_constants(some_variants()[kernel])
    with pytest.raises(RuntimeError, match=f"(?s)cannot compile {kernel}.*static"):
        jit.build(kernel, constants | {name: constants[name] + 8}, arch_of_any(kernel))


@needs_nvrtc
@pytest.mark.parametrize("kernel", TIERED)
def test_another_size_of_shared_memory_does_not_compile(kernel):
    chosen = some_variants()[kernel]
    constants = launch.kernel_constants(chosen)
    with pytest.raises(RuntimeError, match="(?s)cannot compile.*config\\w*.py disagrees on shared memory"):
        jit.build(kernel, constants | {"SMEM_BYTES": chosen.smem_bytes + 16}, arch_of_any(kernel))


def test_every_field_of_the_params_is_checked():
    """In the order of the records, so that the lists can be read side by side."""
    text = (jit.kernels_dir() / "attn/params.cuh").read_text()
    checked = [re.findall(r"MEETS\((\w+)\);", part) for part in text.split("#undef MEETS")]
    assert checked == [
        list(launch.FWD_PARAMS.names),
        list(launch.BWD_PARAMS.names[len(launch.FWD_PARAMS.names) :]),
        [],
    ]
    checked = re.findall(r"MEETS\((\w+)\);", (jit.kernels_dir() / "attn/decode.cuh").read_text())
    assert checked == list(launch.DECODE_PARAMS.names[len(launch.FWD_PARAMS.names) :])


def test_tensor_maps_follow_the_params_in_one_order():
    for kernel, params, head_dim, names in (
        ("fwd_sm90.cu", "FwdParams", 64, launch._TENSOR_MAPS[:3]),
        ("attn/bwd_wgmma.cuh", "BwdParams", 64, launch._TENSOR_MAPS),
        ("attn/bwd_wgmma.cuh", "BwdParams", 256, launch._TENSOR_MAPS),
    ):
        maps = re.search(rf"struct TmaParams : {params} \{{ TensorMap ([^;]+); \}};", code_of(kernel))
        assert maps[1].split(", ") == [f"{name}_map" for name in names]
        made = (problem if params == "FwdParams" else backward)("float16", head_dim)
        assert tuple(launch.boxes_of(choose(made, DEVICES["sm_90"]))) == names
    words = re.search(r"struct alignas\(64\) TensorMap \{ u64 words\[(\d+)\]; \};", code_of("ptx/tma.cuh"))
    assert 8 * int(words[1]) == tma.MAP_BYTES
    assert "struct TmaDecodeParams : DecodeParams { TensorMap k_map; };" in code_of("decode_sm90.cu")
    offsets = (launch.TENSOR_MAPS_OFFSET, launch.BWD_TENSOR_MAPS_OFFSET, launch.DECODE_TENSOR_MAPS_OFFSET)
    assert all(offset % 64 == 0 for offset in offsets) and max(offsets) == launch.BWD_TENSOR_MAPS_OFFSET


def test_who_starts_early_waits_before_it_can_end():
    """Else it would end, for those behind it, before the kernel before it has; and that one lets it start."""
    early = [kernel for kernel in KERNELS if config.Kernel(kernel, (), 32, 0).starts_early]
    for kernel in OF_DECODING:
        assert (kernel in early) == kernel.startswith("decode_combine") == ("start_dependents();" not in code_of(f"{kernel}.cu"))
    assert {*early} - {*OF_DECODING} == {"bwd_dkv_sm90", "bwd_dq_sm90"}
    assert all("start_dependents();" in code_of(f"{kernel}.cu") for kernel in ("bwd_delta", "bwd_dkv_sm90"))
    for kernel in early:
        text = code_of(f"{kernel}.cu")
        entry = text[text.index('extern "C"') :]
        before = entry[: entry.index("wait_for_kernel_before();")]
        assert "return" not in before and "start_dependents();" not in before
    # dq of a dense batch waits only at its end.
    lines = [line.strip() for line in code_of("bwd_dq_sm90.cu").split("\n") if line.strip()]
    assert lines[-2:] == ["if (!kVarlen) wait_for_kernel_before();", "}"]


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
        assert re.findall(r'extern "C" __global__ [^{;]*?(\w+)\(const (?:__grid_constant__ )?\w+ \w+\)', code) == [
            Path(name).stem
        ]
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
        == sorted(f"{kernel}.cu" for kernel in some_variants())
    )
    assert set(TIERED) <= set(KERNELS)
