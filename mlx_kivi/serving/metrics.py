"""What the server counts, as Prometheus text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    """The server's figures; written by its generation thread, read by any."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=self._registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(name, about, registry=self._registry)

        self.running = gauge("requests_running", "Requests that prompts or steps are computed for")
        self.waiting = gauge("requests_waiting", "Requests that have yet to start")
        self.finished = counter("requests_finished", "Requests that ended", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, reused ones included")
        self.generated_tokens = counter("generated_tokens", "Tokens generated")
        self.hits = counter("prompt_cache_hits", "Prompts of which the prompt cache held a part")
        self.reused_tokens = counter("prompt_cache_reused_tokens", "Tokens of prompts not fed")
        self.kv_bytes = gauge("kv_bytes", "Bytes of the caches of running requests")
        self.kv_bytes_if_fp16 = gauge(
            "kv_bytes_if_fp16", "Bytes that mlx_lm's own caches would take for them in 16 bits"
        )
        self.prompt_cache_bytes = gauge("prompt_cache_bytes", "Bytes of the prompt cache")
        self.evicted_tokens = counter("evicted_tokens", "Tokens that the window has let go")

    def text(self) -> bytes:
        return generate_latest(self._registry)
