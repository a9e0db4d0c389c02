"""What runs in place of functions of mlx_lm while our caches are in use, whoever made them.

The list is handed down to `hooks.attention`, which installs it. A replacement's code runs with
mlx_lm's globals, so each imports the function that does the work.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import base, gpt2, gpt_bigcode
from mlx_lm.models import cache as caches
from packaging.version import Version

from .. import hooks
from ..cache.attention import CacheHandle, attend_causal
from ..hooks import Hook, UnsupportedError
from ..models.latent_caches import LatentCache
from ..quantized_streaming_cache import QuantizedStreamingCache
from . import speculation

# Before it, numbers on Metal are wrong in silence: dequantize of a slice that is not contiguous
# (mlx#4370), quantized_matmul(transpose=False) over 1,024 rows or more (mlx#4250, #3480, #4201).
_OLDEST_MLX = "0.32.2"


def _check_mlx() -> None:
    """Refuse an mlx that is too old; a development build counts as its release.

    Raises:
        UnsupportedError: names the version found and the mend.
    """
    found: str = getattr(mx, "__version__")  # which mlx's stubs leave out
    if Version(found).release < Version(_OLDEST_MLX).release:
        raise UnsupportedError(
            f"mlx {found} computes packed attention wrong: install mlx {_OLDEST_MLX} or "
            "newer (pip install -U mlx)"
        )


def _replacements() -> tuple[dict[str, Hook], list[tuple[Any, str, Any]]]:
    _check_mlx()

    def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
        from mlx_kivi.upstream.replacements import dispatch_attention

        return dispatch_attention(queries, keys, values, cache, scale, mask, sinks)

    def trim_prompt_cache(cache, num_tokens):
        from mlx_kivi.upstream.replacements import dispatch_trim

        return dispatch_trim(cache, num_tokens)

    def save_prompt_cache(file_name, cache, metadata):
        from mlx_kivi.upstream.prompt_file import dispatch_save

        return dispatch_save(file_name, cache, metadata)

    def load_prompt_cache(file_name, return_metadata):
        from mlx_kivi.upstream.prompt_file import dispatch_load

        return dispatch_load(file_name, return_metadata)

    def __call__(self, inputs, cache=None):
        from mlx_kivi.models.learned_positions import dispatch_call

        return dispatch_call(self, inputs, cache)

    found = {
        "scaled_dot_product_attention": Hook(
            base.scaled_dot_product_attention, scaled_dot_product_attention
        ),
        "trim_prompt_cache": Hook(caches.trim_prompt_cache, trim_prompt_cache),
        "save_prompt_cache": Hook(caches.save_prompt_cache, save_prompt_cache),
        "load_prompt_cache": Hook(caches.load_prompt_cache, load_prompt_cache),
        "speculative_generate_step": speculation.hook(),
        # They would read beyond the end of their tables of positions.
        **{m.__name__: Hook(m.Model.__call__, __call__) for m in (gpt2, gpt_bigcode)},
    }
    # CacheList looks its members' classes up by name in its module.
    members = QuantizedStreamingCache, LatentCache
    return found, [(caches, member.__name__, member) for member in members]


hooks.attention.make = _replacements


def dispatch_attention(queries, keys, values, cache, scale, mask, sinks):
    """`scaled_dot_product_attention`: ours for our caches, mlx_lm's for everything else."""
    if isinstance(keys, CacheHandle):
        return keys.attend(queries, scale, mask, sinks)
    # What is neither packed nor bounded is computed as mlx_lm computes it, to the last bit.
    ours = isinstance(cache, QuantizedStreamingCache) and not cache.plan.keeps_all
    if ours and isinstance(mask, str):
        return attend_causal(queries, keys, values, scale, sinks)
    original = hooks.attention.original("scaled_dot_product_attention")
    return original(queries, keys, values, cache, scale, mask, sinks)


def dispatch_trim(cache: list[Any], num_tokens: int) -> int:
    """`trim_prompt_cache` that trims bounded caches within the margin that they keep."""
    if not cache or not all(can_trim(c, num_tokens) for c in cache):
        return 0
    trimmed = [c.trim(num_tokens) for c in cache]
    return trimmed[0]


def can_trim(cache: Any, n: int) -> bool:
    """Whether the last n tokens of a cache, ours or mlx_lm's, can be taken back."""
    if isinstance(cache, QuantizedStreamingCache):
        return cache.can_trim(min(n, cache.offset))
    if hasattr(cache, "caches"):
        return all(can_trim(c, n) for c in cache.caches)
    if isinstance(cache, caches.ChunkedKVCache):
        # The next token sees its chunk from the start, of which the front may be gone.
        target = max(0, cache.offset - n)
        return cache.start_position <= target - target % cache.chunk_size
    return cache.is_trimmable()
