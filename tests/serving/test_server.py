"""The server: each request is answered as it would be alone, and what it tells is right."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from serving.servers import errors, server, together

from conformance.contract.tokenizers import wrapped
from mlx_kivi import KVCacheConfig, make_prompt_cache

POLICIES = {
    "stock": None,
    "int4": KVCacheConfig.from_name("int4"),
    "int4 bounded": KVCacheConfig.from_name("int4", window=100),
}
TEXT = "The sea is wide and the ships are small, and every evening they come home. " * 8
PROMPTS = [TEXT[: 7 + 61 * i] for i in range(8)]


def alone(model: nn.Module, policy: KVCacheConfig | None, prompt: str, tokens: int) -> str:
    """The text that follows, from caches of its own."""
    tokenizer = wrapped()
    cache = None if policy is None else make_prompt_cache(model, policy)
    steps = generate_step(
        mx.array(tokenizer.encode(prompt)), model, max_tokens=tokens, prompt_cache=cache
    )
    found = []
    for token, _ in steps:
        if token in tokenizer.eos_token_ids:
            break
        found.append(token)
    return tokenizer.decode(found)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_requests_at_once_are_answered_as_alone(
    model: nn.Module, policy: KVCacheConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [alone(model, policy, prompt, 12) for prompt in PROMPTS]
    with server(model, policy=policy) as client:
        found = together(*(lambda p=p: client.text(p, 12) for p in PROMPTS))
        again = [client.text(p, 12) for p in PROMPTS]
    assert found == wanted
    assert again == wanted  # each prompt is held whole by now
    assert errors(caplog) == []


def test_a_model_that_is_not_there_leaves_the_one_that_is(
    model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(model) as client:
        status, answer = client.post(prompt="Hello", model="nobody/has-this")
        assert status == 404 and "nobody/has-this" in str(answer)
        assert client.engine.model_provider.model is model
        client.text("Hello")
    assert len(capsys.readouterr().out.splitlines()) == 1  # it was loaded once


def test_a_server_without_a_model_asks_for_one(model: nn.Module) -> None:
    with server(None) as client:
        assert client.get("/health") == (200, {"status": "ok", "kv": None})
        status, answer = client.post(prompt="Hello")
        assert status == 404 and "--model" in answer["error"]["message"]


def test_a_model_is_known_by_the_path_that_it_is_listed_by(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "model")
    with server(model) as client:
        assert path in [listed["id"] for listed in client.get("/v1/models")[1]["data"]]
        key = client.engine.model_provider.model_key
        assert client.text("Hello", model=path) == client.text("Hello")
        assert client.engine.model_provider.model_key == key
