"""Small seeded .tinygpt models, one for every switch of the header, and the shared golden files."""

import json
import math

import numpy as np
import pytest

from mlx_kivi.tinygpt.config import ModelArgs, tensors
from mlx_kivi.tinygpt.format import write

BASE = {"layers": 4, "dModel": 32, "ctx": 48, "heads": 4, "dMlp": 40}
SWITCHES = {
    "plain": {},
    "moe_top1": {"nExperts": 3, "moeTopK": 1},
    "moe_top2": {"nExperts": 4, "moeTopK": 2},
    "mod": {"useMoD": True},
    "differential": {"useDifferentialAttention": True},
    "yoco": {"useYOCO": True},
    "yoco_one_block": {"useYOCO": True, "layers": 1},
    "deep_norm": {"useDeepNorm": True},
    "embedding_norm": {"useEmbeddingRMSNorm": True},
    "window": {"slidingWindow": 5},
    "window_one": {"slidingWindow": 1},
    "all_with_yoco": {
        "nExperts": 3,
        "moeTopK": 2,
        "useMoD": True,
        "useYOCO": True,
        "useDeepNorm": True,
        "useEmbeddingRMSNorm": True,
        "slidingWindow": 7,
    },
    "all_with_differential": {
        "nExperts": 3,
        "useMoD": True,
        "useDifferentialAttention": True,
        "useDeepNorm": True,
        "useEmbeddingRMSNorm": True,
        "slidingWindow": 6,
    },
}


@pytest.fixture(params=SWITCHES.values(), ids=SWITCHES.keys())
def config(request):
    """The header config of a small model with one switch on, or many."""
    return {**BASE, **request.param}


def random_weights(config, seed=0, unused=False):
    """Seeded float32 weights by file name; `unused` adds the tensors the forward skips."""
    rng = np.random.default_rng(seed)
    weights = {}
    for tensor in tensors(ModelArgs.from_dict(config)):
        if tensor.used or unused:
            scale = 1 / math.sqrt(tensor.shape[-1]) if len(tensor.shape) == 2 else 0.3
            array = rng.normal(0, scale, tensor.shape)
            if "ln" in tensor.name and tensor.name.endswith("weight"):
                array += 1
            weights[tensor.name] = np.asarray(array, np.float32)
    return weights


@pytest.fixture
def make_weights():
    return random_weights


@pytest.fixture
def make_file(tmp_path):
    """Write a seeded model and give its path."""

    def make(config=None, dtype="fp32", seed=0, unused=False, name="model.tinygpt"):
        config = config if config is not None else BASE
        path = tmp_path / name
        write(path, config, random_weights(config, seed, unused), dtype=dtype, step=7)
        return path

    return make


@pytest.fixture(scope="session")
def shared_models(shared):
    """The directory of the shared model in three layouts, and its engine's outputs."""
    root = shared / "data" / "tinygpt"
    return root, json.loads((root / "golden.json").read_text())
