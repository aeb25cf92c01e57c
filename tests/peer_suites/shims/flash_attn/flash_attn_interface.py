"""What FlashAttention 2's tests import of its internals."""

from cuflash.compat.flash_attn import *  # noqa: F403

USE_TRITON_ROCM = False


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """Only says in what blocks of keys a test may sum; any will do."""
    return 128
