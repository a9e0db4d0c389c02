"""Which requests may start, and what is known of the model that serves them."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Any

import mlx.core as mx
from mlx_lm import server as mlx_server
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ..config import TRIM_MARGIN, KVCacheConfig
from ..models import learned_positions
from ..models.architectures import ALONE, OWN_ALONE, module_names, own_caches
from ..models.calibration import leaves
from ..models.factory import ours
from ..report import size
from .answers import RequestError, line
from .footprint import Footprint
from .jobs import Job
from .sampling import rehearse


class Admission(mlx_server.ResponseGenerator):
    """The part of the engine that loads models, reads requests and refuses them.

    Attributes:
        facts: The policy and what it covers, of the model that is loaded; None before.
    """

    model_provider: Any

    def __init__(
        self,
        provider: Any,
        prompt_cache: Any,
        policy: KVCacheConfig | None,
        kv_memory: int | None,
    ) -> None:
        self.facts: dict[str, Any] | None = None
        self._policy, self._kv_memory = policy, kv_memory
        self._samplers: dict[Any, Any] = {}
        self._numbers = 0
        super().__init__(provider, prompt_cache)  # starts the thread

    def _load(self, wanted: Any) -> None:
        before = self.model_provider.model_key
        try:
            self.model_provider.load(wanted.model, wanted.adapter, wanted.draft)
            self._know()
        except Exception as error:
            if self.model_provider.model_key != before:  # by halves
                self.model_provider.reset()
                self.facts = None
            raise RequestError(404, line(error)) from None

    def _know(self) -> None:
        """Find what the caches of the model that was loaded are like, and say it."""
        provider = self.model_provider
        models = [m for m in (provider.model, provider.draft_model) if m is not None]
        self._caches = [make_prompt_cache(model) for model in models]
        self._footprint = Footprint(zip(models, self._caches, strict=True), self._policy)
        packed = list(ours(self._caches[0]))
        alone = ALONE if packed else OWN_ALONE
        batches = alone.isdisjoint(module_names(provider.model))
        batches = batches and all(getattr(cache, "batches", True) for cache in packed)
        provider.is_batchable = provider.is_batchable and batches
        # Padding would go into the states of recurrent layers: their prompts are fed one by one.
        states = any(isinstance(own, ArraysCache) for own in leaves(own_caches(provider.model)))
        self._prompts = 1 if states else self.cli_args.prompt_concurrency
        shown = provider.model(mx.array([[0]]), cache=own_caches(provider.model))  # not computed
        self._logits = mx.zeros((1, shown.shape[-1]), shown.dtype)
        self.facts = self._footprint.facts()
        print(self._footprint.line(), flush=True)

    def _read(self, job: Job) -> None:
        """Tokenise a request, and see that it can be served at all."""
        provider, args = self.model_provider, job.args
        tokenizer = provider.tokenizer
        try:
            prompt, segments, kinds, state, _ = self._tokenize(tokenizer, job.request, args)
            if not all(isinstance(token, int) for token in prompt):
                raise ValueError("the prompt is not one text")
            stop, text = self._make_state_machine(provider.model_key, tokenizer, args.stop_words)
        except Exception as error:
            raise RequestError(400, line(error)) from None
        if not prompt:
            raise RequestError(400, "the prompt is empty: give at least one token")
        try:
            rehearse(args, prompt, self._logits, self._sampler(args))
        except Exception as error:
            self._reseed()
            raise RequestError(400, line(error)) from None
        packed = any(ours(self._caches[0]))
        if provider.draft_model is not None and packed and args.num_draft_tokens >= TRIM_MARGIN:
            raise RequestError(
                400,
                f"num_draft_tokens {args.num_draft_tokens}: use {TRIM_MARGIN - 1} or fewer, which "
                "a packed or bounded cache can take back",
            )
        try:
            caches = self._caches[0]
            end = learned_positions.tokens_to_come(provider.model, caches, len(prompt))
        except learned_positions.PositionTableFull as error:
            raise RequestError(400, str(error)) from None
        job.limit = args.max_tokens = args.max_tokens if end is None else min(args.max_tokens, end)
        job.segments, job.kinds, job.stop_sequences = segments, list(kinds), stop
        job.detokenizer = tokenizer.detokenizer
        job.context = mlx_server.GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text,
            initial_state=state,
            prompt=prompt,
        )
        job.prompt = prompt

    def _reseed(self) -> None:
        """Make randomness usable: what fails as mlx compiles it leaves a state of no value."""
        mx.random.seed(self._numbers if self._is_distributed else time.time_ns())

    def _has_room(self, job: Job, running: list[Job]) -> bool:
        """Whether a job may start now.

        Raises:
            RequestError: if it never may.
        """
        if self._kv_memory is not None:
            need = self._footprint.bytes(job.longest)
            if need > self._kv_memory:
                raise RequestError(
                    400,
                    f"{len(job.prompt or []):,} tokens of prompt and max_tokens {job.limit:,} take "
                    f"{size(need)} ({need} bytes) of KV cache, --kv-memory allows "
                    f"{size(self._kv_memory)} ({self._kv_memory} bytes): ask for fewer tokens",
                )
            together = [one.longest for one in (*running, job)]
            if self._footprint.batch_bytes(together) > self._kv_memory:
                return False
        feeding = sum(not one.decoding for one in running)
        return len(running) < self.cli_args.decode_concurrency and feeding < self._prompts

    def _sampler(self, args: Any) -> Any:
        """One for all jobs that sample alike: mlx_lm samples for them at once then."""
        key = self.model_provider.model_key, astuple(args.sampling)
        if key not in self._samplers:
            if len(self._samplers) > 100:
                self._samplers.clear()
            made = mlx_server._make_sampler(args, self.model_provider.tokenizer)
            self._samplers[key] = made
        return self._samplers[key]
