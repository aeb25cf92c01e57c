"""What every config is made of: the device, the constants that all kernels share, the kernel with its constants."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import ITEMSIZE
from .problem import Problem


@dataclass(frozen=True)
class Device:
    """What the choice depends on: compute capability, shared memory a block may opt in to (bytes), L2 size (bytes)."""

    compute_capability: tuple[int, int]
    smem_optin: int
    l2_bytes: int
    num_sms: int
    name: str


def _preset(major, minor, smem_kib, l2_mib, num_sms, name):
    return Device((major, minor), smem_kib * 1024, l2_mib * 2**20, num_sms, name)


# One well-known GPU of each architecture, for `explain`, `warmup` and tests without a GPU.
DEVICES = {
    "sm_60": _preset(6, 0, 48, 4, 56, "Tesla P100"),
    "sm_61": _preset(6, 1, 48, 2, 20, "GeForce GTX 1080"),
    "sm_70": _preset(7, 0, 96, 6, 80, "Tesla V100"),
    "sm_75": _preset(7, 5, 64, 4, 40, "Tesla T4"),
    "sm_80": _preset(8, 0, 163, 40, 108, "A100"),
    "sm_86": _preset(8, 6, 99, 6, 82, "GeForce RTX 3090"),
    "sm_89": _preset(8, 9, 99, 72, 128, "GeForce RTX 4090"),
    "sm_90": _preset(9, 0, 227, 50, 132, "H100/H200"),
    "sm_100": _preset(10, 0, 227, 126, 148, "B200"),
    "sm_120": _preset(12, 0, 99, 96, 170, "GeForce RTX 5090"),
}


_START_EARLY = ("decode_combine", "decode_combine_wide", "bwd_dkv_sm90", "bwd_dq_sm90")


@dataclass(frozen=True)
class Kernel:
    """A kernel, the constants that become its ``-D`` macros, and its blocks: threads, bytes of dynamic shared memory."""

    kernel: str
    constants: tuple[tuple[str, int], ...]
    threads: int
    smem_bytes: int

    @property
    def starts_early(self) -> bool:
        """Whether it waits by itself for the kernel before it and so may start while that one ends."""
        return self.kernel in _START_EARLY

    @property
    def is_accelerated(self) -> bool:
        """Whether it has instructions of one architecture alone (sm_90a)."""
        return self.kernel.endswith("sm90")


@dataclass(frozen=True)
class Config(Kernel):
    """The kernel that computes a problem. ``reasons`` say why each number is what it is.

    ``max_blocks``: its blocks take one tile after the other and are no more than these; 0: a block for each tile.
    ``counts_tiles``: they take the next one by a counter. ``dq_block_m``: query rows of a tile of the kernel that computes dq
    from the start, beside this one; 0: this one adds it up. ``short_tiles_last``: under a right mask the shorter half of the
    tiles of a head comes behind those of all heads, not with its group; of a packed batch those with the last quarter of the
    work. Blocks that take a tile when they are nearly free hardly need such filling.
    """

    tier: str
    block_m: int
    block_n: int
    heads_in_group: int
    reasons: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()
    max_blocks: int = 0
    counts_tiles: bool = False
    dq_block_m: int = 0
    short_tiles_last: bool = True


DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
BLOCK_RESERVED_SMEM = 1024          # the driver takes this much of every block
DQ_GROUP = 16                       # rows of dq_sum that lie together: kernels/attn/gradient.cuh
LIST_HEADER, LISTED_WORDS = 4, 8    # words of a list of tiles and of each tile in it: kernels/attn/schedule.cuh
SIMT_HEAD_DIMS = (32, 64, 96, 128, 192, 256)        # few, since each is a kernel; warps share their columns evenly


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def not_16_bit(problem: Problem) -> str | None:
    """Why tensor cores do not take the problem's dtype; None if they do."""
    if problem.dtype in ("float16", "bfloat16"):
        return None
    return f"tensor cores take float16 and bfloat16; {problem.dtype} would be rounded"


def no_tensor_cores(problem: Problem, device: Device) -> str | None:
    """Why the device's warps have no tensor cores for the problem's dtype, one of 16 bits; None if they have."""
    if device.compute_capability < (7, 5):
        return "needs compute capability 7.5 or newer (ldmatrix, mma.sync)"
    if device.compute_capability < (8, 0) and problem.dtype == "bfloat16":
        return "bfloat16 tensor cores need compute capability 8.0 or newer"
    return None


def not_hopper(device: Device) -> str | None:
    """Why the device has no wgmma; None if it has."""
    return None if device.compute_capability == (9, 0) else "needs compute capability 9.0 (wgmma, TMA)"


def not_by_tma(problem: Problem, arrays: str) -> str | None:
    """Why TMA does not load ``arrays``; None if it does."""
    if problem.tma:
        return None
    return (f"TMA cannot address {arrays}: their addresses and strides must be multiples of 16 bytes, and strides neither "
            "negative nor 1 TiB or more")


def no_tile(problem: Problem, device: Device) -> str:
    return (f"no tile for head_dim {problem.head_dim} and {problem.head_dim_v} fits the {device.smem_optin} bytes of shared "
            "memory that a block may have")


def panel_of(head_dim: int) -> int:
    """Columns of a panel of a padded head: kPanel of PanelLayout in kernels/tile/layout.cuh."""
    return 64 if head_dim % 64 == 0 else 32


def _score_kind(problem: Problem) -> int:
    """kScoreFolded, kScoreScaled or kScoreSoftcap of kernels/attn/score.cuh."""
    if problem.softcap:
        return 2
    if problem.dtype == "float64":
        return 1                # the largest exponent is then 0 to the last bit, and P of it exactly 1
    return 0 if problem.softmax_scale > 1e-30 else 1        # below, a float32 scale nears its subnormals


def shared_constants(problem: Problem) -> dict[str, int]:
    return {
        "DTYPE": DTYPE_CODES[problem.dtype],
        "MASK_LEFT": int(problem.window_left is not None),
        "MASK_RIGHT": int(problem.window_right is not None),
        "SCORE": _score_kind(problem),
        "VARLEN": int(problem.varlen),
    }


def vec_bytes(alignment: int, dtype: str, *sizes: int) -> int:
    """The widest access that the alignment allows and that ends with a row of each of ``sizes`` elements."""
    return min(alignment, *((size * ITEMSIZE[dtype]) & -(size * ITEMSIZE[dtype]) for size in sizes))


def heads_in_wave(device: Device, tiles: int, few: int, all_heads: int, *, together: int = 1, tiles_each: int = 1,
                  power_of_two: bool = False) -> tuple[int, str]:
    """How many (batch, head) pairs run together where blocks stay on their multiprocessors, and why.

    ``tiles`` of a head that come with those of its group; as many heads as have ``tiles_each`` for each multiprocessor, so that
    the tiles of a head read what they share at one time. ``few``: at least so many, as few long heads have tiles of different
    lengths, which soon read different things; ``together``: whole groups of so many; ``power_of_two``: of them.
    """
    heads = round_up(max(tiles_each * device.num_sms // max(1, tiles), few), together)
    what = f"with {tiles} tiles each: {tiles_each} for each multiprocessor, but at least {few} heads"
    if power_of_two and heads < all_heads:      # other numbers were up to a tenth slower: docs/fwd_sm90.md, docs/bwd_sm90.md
        heads = 2 ** ((heads // together).bit_length() - 1) * together
        what += ", and a power of two" + (f" of groups of {together}" if together > 1 else "")
    heads = min(heads, all_heads)
    return heads, f"heads_in_group = {heads}  # {what}"
