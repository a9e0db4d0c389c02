"""Run test files of mlx-lm's own with a tiny stand-in for the model that they download.

``python -m conformance.contract.upstream DIRECTORY [PRESET]`` prints, as one line of JSON, what
became of each test in the directory's test_prompt_cache.py and test_generate.py; with the name of
a preset ("none" is full precision), under `mlx_kivi.patch`.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import unittest
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.models.qwen2 import Model, ModelArgs

import mlx_kivi
from mlx_kivi import KVCacheConfig

from .tokenizers import wrapped

FILES = ("test_prompt_cache", "test_generate")


def load(*_: Any, **__: Any) -> tuple[Model, Any]:
    """A random Qwen2, as the tests' own model is, for the byte tokenizer's 257 tokens."""
    mx.random.seed(0)
    args = {
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 257,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    model = Model(ModelArgs.from_dict(args))
    mx.eval(model.parameters())
    return model, wrapped()


class Outcomes(unittest.TextTestResult):
    """Which tests passed, and how the others ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.ended[test.id()] = "passed"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.ended[test.id()] = f"skipped: {reason}"

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.ended[test.id()] = f"{err[0].__name__}: {err[1]}"[:300]

    addFailure = addError


def main() -> None:
    directory, *mode = sys.argv[1:]
    mlx_lm.utils.load = load
    sys.path.insert(0, directory)
    if mode:
        mlx_kivi.patch(KVCacheConfig.from_name(mode[0]))
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(
        loader.loadTestsFromModule(importlib.import_module(name)) for name in FILES
    )
    result = unittest.TextTestRunner(stream=io.StringIO(), resultclass=Outcomes).run(suite)
    print(json.dumps(result.ended), flush=True)
    os._exit(0)  # a test leaves a thread behind that aborts the interpreter's own exit


if __name__ == "__main__":
    main()
