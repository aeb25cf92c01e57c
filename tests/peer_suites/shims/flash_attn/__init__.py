"""FlashAttention 2's package name, for its own tests: what is computed is cuflash."""

from cuflash.compat.flash_attn import *  # noqa: F403
