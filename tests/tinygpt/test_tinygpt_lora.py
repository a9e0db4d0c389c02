"""LoRA side files: merged as B A x does it, or refused in one line."""

import json
import random
import struct

import mlx.core as mx
import numpy as np
import pytest
from helpers import parameters
from test_tinygpt_mutations import mutate

from mlx_kivi import tinygpt
from mlx_kivi.tinygpt import TinyGPTError

RANK = 3
TARGETS = {  # layer to [out, in]
    "blocks.0.attn.q_proj": (32, 32),
    "blocks.2.mlp.fc_in": (40, 32),
    "blocks.3.mlp.fc_out": (32, 40),
}


def adapter(**changes):
    """A sound header and each target's A and B."""
    rng = np.random.default_rng(3)
    factors = {
        name: (rng.normal(0, 0.3, (i, RANK)), rng.normal(0, 0.3, (RANK, o)))
        for name, (o, i) in TARGETS.items()
    }
    entries = [
        {"name": name, "loraAShape": [i, RANK], "loraBShape": [RANK, o]}
        for name, (o, i) in TARGETS.items()
    ]
    header = {"rank": RANK, "alpha": 6.0, "baseLayers": 4, "entries": entries, **changes}
    return header, factors


def write(path, header, factors, magic=b"TGLA", version=2, cut=None):
    raw = json.dumps(header).encode()
    body = b"".join(m.astype("<f4").tobytes() for pair in factors.values() for m in pair)
    data = magic + struct.pack("<II", version, len(raw)) + raw + body
    path.write_bytes(data[:cut])
    return path


@pytest.mark.parametrize(("alpha", "scale"), [({"alpha": 6.0}, 2.0), ({}, 1.0)])
def test_each_layer_gets_its_low_rank_product(tmp_path, make_file, alpha, scale):
    header, factors = adapter()
    del header["alpha"]
    path = write(tmp_path / "a.lora", {**header, **alpha}, factors)
    base, _, _ = tinygpt.load(make_file())
    merged, _, _ = tinygpt.load(make_file(), lora=path, lora_weight=0.5)
    before, after = parameters(base), parameters(merged)
    for name in before:
        a, b = factors.get(name.removesuffix(".weight"), (None, None))
        if a is None or not name.endswith(".weight"):
            assert mx.array_equal(before[name], after[name])
        else:
            wanted = np.array(before[name]) + 0.5 * scale * (a @ b).T
            np.testing.assert_allclose(np.array(after[name]), wanted, atol=1e-6)


def test_an_adapter_for_an_expert_is_merged(tmp_path, make_file):
    config = {"layers": 1, "dModel": 8, "ctx": 8, "heads": 2, "dMlp": 6, "nExperts": 2}
    name = "blocks.0.moe.experts.1.fc_in"
    entries = [{"name": name, "loraAShape": [8, 1], "loraBShape": [1, 6]}]
    a, b = np.ones((8, 1)), np.arange(6.0)[None]
    path = write(tmp_path / "a.lora", {"rank": 1, "entries": entries}, {name: (a, b)})
    base, _, _ = tinygpt.load(make_file(config))
    merged, _, _ = tinygpt.load(make_file(config), lora=path)
    change = merged.blocks[0].moe.experts.fc1.weight - base.blocks[0].moe.experts.fc1.weight
    np.testing.assert_allclose(np.array(change[1]), (a @ b).T, atol=1e-5)
    assert mx.abs(change[0]).max().item() == 0


def _entry(**changes):
    header, _ = adapter()
    entries = [{**header["entries"][0], **changes}, *header["entries"][1:]]
    return {"entries": entries}


BAD = {
    "rank": {"rank": 0},
    "rank not a number": {"rank": "3"},
    "alpha": {"alpha": "6"},
    "alpha beyond any float": {"alpha": 10**400},
    "alpha no number": {"alpha": float("nan")},
    "base": {"baseLayers": 12},
    "entries": {"entries": {}},
    "unknown layer": _entry(name="blocks.9.attn.q_proj"),
    "embedding": _entry(name="token_embedding"),
    "norm": _entry(name="blocks.0.ln1"),
    "no name": _entry(name=["x"]),
    "same layer twice": _entry(name="blocks.3.mlp.fc_out", loraAShape=[40, 3]),
    "A": _entry(loraAShape=[RANK, 32]),
    "B": _entry(loraBShape=[RANK, 2**60]),
    "DoRA": _entry(loraMShape=[32]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_adapter_gives_one_line(tmp_path, make_file, case):
    path = write(tmp_path / "a.lora", *adapter(**BAD[case]))
    with pytest.raises(TinyGPTError) as error:
        tinygpt.load(make_file(), lora=path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"magic": b"TGPT"}, "magic: expected b'TGLA'"),
        ({"version": 3}, "version: expected 1 or 2"),
        ({"cut": -4}, "body: expected"),
        ({"cut": 20}, "header length"),
    ],
)
def test_a_broken_adapter_file_gives_one_line(tmp_path, make_file, how, message):
    path = write(tmp_path / "a.lora", *adapter(), **how)
    with pytest.raises(TinyGPTError, match=message):
        tinygpt.load(make_file(), lora=path)


def test_a_damaged_adapter_merges_soundly_or_gives_one_line(tmp_path, make_file):
    model = make_file()
    path = write(tmp_path / "a.lora", *adapter())
    raw, refused = path.read_bytes(), 0
    for seed in range(200):
        path.write_bytes(mutate(random.Random(seed), raw))
        try:
            merged, _, _ = tinygpt.load(model, lora=path)
        except TinyGPTError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            refused += 1
        else:
            assert all(mx.isfinite(array).all() for array in parameters(merged).values())
    assert 100 < refused < 200


def test_factors_and_weight_must_be_finite(tmp_path, make_file):
    header, factors = adapter()
    with pytest.raises(TinyGPTError, match="weight: expected a finite"):
        path = write(tmp_path / "a.lora", header, factors)
        tinygpt.load(make_file(), lora=path, lora_weight=float("nan"))
    factors["blocks.2.mlp.fc_in"][0][0, 0] = np.nan
    path = write(tmp_path / "a.lora", header, factors)
    with pytest.raises(TinyGPTError, match="blocks.2.mlp.fc_in.weight: expected finite"):
        tinygpt.load(make_file(), lora=path)
