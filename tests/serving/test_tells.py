"""What the server tells operators: `/health`, `/v1/models`, `/metrics`, and its first line."""

from __future__ import annotations

import http.client
import json

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from serving.servers import server

from conformance.common import tiny_llama
from mlx_kivi import KVCacheConfig
from mlx_kivi.report import size
from mlx_kivi.serving.footprint import LONG, Footprint

INT4 = KVCacheConfig.from_name("int4", window=100)
TEXT = "The sea is wide and the ships are small, and every evening they come home. " * 8


def test_health_and_models_say_what_is_in_force(model: nn.Module) -> None:
    with server(model, policy=INT4) as client:
        (status, health), (_, models) = client.get("/health"), client.get("/v1/models")
    assert status == 200 and health["status"] == "ok"
    assert health["kv"] == {
        "policy": "4 bits, group 64, residual 64, sinks 4, window 100",
        "bits": {"keys": 4, "values": 4},
        "window": 100,
        "sink": 4,
        "layers": 1.0,
        "bytes": 1.0,
        "coverage": "full",
    }
    assert models["object"] == "list" and models["kv"] == health["kv"]


def test_without_a_policy_they_say_none(model: nn.Module) -> None:
    with server(model) as client:
        kv = client.get("/health")[1]["kv"]
    assert (kv["policy"], kv["coverage"], kv["bytes"]) == ("full precision", "none", 0.0)


def test_a_policy_for_some_layers_is_partial(model: nn.Module) -> None:
    policy = KVCacheConfig.from_name("int8", layers=[0])
    with server(model, policy=policy) as client:
        kv = client.get("/health")[1]["kv"]
    assert (kv["coverage"], kv["layers"], kv["bytes"]) == ("partial", 0.5, 0.5)


@pytest.mark.parametrize("policy", [None, INT4], ids=["stock", "int4"])
def test_the_first_line_has_the_bytes_of_a_long_conversation(
    model: nn.Module, policy: KVCacheConfig | None, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Footprint([(model, make_prompt_cache(model))], None).bytes(LONG)
    with server(model, policy=policy) as client:
        takes = size(client.engine._footprint.bytes(LONG))
    (line,) = capsys.readouterr().out.splitlines()
    if policy is None:
        assert line == (
            "KV cache: full precision, nothing packed or bounded; "
            f"a conversation of 8,192 tokens takes {size(full)}"
        )
    else:
        assert line == (
            "KV cache: 4 bits, group 64, residual 64, sinks 4, window 100, on 2 of 2 layers "
            f"(100% of its bytes); a conversation of 8,192 tokens takes {takes} "
            f"(full precision: {size(full)})"
        )


def test_figures_are_those_of_the_requests(model: nn.Module) -> None:
    with server(model, policy=INT4) as client:
        first, second = TEXT[:300], TEXT[:300] + "more"
        made = [client.post(prompt=p, max_tokens=20)[1] for p in (first, second)]
        client.post(prompt="")
        usage = [answer["usage"] for answer in made]
        client.until(lambda: client.figure("prompt_cache_bytes") > 0)
        assert client.figure("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
        said = sum(u["completion_tokens"] for u in usage)
        assert client.figure("generated_tokens_total") == said
        reused = usage[1]["prompt_tokens_details"]["cached_tokens"]
        assert reused >= 290
        assert client.figure("prompt_cache_hits_total") == 1
        assert client.figure("prompt_cache_reused_tokens_total") == reused
        assert client.figure('requests_finished_total{outcome="refused"}') == 1
        assert client.figure("requests_finished_total") == 3
        assert client.figure("requests_running") == client.figure("requests_waiting") == 0
        assert client.figure("kv_bytes") == 0
        assert client.figure("prompt_cache_bytes") == client.engine.prompt_cache.nbytes
        # Of 300 tokens and an answer the last 100 and the first 4 are left; the second request
        # began with what the first had let go already.
        ends = [300 + usage[0]["completion_tokens"], 304 + usage[1]["completion_tokens"]]
        evicted = ends[0] - 104 + ends[1] - reused
        assert client.figure("evicted_tokens_total") == evicted


def test_bytes_of_running_requests_are_those_of_their_caches() -> None:
    model = tiny_llama(vocab_size=257)
    with server(model, policy=KVCacheConfig.from_name("int8")) as client:
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        body = {"prompt": TEXT[:500], "max_tokens": 100_000, "stream": True}
        body["logit_bias"] = {"256": -100}  # no end
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.read(1)
        client.until(lambda: client.figure("kv_bytes_if_fp16") > 0)
        now, full, running = client.figures("kv_bytes", "kv_bytes_if_fp16", "requests_running")
        tokens = full / (2 * 2 * 2 * 32 * 2)  # layers, keys and values, KV heads, head size
        response.close()
        connection.close()
        client.until(lambda: client.figure("requests_running") == 0)
        assert client.figure('requests_finished_total{outcome="gone"}') == 1
    assert running == 1
    assert tokens % 256 == 0 and tokens >= 512  # mlx_lm's caches grow by so many
    assert 0.5 * full < now < 1.5 * full  # 8 bits and a part in float32
