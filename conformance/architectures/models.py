"""One tiny random model for each module of `mlx_lm.models`.

configs.json holds the settings of mlx-lm's own tests where it has any, cut to as few layers as
show each kind of cache, with trained windows of 68 tokens: the least that is packed, roughly.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache

from . import stand_ins

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "configs.json").read_text()
)
MLX_LM = version("mlx-lm")


# Up to mlx-lm 0.31 these mask a prompt's later chunks without asking their caches.
_MASKED_BLINDLY = {"minicpm3", "phixtral"}


def names() -> list[str]:
    """The modules that we have settings for and that the installed mlx-lm has."""
    installed = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    return [name for name in CONFIGS if name in installed]


def bounded() -> list[str]:
    """Those of them that a window can be put on."""
    old = not hasattr(KVCache, "keys_and_values")
    return [name for name in names() if not (old and name in _MASKED_BLINDLY)]


@lru_cache(maxsize=2)
def build(name: str) -> Any:
    """The model of module ``name``, always with the same weights."""
    return build_from(name, CONFIGS[name])


def build_from(name: str, config: dict[str, Any]) -> Any:
    """A model of module ``name`` with other settings."""
    stand_ins.put_in(name)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    if name == "phi3small":
        stand_ins.allow_all_tokens(model)
    # Quantised matrices in half precision take a CPU 80 times as long.
    model.apply(lambda x: x.astype(mx.float32) if x.dtype == mx.float16 else x)
    _fill(model)
    mx.eval(model.parameters())
    return model


def _fill(model: Any) -> None:
    """Random numbers for matrices that start as zeros: they would hide what attention returns."""
    filled = []
    for path, x in tree_flatten(model.parameters()):
        if x.ndim < 2 or x.any():
            continue
        if mx.issubdtype(x.dtype, mx.integer):
            x = mx.random.randint(0, min(2 ** (8 * x.dtype.size), 2**31), x.shape, x.dtype)
        else:
            x = mx.random.normal(x.shape, x.dtype, scale=0.1)
        filled.append((path, x))
    model.update(tree_unflatten(filled))
