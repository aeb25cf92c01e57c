"""cuflash: exact, IO-aware attention for NVIDIA GPUs, compiled at first use; NumPy-style functions on any framework's arrays."""

from .attention import attention

__version__ = "0.1.0"
__all__ = ["attention"]
