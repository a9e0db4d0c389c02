"""Prompt caches in files: mlx-lm's functions under `patch`, and ours without it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_kivi
from mlx_kivi import KVCacheConfig
from mlx_kivi.generate import main as kivi_generate

from .contract import files, models
from .contract.kinds import PACKED, POLICIES, tokens
from .contract.models import prompt, run, steps

# Nothing packed yet, a chunk in the air, past every window.
LENGTHS = (10, 100, 333)
# "ranked": some of a layer's channels have more bits than the others.
FILES = {**POLICIES, "ranked": KVCacheConfig(k_bits=3, v_bits=2, **PACKED)}
CASES = [(name, length) for name in FILES for length in LENGTHS]

# What a new process does: another policy is in force there, and must not matter.
CONTINUE = """
import sys
import mlx.core as mx
import mlx_kivi
{patch}
from {module} import load_prompt_cache
from conformance.contract.models import llama, steps
model, out, meta = llama(), {{}}, {{}}
for path in sys.argv[2:]:
    caches, metadata = load_prompt_cache(path, return_metadata=True)
    out[path] = steps(model, caches, 7, 40)
    meta[path] = caches[0].config.describe() + "|" + metadata["note"]
mx.save_safetensors(sys.argv[1], out, meta)
"""


@pytest.fixture(scope="module")
def saved(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """For each case: the file, the caches' bytes, and the logits that follow in this process."""
    folder, cases = tmp_path_factory.mktemp("prompts"), {}
    for name, length in CASES:
        with mlx_kivi.patched(FILES[name]):
            caches = mlx_kivi.make_prompt_cache(llama, FILES[name])
            run(llama, caches, [prompt(length - 5), *prompt(5).split([1, 2])])
            path = str(folder / f"{name}-{length}.safetensors")
            save_prompt_cache(path, caches, {"note": name})
            nbytes = sum(c.nbytes for c in caches)
            cases[name, length] = path, nbytes, steps(llama, caches, 7, 40)
    return cases


