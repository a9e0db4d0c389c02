"""The .tinygpt adapter: load, save and convert tinygpt's models for mlx-lm.

    from mlx_kivi import tinygpt

    model, tokenizer, config = tinygpt.load("model.tinygpt")

The model is an ordinary mlx-lm model: `mlx_lm.generate`, batches, the server and this
package's caches take it as any other. `import mlx_kivi` makes the model type "tinygpt" known, so
that `mlx_lm.load` opens the directories that `convert-tinygpt` writes.
"""

import os
import sys
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..models.learned_positions import PositionTableFull
from . import model as _module
from .config import ModelArgs
from .container import TinyGPTError
from .format import TinyGPTFile, is_tinygpt, write
from .lora import read_lora
from .model import Model, file_tensors
from .tokenizer import ByteDetokenizer, byte_tokenizer, load_tokenizer

__all__ = [
    "ByteDetokenizer",
    "Model",
    "ModelArgs",
    "PositionTableFull",
    "TinyGPTError",
    "TinyGPTFile",
    "byte_tokenizer",
    "is_tinygpt",
    "load",
    "merge_lora",
    "mlx_config",
    "save",
]

# mlx-lm imports mlx_lm.models.<model_type>; it has no other way to add a type without
# running code out of the model's directory.
sys.modules["mlx_lm.models.tinygpt"] = _module


def load(
    path: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    lora: str | os.PathLike[str] | None = None,
    lora_weight: float = 1.0,
) -> tuple[Model, TokenizerWrapper, dict[str, Any]]:
    """Load a .tinygpt file, as `mlx_lm.load(..., return_config=True)` does a directory.

    Args:
        path: the file, in any of the three layouts; weights become float32.
        tokenizer_dir: a directory with a Hugging Face tokenizer, for models that are not
            byte-level. The file's own `tokenizerSource` is never opened.
        lora: a .lora file to merge into the weights.
        lora_weight: what to multiply it with.

    Raises:
        TinyGPTError: the file, the tokenizer directory or the .lora file cannot be used.
    """
    file = TinyGPTFile(path)
    tokenizer = load_tokenizer(file.args, file.path, tokenizer_dir)
    weights = {name: mx.array(array).astype(mx.float32) for name, array in file.weights()}
    loaded = Model(file.args)
    loaded.load_weights(list(loaded.sanitize(weights).items()))
    if lora is not None:
        merge_lora(loaded, lora, lora_weight)
    loaded.eval()
    mx.eval(loaded.parameters())
    return loaded, tokenizer, mlx_config(file)


def merge_lora(model: Model, path: str | os.PathLike[str], weight: float = 1.0) -> None:
    """Add a .lora file's product, times ``weight``, to a model's weights.

    Raises:
        TinyGPTError: the file is not sound, or not made for this model; a quantised model.
    """
    weights = file_tensors(model.args, dict(tree_flatten(model.parameters())))
    if any(name.endswith(".scales") for name in weights):
        raise TinyGPTError(path, "model", "expected unquantised weights to merge into")
    for name, delta in read_lora(path, model.args, weight).items():
        weights[name] = weights[name] + mx.array(delta).astype(weights[name].dtype)
    model.load_weights(list(model.sanitize(weights).items()))


def save(path: str | os.PathLike[str], model: Model, *, dtype: str = "fp32", step: int = 0) -> None:
    """Write a model as a .tinygpt file; `dtype` is "fp32", "fp16" or "int4".

    Raises:
        TinyGPTError: a quantised model, or weights that `dtype` cannot hold.
    """
    weights = file_tensors(model.args, dict(tree_flatten(model.parameters())))
    write(path, model.args.header_config(), weights, dtype=dtype, step=step)


def mlx_config(file: TinyGPTFile) -> dict[str, Any]:
    """The config.json of the model in a file: its arguments, and the header under "tinygpt"."""
    return {
        "model_type": "tinygpt",
        **file.args.header_config(),
        "vocab_size": file.args.vocabSize,
        "eos_token_id": [],
        # Nested, so that no key of an untrusted header means anything to mlx-lm.
        "tinygpt": {
            "weightDtype": file.dtype,
            "step": file.step,
            "config": file.config,
            "header": file.extra,
        },
    }
