"""Fixtures, and what hypothesis does: with CI=true the same examples in every run."""

import os
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import settings
from mlx_lm.models.llama import Model, ModelArgs

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile(
    "mlx_kivi", max_examples=25, deadline=None, derandomize=os.environ.get("CI") == "true"
)
settings.load_profile("mlx_kivi")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct: MLX_KIVI_MODEL, or where `make model` puts it."""
    named = os.environ.get("MLX_KIVI_MODEL")
    path = Path(named) if named else ROOT / "models" / "SmolLM2-135M-Instruct"
    if not (path / "config.json").is_file():
        if named:
            pytest.fail(f"MLX_KIVI_MODEL={named}: no model there (no config.json)")
        pytest.skip("needs the real SmolLM2 model: run `make model`")
    return path


@pytest.fixture(autouse=True)
def _model_for_marked_tests(request: pytest.FixtureRequest) -> None:
    """Let a test marked `model` skip without the model, even if it never asks for its path."""
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("smollm2")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of design documents and data beside the repository."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the shared data in ../shared, beside the repository")
    return path


@pytest.fixture(scope="session")
def tiny_llama() -> Model:
    """A random llama: 2 layers, 4 heads of 32 on 2 KV heads, vocabulary of 97. Do not change it.

    The heads are wider than hidden / heads = 16, because the smallest quantisation group is 32.
    """
    mx.random.seed(0)
    args = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 97,
        "tie_word_embeddings": False,
    }
    model = Model(ModelArgs.from_dict(args))
    mx.eval(model.parameters())
    return model
