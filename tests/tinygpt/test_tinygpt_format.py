"""Bytes of the three layouts against files built by hand, and what is refused."""

import json
import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kivi.tinygpt import TinyGPTError, TinyGPTFile, is_tinygpt
from mlx_kivi.tinygpt.config import ModelArgs, tensors
from mlx_kivi.tinygpt.container import MAX_HEADER
from mlx_kivi.tinygpt.format import write

SMALL = {"layers": 1, "dModel": 4, "ctx": 3, "heads": 2, "dMlp": 6, "vocabSize": 5}


def manifest_of(config):
    return [
        {"name": t.name, "shape": list(t.shape)}
        for t in tensors(ModelArgs.from_dict(config))
        if t.used
    ]


def pack(header, body, step=0, magic=b"TGPT", version=2):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return magic + struct.pack("<II", version, len(raw)) + raw + struct.pack("<i", step) + body


def stored(name, array):
    """The elements of a tensor in the order the format page gives for its bytes."""
    if array.ndim == 2 and name not in ("token_embedding.weight", "position_embedding.weight"):
        outputs, inputs = array.shape
        return [array[o, i] for i in range(inputs) for o in range(outputs)]
    return list(array.reshape(-1))


def sound_header(**changes):
    return {"config": dict(SMALL), "manifest": manifest_of(SMALL), **changes}


def body_size(header, bytes_each=12):
    return bytes_each * sum(int(np.prod(e["shape"])) for e in header["manifest"])


def test_fp32_triplets_are_read_as_the_format_page_says(tmp_path, make_weights):
    weights = make_weights(SMALL)
    body = b""
    for entry in manifest_of(SMALL):
        values = stored(entry["name"], weights[entry["name"]])
        body += struct.pack(f"<{len(values)}f", *values)
        body += struct.pack(f"<{2 * len(values)}f", *[np.nan] * 2 * len(values))  # never read
    path = tmp_path / "m.tinygpt"
    path.write_bytes(pack(sound_header(finalLoss={"val": None}), body, step=-3))
    file = TinyGPTFile(path)
    assert (file.dtype, file.step, file.extra) == ("fp32", -3, {"finalLoss": {"val": None}})
    for name, array in file.weights():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, weights[name])


def test_fp16_tensors_are_found_by_their_offsets(tmp_path, make_weights):
    weights = {name: w.astype(np.float16) for name, w in make_weights(SMALL).items()}
    manifest = manifest_of(SMALL)
    body, offset = b"", 0
    for entry in reversed(manifest):  # stored in another order than listed
        values = stored(entry["name"], weights[entry["name"]])
        entry["floatOffset"] = offset
        offset += len(values)
        body += struct.pack(f"<{len(values)}e", *values)
    path = tmp_path / "m.tinygpt"
    path.write_bytes(pack(sound_header(manifest=manifest, includesOptimizerState=False), body))
    file = TinyGPTFile(path)
    assert file.dtype == "fp16"
    for name, array in file.weights():
        assert array.dtype == np.float16
        np.testing.assert_array_equal(array, weights[name])


def test_int4_nibbles_and_scales_are_read_as_the_format_page_says(tmp_path):
    rng = np.random.default_rng(0)
    scales, nibbles, expected = b"", b"", {}
    for entry in manifest_of(SMALL):
        size = int(np.prod(entry["shape"]))
        flat = []
        for first in range(0, size, 64):
            scale = np.float16(rng.uniform(0.01, 1))
            block = rng.integers(0, 16, 64).tolist()
            scales += struct.pack("<e", scale)
            nibbles += bytes(block[i] | block[i + 1] << 4 for i in range(0, 64, 2))
            flat += [(n - 8) * np.float32(scale) for n in block][: size - first]
        expected[entry["name"]] = flat
    path = tmp_path / "m.tinygpt"
    path.write_bytes(pack(sound_header(weightDtype="int4"), scales + nibbles))
    for name, array in TinyGPTFile(path).weights():
        np.testing.assert_array_equal(stored(name, array), np.array(expected[name], np.float32))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
