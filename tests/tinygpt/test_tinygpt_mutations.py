"""Damaged files: each loads with finite weights or gives one TinyGPTError, in bounded memory."""

import json
import math
import random
import re
import struct
import tracemalloc

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_kivi import tinygpt
from mlx_kivi.tinygpt import TinyGPTError

SMALL = {"layers": 2, "dModel": 8, "ctx": 6, "heads": 2, "dMlp": 12}
MODELS = {
    "plain": SMALL,
    "yoco": {**SMALL, "useYOCO": True, "nExperts": 2, "useMoD": True, "slidingWindow": 3},
    "differential": {**SMALL, "useDifferentialAttention": True, "useEmbeddingRMSNorm": True},
}
NASTY = [
    *(None, True, False, "", "x\n\0\ud800", [], {}, [[]], -1, 0, 1, 3, 64, 255, 0.5, 1e300),
    *(2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**400, "fp16", "int4", "fp32"),
    *([256, 8], [8, 256], [2**31, 2**31], [-1, -1], [0], [True], ["8"], "../../etc/passwd"),
]
NASTY_JSON = [b"NaN", b"-Infinity", b"1e999", b"-0", b"1.0", b"null", b"[" * 5000, b"9" * 5000]


def _places(value):
    """Every (container, key) in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _mutate_json(rng, raw):
    header = json.loads(raw)
    keys = [*header.get("config", header), "floatOffset", "shape"]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place, key = rng.choice(list(_places(header)))
        action = rng.random()
        if action < 0.6:
            place[key] = rng.choice(NASTY)
        elif action < 0.75:
            del place[key]
        elif isinstance(place, list):
            place.insert(rng.randrange(len(place) + 1), place[key])
        else:
            place[rng.choice(keys)] = place[key]
    return json.dumps(header).encode()


def _mutate_text(rng, raw):
    number = rng.choice(list(re.finditer(rb"-?\d+|true|false", raw)))
    return raw[: number.start()] + rng.choice(NASTY_JSON) + raw[number.end() :]


def _mutate_bytes(rng, raw, first, last):
    raw = bytearray(raw)
    for _ in range(rng.choice([1, 2, 16])):
        position = rng.randrange(first, last)
        raw[position] = rng.choice([raw[position] ^ 1 << rng.randrange(8), 0, 255])
    return bytes(raw)


def mutate(rng, raw):
    """One seeded way to damage a file."""
    (length,) = struct.unpack_from("<I", raw, 8)
    header, body = raw[12 : 12 + length], raw[12 + length :]
    kind = rng.randrange(8)
    if kind == 0:
        return raw[: rng.randrange(len(raw))]
    if kind == 1:
        start = rng.randrange(len(raw))
        return raw[:start] + raw[start + rng.randrange(1, 65) :]
    if kind == 2:
        start = rng.randrange(len(raw))
        return raw[:start] + rng.randbytes(rng.randrange(1, 65)) + raw[start:]
    if kind == 3:
        return _mutate_bytes(rng, raw, 0, 12 + rng.randrange(1, length))
    if kind == 4:
        return _mutate_bytes(rng, raw, 12 + length, len(raw))
    if kind == 5:
        claimed = rng.choice([0, 1, length - 1, length + 1, len(raw), 2**31, 2**32 - 1])
        return raw[:8] + struct.pack("<I", claimed) + raw[12:]
    header = _mutate_json(rng, header) if kind == 6 else _mutate_text(rng, header)
    return raw[:8] + struct.pack("<I", len(header)) + header + body


def attempt(path):
    """Load a file: the error's text, or None. Anything amiss raises."""
    tracemalloc.start()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    try:
        model, _, _ = tinygpt.load(path)
    except TinyGPTError as error:
        assert "\n" not in str(error) and len(str(error)) < 600, str(error)
        return str(error)
    else:
        for name, array in tree_flatten(model.parameters()):
            assert math.isfinite(mx.abs(array).max().item()), name
        return None
    finally:
        limit = 4_000_000 + 40 * path.stat().st_size  # the files have about 100 KB
        peak, arrays = tracemalloc.get_traced_memory()[1], mx.get_peak_memory() - before
        tracemalloc.stop()
        assert peak < limit, f"{peak} bytes of Python memory"
        assert arrays < limit, f"{arrays} bytes of arrays"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_file_loads_soundly_or_gives_one_error(make_file, tmp_path, name, dtype):
    sound = make_file(MODELS[name], dtype=dtype)
    assert attempt(sound) is None
    raw = sound.read_bytes()
    path = tmp_path / "damaged.tinygpt"
    outcomes = []
    for seed in range(40):
        path.write_bytes(mutate(random.Random(f"{name} {dtype} {seed}"), raw))
        try:
            outcomes.append(attempt(path))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert len(refused) > 20 and len(set(refused)) > 10
