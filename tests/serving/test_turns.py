"""Conversations: a second turn feeds what is new, and long prompts let answers run."""

from __future__ import annotations

import http.client
import json
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.generate import PromptProcessingBatch
from serving.servers import Client, server

from mlx_kivi import KVCacheConfig
from mlx_kivi.serving.engine import BESIDE

TEXT = "The sea is wide and the ships are small, and every evening they come home. " * 12
POLICIES = {
    "stock": None,
    "int8": KVCacheConfig.from_name("int8"),
    "int4": KVCacheConfig.from_name("int4"),
    "evicted": KVCacheConfig.from_name("int8", window=200),
    "evicted, unpacked": KVCacheConfig(window=200),
}


def chat(client: Client, messages: list[Any], tokens: int) -> tuple[str, dict[str, Any]]:
    body = {"messages": messages, "max_tokens": tokens, "logit_bias": {"256": -100}}
    status, answer = client.post("/v1/chat/completions", **body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"], answer["usage"]


def cached(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_second_turn_feeds_what_is_new(model: nn.Module, policy: KVCacheConfig | None) -> None:
    first = [{"role": "user", "content": TEXT}]
    with server(model, policy=policy) as client:
        said, usage = chat(client, first, 20)
        # Rendered anew, the reply differs in its last letters: what was stored goes on otherwise.
        second = [*first, {"role": "assistant", "content": said[:-4] + " ???"}]
        second.append({"role": "user", "content": "And then?"})
        again, then = chat(client, second, 12)
        seen = usage["prompt_tokens"] + usage["completion_tokens"]
        new = then["prompt_tokens"] - seen
        assert then["prompt_tokens"] - cached(then) <= new + 32
    with server(model, policy=policy) as client:
        fresh, usage = chat(client, second, 12)
        assert cached(usage) == 0
    assert again == fresh


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_prompt_that_is_stored_answers(model: nn.Module, policy: KVCacheConfig | None) -> None:
    with server(model, policy=policy) as client:
        status, answer = client.post(prompt=TEXT[:150], max_tokens=12)
        said = answer["choices"][0]["text"]
        assert client.text(TEXT[:150], 12) == said
        # All of what is stored under it, and one token less, and one more.
        whole = TEXT[:150] + said
        found = [client.text(whole + end, 8) for end in ("", " ")] + [client.text(whole[:-1], 8)]
    with server(model, policy=policy, tokenizer=None) as client:
        fresh = [client.text(whole + end, 8) for end in ("", " ")] + [client.text(whole[:-1], 8)]
    assert found == fresh


def test_prompts_are_fed_in_parts_beside_running_answers(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    theirs = PromptProcessingBatch.prompt

    def prompt(batch: Any, tokens: list[list[int]]) -> None:
        fed.extend(map(len, tokens))
        theirs(batch, tokens)

    monkeypatch.setattr(PromptProcessingBatch, "prompt", prompt)
    with server(model, policy=KVCacheConfig.from_name("int4")) as client:
        client.text(TEXT[:700], 1)
        assert max(fed) == 699  # all but the one that the first step is for
        fed.clear()
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        body = {"prompt": "Go on", "max_tokens": 100_000, "stream": True}
        body["logit_bias"] = {"256": -100}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.read(100)
        fed.clear()
        client.text(TEXT[100:800], 1)
        response.close()
        connection.close()
    assert max(fed) == BESIDE and sum(fed) == 699