def test_written_weights_are_read_back(config, dtype, tmp_path, make_weights):
    weights = make_weights(config, unused=True)
    path = tmp_path / "m.tinygpt"
    write(path, config, weights, dtype=dtype, step=5, extra={"savedAt": "today"})
    file = TinyGPTFile(path)
    assert (file.dtype, file.step, file.extra) == (dtype, 5, {"savedAt": "today"})
    read = dict(file.weights())
    assert read.keys() == weights.keys()
    for name, array in read.items():
        assert array.shape == weights[name].shape
        if dtype == "int4":  # half a step of max / 7, and the scale's rounding to fp16
            limit = np.abs(weights[name]).max() / 7 * 0.51
            assert np.abs(array - weights[name]).max() <= limit
        else:
            wanted = weights[name].astype(np.float16 if dtype == "fp16" else np.float32)
            assert array.tobytes() == wanted.tobytes()
    again = tmp_path / "again.tinygpt"
    write(again, config, read, dtype=dtype, step=5, extra={"savedAt": "today"})
    assert again.read_bytes() == path.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again.tinygpt", "m.tinygpt"]


@pytest.mark.parametrize("source", ["fp32", "fp16", "int4"])
def test_rewriting_the_engines_files_gives_their_bodies(shared_models, tmp_path, source):
    root, _ = shared_models
    original = root / f"shakespeare-3l-{source}.tinygpt"
    file = TinyGPTFile(original)
    copy = tmp_path / "m.tinygpt"
    write(copy, file.config, dict(file.weights()), dtype=source, step=file.step, extra=file.extra)
    size = {"fp32": 4434048, "fp16": 739008, "int4": 196792}[source]
    assert copy.read_bytes()[-size - 4 :] == original.read_bytes()[-size - 4 :]


def test_int4_is_quantised_as_the_engines_converter_does(shared_models, tmp_path):
    root, _ = shared_models
    file = TinyGPTFile(root / "shakespeare-3l-fp16.tinygpt")
    write(tmp_path / "m.tinygpt", file.config, dict(file.weights()), dtype="int4")
    wanted = (root / "shakespeare-3l-int4.tinygpt").read_bytes()
    assert (tmp_path / "m.tinygpt").read_bytes()[-196792:] == wanted[-196792:]


def test_reading_never_holds_more_than_a_few_tensors(tmp_path, make_weights):
    config = {**SMALL, "layers": 8, "dModel": 64, "dMlp": 512}
    path = tmp_path / "m.tinygpt"
    write(path, config, make_weights(config))
    assert path.stat().st_size > 7_000_000
    tracemalloc.start()
    try:
        for _, array in TinyGPTFile(path).weights():
            del array
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 3},
        {"dModel": 0},
        {"layers": 10**9},
        {"layers": -1},
        {"layers": 1.0},
        {"layers": None},
        {"layers": True},
        {"ctx": 2**40},
        {"heads": "2"},
        {"vocabSize": [5]},
        {"nExperts": 2, "moeTopK": 3},
        {"slidingWindow": 0},
        {"useMoD": 1},
        {"tokenizerSource": 7},
        {"useYOCO": True, "useDifferentialAttention": True},
        {"kviBits": "int4"},
    ],
    ids=str,
)
def test_an_impossible_config_is_refused_by_name(tmp_path, change):
    header = sound_header(config={**SMALL, **change})
    path = tmp_path / "m.tinygpt"
    path.write_bytes(pack(header, bytes(body_size(header))))
    with pytest.raises(TinyGPTError) as error:
        TinyGPTFile(path)
    message = str(error.value)
    assert any(f"config.{key}" in message for key in [*change, "dModel"])
    assert message.startswith(f"{path}: ")
    assert "expected" in message and "\n" not in message


