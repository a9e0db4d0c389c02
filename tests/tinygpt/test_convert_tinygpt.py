"""convert-tinygpt: there and back, and what its errors say."""

import json
import os

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from helpers import run
from mlx.utils import tree_flatten
from mlx_lm import stream_generate

from mlx_kivi import tinygpt
from mlx_kivi.convert_tinygpt import main
from mlx_kivi.tinygpt import TinyGPTFile, byte_tokenizer

CONFIG = {"layers": 2, "dModel": 32, "ctx": 48, "heads": 4, "dMlp": 40}


def weights_of(path):
    return {name: array.tobytes() for name, array in TinyGPTFile(path).weights()}


def fails(argv, code, capsys):
    """The one line that main leaves with."""
    ended, _, err = run(capsys, main, *argv)
    lines = err.strip().splitlines()
    assert ended == code
    assert len(lines) == 1 or lines[0].startswith("usage:")
    return lines[-1]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
def test_there_and_back_keeps_every_bit(config, make_file, tmp_path, dtype):
    path = make_file(config, dtype=dtype, unused=True)
    main([str(path), str(tmp_path / "mlx")])
    main([str(tmp_path / "mlx"), str(tmp_path / "back.tinygpt")])
    before, after = TinyGPTFile(path), TinyGPTFile(tmp_path / "back.tinygpt")
    assert (after.args, after.step, after.dtype) == (before.args, 7, dtype)
    assert weights_of(tmp_path / "back.tinygpt") == weights_of(path)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
def test_mlx_lm_loads_the_directory_as_the_same_model(config, make_file, tmp_path, dtype):
    path = make_file(config, dtype=dtype, unused=True)
    main([str(path), str(tmp_path / "mlx")])
    ours, _, _ = tinygpt.load(path)
    theirs, tokenizer, loaded = mlx_lm.load(str(tmp_path / "mlx"), return_config=True)
    assert loaded["vocab_size"] == 256
    kept = mx.float16 if dtype == "fp16" else mx.float32
    wanted = dict(tree_flatten(ours.parameters()))
    for name, array in tree_flatten(theirs.parameters()):
        assert array.dtype == kept
        assert mx.array_equal(array, wanted[name])
    assert tokenizer.encode(" hé\n") == list(" hé\n".encode())
    assert tokenizer.eos_token_ids == set() and not tokenizer.has_chat_template


def test_the_directory_streams_the_same_text(make_file, tmp_path):
    path = make_file()
    main([str(path), str(tmp_path / "mlx")])
    texts = []
    for model, tokenizer in (tinygpt.load(path)[:2], mlx_lm.load(str(tmp_path / "mlx"))):
        responses = stream_generate(model, tokenizer, " To be", max_tokens=30)
        texts.append("".join(r.text for r in responses))
    assert texts[0] == texts[1]


def test_header_and_unknown_config_keys_survive(make_weights, tmp_path):
    path = tmp_path / "m.tinygpt"
    config = {**CONFIG, "batchSize": 16, "model_file": "evil.py", "quantization": {"bits": 4}}
    extra = {"savedAt": "\ud800 then", "lossHistory": [{"step": 1, "trainLoss": 2.5}]}
    tinygpt.format.write(path, config, make_weights(CONFIG), extra=extra, step=-1)
    main([str(path), str(tmp_path / "mlx")])
    written = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert "model_file" not in written and "quantization" not in written
    main([str(tmp_path / "mlx"), str(tmp_path / "back.tinygpt")])
    file = TinyGPTFile(tmp_path / "back.tinygpt")
    assert (file.extra, file.step) == (extra, -1)
    assert {key: file.config[key] for key in config} == config


def test_dtype_chooses_the_layout_on_the_way_back(make_file, tmp_path):
    path = make_file()
    main([str(path), str(tmp_path / "mlx")])
    for dtype in ("fp32", "fp16", "int4"):
        main([str(tmp_path / "mlx"), str(tmp_path / f"{dtype}.tinygpt"), "--dtype", dtype])
        assert TinyGPTFile(tmp_path / f"{dtype}.tinygpt").dtype == dtype
    assert weights_of(tmp_path / "fp32.tinygpt") == weights_of(path)


def test_a_saved_model_is_the_model(config, make_file, tmp_path):
    model, _, _ = tinygpt.load(make_file(config))
    tinygpt.save(tmp_path / "saved.tinygpt", model, step=3)
    assert TinyGPTFile(tmp_path / "saved.tinygpt").step == 3
    again, _, _ = tinygpt.load(tmp_path / "saved.tinygpt")
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(ids), again(ids))


def test_bfloat16_weights_are_widened(make_file, tmp_path):
    model, _, _ = tinygpt.load(make_file())
    model.set_dtype(mx.bfloat16)
    tinygpt.save(tmp_path / "saved.tinygpt", model)
    wanted = np.array(model.token_embedding.weight.astype(mx.float32))
    name, array = next(TinyGPTFile(tmp_path / "saved.tinygpt").weights())
    assert name == "token_embedding.weight"
    np.testing.assert_array_equal(array, wanted)


