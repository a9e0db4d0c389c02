"""Packed, bounded KV caches for mlx-lm: KIVI quantisation and StreamingLLM, together."""

from . import tinygpt  # noqa: F401 - makes its model type known to mlx_lm.load
from .config import KVCacheConfig
from .models.factory import calibrate, make_prompt_cache
from .patch import patch, patched, unpatch
from .quantized_streaming_cache import QuantizedStreamingCache
from .report import describe
from .upstream.prompt_file import load_prompt_cache, save_prompt_cache

__version__ = "0.2.0"

__all__ = [
    "KVCacheConfig",
    "QuantizedStreamingCache",
    "calibrate",
    "describe",
    "load_prompt_cache",
    "make_prompt_cache",
    "patch",
    "patched",
    "save_prompt_cache",
    "unpatch",
]