def _manifest(edit):
    manifest = manifest_of(SMALL)
    edit(manifest)
    return sound_header(manifest=manifest)


def _entry(index, **changes):
    return _manifest(lambda m: m[index].update(changes))


BAD_HEADERS = {
    "not an object": b"[]",
    "not UTF-8": b'{"config": "\xff"}',
    "not JSON": b'{"config": ',
    "deep": b'{"config": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many values": b'{"config": [' + b"0," * 2**20 + b"0]}",
    "NaN": b'{"config": {}, "finalLoss": NaN}',
    "infinite": b'{"config": {}, "finalLoss": 1e999}',
    "long integer": b'{"config": {"layers": ' + b"9" * 10_000 + b"}}",
    "twice": b'{"config": {"layers": 1, "layers": 2}}',
    "no config": {"manifest": manifest_of(SMALL)},
    "no manifest": {"config": SMALL},
    "manifest of numbers": sound_header(manifest=[1]),
    "manifest as object": sound_header(manifest={}),
    "name not a string": _entry(0, name=["token_embedding.weight"]),
    "missing tensor": _manifest(lambda m: m.pop(3)),
    "surplus tensor": _manifest(lambda m: m.append({"name": "lm_head.weight", "shape": [5, 4]})),
    "same tensor twice": _manifest(lambda m: m.append(m[0])),
    "wrong shape": _entry(0, shape=[4, 5]),
    "shape not a list": _entry(0, shape="5x4"),
    "huge shape": _entry(0, shape=[2**62, 2**62]),
    "negative shape": _entry(0, shape=[-5, -4]),
    "fp32 offset off": _entry(1, floatOffset=21),
    "fractional offset": _entry(1, floatOffset=20.5),
    "negative offset": {**_entry(0, floatOffset=-20), "weightDtype": "fp16"},
    "overlapping offset": {**_entry(1, floatOffset=10), "weightDtype": "fp16"},
    "far offset": {**_entry(1, floatOffset=2**62), "weightDtype": "fp16"},
    "unknown dtype": sound_header(weightDtype="bf16"),
    "dtype not a string": sound_header(weightDtype=["fp16"]),
    "optimizer not a boolean": sound_header(includesOptimizerState="no"),
    "int4 block": sound_header(weightDtype="int4", int4BlockSize=32),
    "int4 scales": sound_header(weightDtype="int4", int4ScalesBytes=1),
    "int4 nibbles": sound_header(weightDtype="int4", int4PackedBytes=-1),
    "yoco without cross": sound_header(config={**SMALL, "layers": 2, "useYOCO": True}),
    "norm the config lacks": sound_header(
        manifest=[*manifest_of(SMALL), {"name": "embed_norm.weight", "shape": [4]}]
    ),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_gives_one_line(tmp_path, name):
    path = tmp_path / "m.tinygpt"
    path.write_bytes(pack(BAD_HEADERS[name], bytes(body_size(sound_header()))))
    with pytest.raises(TinyGPTError) as error:
        TinyGPTFile(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 500


def test_a_yoco_file_as_tinygpt_writes_it_is_refused_with_the_reason(tmp_path, make_weights):
    config = {**SMALL, "layers": 2, "useYOCO": True}
    manifest = [
        {"name": t.name, "shape": list(t.shape)}
        for t in tensors(ModelArgs.from_dict(config))
        if ".cross_attn." not in t.name
    ]
    header = sound_header(config=config, manifest=manifest)
    path = tmp_path / "m.tinygpt"
    path.write_bytes(pack(header, bytes(body_size(header))))
    with pytest.raises(TinyGPTError, match="blocks.1.cross_attn.*writer leaves out"):
        TinyGPTFile(path)


def test_version_one_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "m.tinygpt"
    path.write_bytes(pack({"config": {}}, b"", version=1))
    with pytest.raises(TinyGPTError, match="version: expected 2.*no manifest"):
        TinyGPTFile(path)


@pytest.mark.parametrize("cut", [0, 3, 4, 11, 12, 40, -1, -5000])
def test_a_truncated_file_is_refused(tmp_path, make_file, cut):
    path = make_file()
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TinyGPTError, match="expected"):
        TinyGPTFile(path)


def test_surplus_bytes_are_refused(make_file):
    path = make_file()
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(TinyGPTError, match="body: expected"):
        TinyGPTFile(path)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(make_file, dtype, value):
    path = make_file(dtype=dtype)
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<I", raw, 8)
    struct.pack_into("<f" if dtype == "fp32" else "<e", raw, 16 + length, value)
    path.write_bytes(raw)
    with pytest.raises(TinyGPTError, match="token_embedding.weight: expected finite"):
        list(TinyGPTFile(path).weights())


def test_a_header_length_beyond_the_file_costs_no_memory(tmp_path):
    path = tmp_path / "m.tinygpt"
    with open(path, "wb") as file:
        file.write(b"TGPT" + struct.pack("<II", 2, 2**32 - 1))
        file.truncate(2**32 + 100)  # sparse: as long as it claims, yet holding nothing
    tracemalloc.start()
    try:
        with pytest.raises(TinyGPTError, match=f"at most {MAX_HEADER}"):
            TinyGPTFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path, tmp_path / "absent", "a\0b"):
        with pytest.raises(TinyGPTError, match="file: "):
            TinyGPTFile(name)
    assert not is_tinygpt(tmp_path) and not is_tinygpt(tmp_path / "absent")


def test_is_tinygpt_goes_by_the_magic(tmp_path, make_file):
    assert is_tinygpt(make_file())
    (tmp_path / "other.tinygpt").write_bytes(b"GGUF" + bytes(20))
    assert not is_tinygpt(tmp_path / "other.tinygpt")
    with pytest.raises(TinyGPTError, match="magic: expected b'TGPT'"):
        TinyGPTFile(tmp_path / "other.tinygpt")


def test_a_failed_write_leaves_nothing(tmp_path, make_weights):
    weights = make_weights(SMALL)
    path = tmp_path / "m.tinygpt"
    bad = [
        ({**weights, "ln_final.bias": np.full(4, np.inf, np.float32)}, "fp32", "finite"),
        ({**weights, "ln_final.bias": np.full(4, 1e5, np.float32)}, "fp16", "fp16's range"),
        ({**weights, "ln_final.bias": np.full(4, 1e6, np.float32)}, "int4", "int4's range"),
        ({**weights, "ln_final.bias": np.zeros(5, np.float32)}, "fp32", "expected shape"),
        ({**weights, "more": np.zeros(5, np.float32)}, "fp32", "does not call for"),
        ({k: w for k, w in weights.items() if k != "ln_final.bias"}, "fp32", "missing"),
        (weights, "int8", "fp32, fp16 or int4"),
    ]
    for case, dtype, message in bad:
        with pytest.raises(TinyGPTError, match=message):
            write(path, SMALL, case, dtype=dtype)
    assert os.listdir(tmp_path) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(
    config=st.dictionaries(
        st.sampled_from([*SMALL, "useYOCO", "useMoD", "nExperts", "tokenizerSource"]),
        json_values | st.integers(-1, 8),
    ),
    top=st.dictionaries(st.sampled_from(["manifest", "weightDtype", "config"]), json_values),
)
def test_any_header_loads_or_gives_one_line(tmp_path_factory, config, top):
    header = {**sound_header(config={**SMALL, **config}), **top}
    path = tmp_path_factory.mktemp("header") / "m.tinygpt"
    path.write_bytes(pack(header, bytes(body_size(sound_header()))))
    try:
        TinyGPTFile(path)
    except TinyGPTError as error:
        assert "\n" not in str(error)
