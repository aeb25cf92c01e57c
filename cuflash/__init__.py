"""cuflash: exact, IO-aware attention for NVIDIA GPUs, compiled at first use; NumPy-style functions on any framework's arrays."""

from .attention import attention, attention_varlen
from .decode import attention_with_kvcache, kvcache_workspace_bytes
from .grad import attention_backward, attention_varlen_backward, attention_vjp
from .merge import merge_attention

__version__ = "0.1.0"
__all__ = ["attention", "attention_backward", "attention_varlen", "attention_varlen_backward", "attention_vjp",
           "attention_with_kvcache", "kvcache_workspace_bytes", "merge_attention"]