@pytest.fixture(
    scope="module",
    params=[
        ("mlx_kivi.patch(k_bits=8, v_bits=8, window=40)", "mlx_lm.models.cache"),
        ("", "mlx_kivi"),
    ],
    ids=["mlx_lm's functions under patch", "ours without patch"],
)
def continued(
    request: pytest.FixtureRequest, saved: dict[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What a new process made of the files: logits and settings."""
    out = str(tmp_path_factory.mktemp("continued") / "logits.safetensors")
    patch, module = request.param
    code = CONTINUE.format(patch=patch, module=module)
    paths = [path for path, _, _ in saved.values()]
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code, out, *paths], check=True, cwd=root)
    return mx.load(out, return_metadata=True)


@pytest.mark.parametrize(("name", "length"), CASES)
def test_a_new_process_goes_on_bit_by_bit_with_the_files_settings(
    name: str, length: int, saved: dict[Any, Any], continued: tuple[Any, Any]
) -> None:
    path, _, want = saved[name, length]
    logits, settings = continued
    assert mx.array_equal(logits[path], want)
    assert settings[path] == FILES[name].describe() + "|" + name


@pytest.mark.parametrize(("name", "length"), CASES)
def test_a_file_is_as_large_as_what_is_stored(
    name: str, length: int, saved: dict[Any, Any]
) -> None:
    path, nbytes, _ = saved[name, length]
    config, vector = FILES[name], 32 * 4
    ring = length if not config.quantized else min(length, 4 + 16 + 32 + 32)
    if name == "bounded":
        ring = length if length <= 64 else 64 + 64  # and what left the window last
    groups = max(0, length - 4 - 16) // 32 if config.quantized else 0
    if config.window:  # what can still be seen, or trimmed back to
        groups = min(groups, -(-(config.window + 31 - 16) // 32))
    packed = groups * 32 * 32 * ((config.k_bits or 0) + (config.v_bits or 0)) // 8
    scales = 2 * groups * 32 * 2 * 2
    # Layers, heads: keys and values. What they are packed in is there once, a layer's own.
    stored = 2 * 2 * (2 * ring * vector + packed + scales)
    bases = 2 * 2 * 32 * 32 * 2 if config.moves_keys else 0
    size = Path(path).stat().st_size - bases
    assert stored <= size <= stored + 4096
    # The cache itself has whole steps of 256 tokens, or all slots of a window, from the start.
    assert stored <= nbytes + 4096


def test_a_packed_file_is_a_fraction_of_the_stock_one(llama: nn.Module, tmp_path: Path) -> None:
    sizes = []
    for caches in ([KVCache(), KVCache()], mlx_kivi.make_prompt_cache(llama, POLICIES["int4"])):
        run(llama, caches, [prompt(2048)])
        mlx_kivi.save_prompt_cache(tmp_path / "file", caches)
        sizes.append((tmp_path / "file.safetensors").stat().st_size)
    assert sizes[1] < 0.25 * sizes[0]


def test_files_keep_other_caches_lists_of_caches_and_metadata(tmp_path: Path) -> None:
    mlx_kivi.patch()
    path = str(tmp_path / "mixed.safetensors")
    save_prompt_cache(path, files.mixed(), files.METADATA)
    caches, metadata = load_prompt_cache(path, return_metadata=True)
    check_mixed(caches, exact=True)
    assert metadata == files.METADATA


@pytest.mark.parametrize("release", files.RELEASES)
def test_a_file_of_either_generation_of_mlx_lm_is_read(release: str) -> None:
    """The files were written by ``python -m conformance.contract.files`` under each release."""
    for load in (load_prompt_cache, mlx_kivi.load_prompt_cache):
        mlx_kivi.patch()
        caches, metadata = load(str(files.saved_by(release)), return_metadata=True)
        check_mixed(caches, exact=False)
        assert metadata == files.METADATA


def check_mixed(caches: list[Any], *, exact: bool) -> None:
    """Compare caches with `files.mixed`; packed ones with the tokens unless ``exact``."""
    fresh = files.mixed()
    assert [type(c) for c in caches] == [type(c) for c in fresh]
    arrays, twin = caches[1].caches[0], fresh[1].caches[0]
    assert all(a.dtype == b.dtype and mx.array_equal(a, b) for a, b in zip(arrays, twin))
    pairs = [
        (caches[0], fresh[0]),
        (caches[1].caches[1], fresh[1].caches[1]),
        *zip(caches[2:], fresh[2:], strict=True),
    ]
    for i, (cache, want) in enumerate(pairs):
        for length in (1, 1, 3, 30):
            keys, values = (x[:, :1] for x in tokens(cache.offset, cache.offset + length))
            got, expected = (c.update_and_fetch(keys, values) for c in (cache, want))
            for (_, a), (_, b) in zip(tree_flatten(got), tree_flatten(expected), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                # How tokens are packed may change between our releases; that they are read not.
                assert mx.array_equal(a, b) if exact or i else mx.abs(a - b).max() < 8 / 15


def test_a_file_of_stock_caches_is_left_to_mlx_lm(tmp_path: Path) -> None:
    cache = KVCache()
    cache.update_and_fetch(*tokens(0, 10))
    plain, hooked = (str(tmp_path / f"{n}.safetensors") for n in ("plain", "hooked"))
    save_prompt_cache(plain, [cache], {"a": "b"})
    mlx_kivi.patch()
    save_prompt_cache(hooked, [cache], {"a": "b"})
    assert Path(plain).read_bytes() == Path(hooked).read_bytes()
    loaded, metadata = load_prompt_cache(hooked, return_metadata=True)
    assert type(loaded[0]) is KVCache and loaded[0].offset == 10
    assert metadata == {"a": "b"}
    assert load_prompt_cache(hooked)[0].offset == 10
    assert mlx_kivi.load_prompt_cache(hooked)[0].offset == 10


# The command lines


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: TokenizerWrapper) -> Path:
    """A model directory: the tiny llama for the byte tokenizer's 257 tokens."""
    folder = tmp_path_factory.mktemp("model")
    model = models.llama(vocabulary=257)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return folder


def call(main: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, *argv: str) -> str:
    """What a command prints."""
    monkeypatch.setattr(sys, "argv", ["program", *argv])
    capsys.readouterr()
    main()
    return capsys.readouterr().out


def test_both_command_lines_go_on_from_a_prompt_cache_file(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlx_lm import cache_prompt

    generate = importlib.import_module("mlx_lm.generate")
    path = str(tmp_path / "prompt.safetensors")
    policy = KVCacheConfig(k_bits=4, v_bits=4, group_size=32, sink=4, window=90)
    story = "Once upon a time there was a cache that kept what mattered. " * 4
    model = ("--model", str(directory))
    with mlx_kivi.patched(policy):
        call(
            cache_prompt.main,
            monkeypatch,
            capsys,
            *model,
            "--prompt-cache-file",
            path,
            "--prompt",
            story,
        )
    caches, metadata = mlx_kivi.load_prompt_cache(path, return_metadata=True)
    assert {c.config for c in caches} == {policy}
    assert metadata["model"] == str(directory)
    mlx_kivi.unpatch()

    ask = ("--prompt-cache-file", path, "--prompt", "And then?", "--max-tokens", "20")
    mlx_kivi.patch()  # int8, which must not matter
    theirs = call(generate.main, monkeypatch, capsys, *ask, "--verbose", "F")
    mlx_kivi.unpatch()
    capsys.readouterr()
    kivi_generate([*ask, "--verbose", "F"])
    ours = capsys.readouterr().out
    assert theirs == ours
    assert len(theirs) > 5

    agreeing = ("--kv-quantize", "int4", "--streaming-llm-window", "90")
    agreeing = (*agreeing, "--kv-group-size", "32", "--kv-residual", "32")
    kivi_generate([*ask, "--verbose", "F", *agreeing])
    assert capsys.readouterr().out == ours
    for flags, field in (
        (("--kv-quantize", "int8"), "--kv-key-bits 4"),
        (agreeing[:2] + agreeing[4:], "no --streaming-llm-window"),
        ((*agreeing, "--streaming-llm-sink", "2"), "--streaming-llm-sink 2"),
    ):
        with pytest.raises(SystemExit) as ended:
            kivi_generate([*ask, *flags])
        error = capsys.readouterr().err.strip()
        assert ended.value.code in (1, 2)
        assert "\n" not in error and "--prompt-cache-file" in error and field in error
