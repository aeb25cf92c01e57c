"""FlashAttention 3's module name, for its own tests: what is computed is cuflash."""

from cuflash.compat.flash_attn_interface import *  # noqa: F403
