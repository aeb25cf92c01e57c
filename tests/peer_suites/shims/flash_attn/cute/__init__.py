"""FlashAttention 4's package name, for its own tests. Their reference, ``flash_attn.cute.testing``, is that of the checkout."""

import os
from pathlib import Path

if checkout := os.environ.get("CUFLASH_PEER_CHECKOUT"):
    __path__.append(str(Path(checkout) / "flash_attn" / "cute"))