def test_a_model_with_its_own_tokenizer_needs_its_directory(make_file, tmp_path, capsys):
    byte_tokenizer().save_pretrained(tmp_path / "tok")
    path = make_file({**CONFIG, "tokenizerSource": "gone"})
    assert "--tokenizer-dir" in fails([path, tmp_path / "mlx"], 1, capsys)
    main([str(path), str(tmp_path / "mlx"), "--tokenizer-dir", str(tmp_path / "tok")])
    _, tokenizer = mlx_lm.load(str(tmp_path / "mlx"))
    assert tokenizer.encode("é") == [0xC3, 0xA9]


def test_what_exists_is_never_overwritten(make_file, tmp_path, capsys):
    path = make_file()
    before = path.read_bytes()
    (tmp_path / "mlx").mkdir()
    assert "exists already" in fails([path, tmp_path / "mlx"], 1, capsys)
    assert "exists already" in fails([tmp_path / "mlx", path], 1, capsys)
    assert path.read_bytes() == before and os.listdir(tmp_path / "mlx") == []


def test_a_failure_halfway_leaves_nothing_behind(make_file, make_weights, tmp_path, capsys):
    path = make_file(CONFIG)
    raw = bytearray(path.read_bytes())
    raw[-12 * 32 : -12 * 32 + 4] = np.float32(np.nan).tobytes()  # in the last tensor, fc_out.bias
    path.write_bytes(raw)
    line = fails([path, tmp_path / "mlx"], 1, capsys)
    assert "blocks.1.mlp.fc_out.bias: expected finite" in line
    weights = make_weights(CONFIG)
    weights["blocks.1.mlp.fc_out.bias"][:] = 1e6
    tinygpt.format.write(path, CONFIG, weights)
    main([str(path), str(tmp_path / "mlx")])
    line = fails([tmp_path / "mlx", tmp_path / "back.tinygpt", "--dtype", "fp16"], 1, capsys)
    assert "fp16's range" in line
    assert sorted(os.listdir(tmp_path)) == ["mlx", "model.tinygpt"]


def test_usage_errors_exit_with_two(make_file, tmp_path, capsys):
    path = make_file()
    assert "--dtype is for" in fails([path, tmp_path / "mlx", "--dtype", "fp16"], 2, capsys)
    assert "int8" in fails([tmp_path, tmp_path / "m", "--dtype", "int8"], 2, capsys)
    line = fails([tmp_path, tmp_path / "m", "--tokenizer-dir", tmp_path], 2, capsys)
    assert "--tokenizer-dir is for" in line
    assert "target" in fails([path], 2, capsys)


def test_directories_that_are_not_ours_give_one_line(make_file, tmp_path, capsys):
    path = make_file()
    main([str(path), str(tmp_path / "mlx")])
    config_path = tmp_path / "mlx" / "config.json"
    config = json.loads(config_path.read_text())
    capsys.readouterr()

    def refused(text):
        config_path.write_text(text)
        return fails([tmp_path / "mlx", tmp_path / "back.tinygpt"], 1, capsys)

    assert "model_type" in refused(json.dumps({**config, "model_type": "llama"}))
    assert "unquantised" in refused(json.dumps({**config, "quantization": {"bits": 4}}))
    assert "config.layers" in refused(json.dumps({**config, "layers": "2"}))
    assert "tinygpt: expected" in refused(json.dumps({**config, "tinygpt": {"step": "x"}}))
    assert "step: expected" in refused(json.dumps({**config, "tinygpt": {"step": 2**40}}))
    assert "JSON" in refused("{")
    assert "missing" in refused(json.dumps({**config, "layers": 5}))
    weights = tmp_path / "mlx" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "model.safetensors" in refused(json.dumps(config))
    weights.unlink()
    assert "expected the model's weights" in refused(json.dumps(config))
    config_path.unlink()
    assert "config.json" in fails([tmp_path / "mlx", tmp_path / "back.tinygpt"], 1, capsys)
    assert "no.tinygpt" in fails([tmp_path / "no.tinygpt", tmp_path / "new"], 1, capsys)


def test_a_target_without_a_directory_is_named(make_file, tmp_path, capsys):
    path = make_file()
    for target in (tmp_path / "no" / "mlx", path / "mlx"):
        line = fails([path, target], 1, capsys)
        assert f"error: {target.parent}: target: expected a directory; make it first" in line


def test_ctrl_c_is_one_line_and_leaves_nothing(make_file, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    path = make_file()
    monkeypatch.setattr(mx, "save_safetensors", interrupted)
    assert fails([path, tmp_path / "mlx"], 130, capsys).endswith("error: stopped")
    assert os.listdir(tmp_path) == [path.name]


def test_a_directory_without_a_tokenizer_is_one_line(make_file, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    argv = [make_file(), tmp_path / "mlx", "--tokenizer-dir", tmp_path / "empty"]
    line = fails(argv, 1, capsys)
    assert f"{tmp_path / 'empty'}: tokenizer directory: expected a tokenizer (" in line
