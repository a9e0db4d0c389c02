"""The generation thread: requests in, batches stepped, answers out; no request stops the others.

It takes the place of mlx_lm's loop (`ResponseGenerator._generate`). Tokens, templates, sampling,
vision and what is served alone stay mlx_lm's.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from ..upstream.prompt_cache import PromptCache
from .answers import Answers, ClientGone, RequestError, checked, following, line
from .footprint import Footprint
from .jobs import Batch, Job
from .metrics import Metrics

# Tokens of prompts that are fed between two steps of running answers: benchmarks/server.py.
BESIDE = 256
_EVERY = 0.2  # seconds between two looks at the bytes in use


class Engine(mlx_server.ResponseGenerator):
    """mlx_lm's `ResponseGenerator` with a loop of its own.

    Args:
        provider: Loads models; whose ``cli_args`` are the server's.
        prompt_cache: Where prompts and answers are kept.
        policy: What is in force; None: mlx_lm's own caches.
        kv_memory: Bytes that running caches may take; None: no bound.

    Attributes:
        facts: The policy and what it covers, of the model that is loaded; None before.
        metrics: What is counted.
    """

    model_provider: Any
    prompt_cache: Any

    def __init__(
        self,
        provider: Any,
        prompt_cache: PromptCache,
        policy: KVCacheConfig | None = None,
        kv_memory: int | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.facts: dict[str, Any] | None = None
        self._policy, self._kv_memory = policy, kv_memory
        self._waiting: deque[Job] = deque()
        self._batches: list[Batch] = []
        self._numbers = 0
        self._samplers: dict[Any, Any] = {}
        self._next_look = 0.0
        self._started = threading.Event()
        self._start_error: Exception | None = None
        super().__init__(provider, prompt_cache)  # starts the thread

    def wait_until_loaded(self) -> None:
        """Return when the default model is there.

        Raises:
            Exception: what loading it raised.
        """
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def generate(
        self,
        request: Any,
        generation_args: Any,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[Any, Iterator[Any]]:
        """Queue a request, in the thread of its client.

        Returns:
            mlx_lm's context, and the responses as they come.

        Raises:
            RequestError: if there will be no answer; the iterator too.
        """
        answers = Answers(vars(request).pop("connection", None))
        self.requests.put((answers, request, generation_args))

        def get() -> Any:
            try:
                return self._await_response(answers)
            except RuntimeError as error:
                raise RequestError(503, str(error)) from None

        return checked(get()), following(get, progress_callback)

    # The thread

    def _generate(self) -> None:
        self._stream = mx.default_stream(mx.default_device())
        try:
            self.model_provider.load_default()
            if self.model_provider.model is not None:
                self._know()
        except Exception as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        if self._is_distributed:
            state: Any = mx.random.state
            seed: Any = mx.distributed.all_sum(state[0]).view(mx.uint64).item()
            mx.random.seed(seed)
        while not self._stop:
            try:
                self._turn()
            except Exception as error:
                logging.exception("the server's loop failed")
                for job in [*self._waiting, *self._jobs()]:
                    self._fail(job, error)
                self._waiting.clear()
                self._batches.clear()
        # Arrays are freed, and streams ended, in the thread that they are of.
        self._batches.clear()
        self.model_provider.reset()
        self.prompt_cache.trim_to(n_sequences=0)
        gc.collect()
        mx.clear_streams()

    def _turn(self) -> None:
        self._receive()
        self._let_go()
        while self._waiting and self._start_next():
            pass
        rounds = self._time_budget if self._is_distributed else (None,)
        for _ in rounds:
            for batch in list(self._batches):
                self._advance(batch)
            if not self._batches:
                break
        self._measure()

    def _receive(self) -> None:
        idle = not (self._waiting or self._batches)
        asked = self._next_request(timeout=0.1 if idle else None)
        while asked is not None:
            answers, *asked = asked
            self._numbers += 1
            if not isinstance(answers, Answers):
                answers = Answers()  # of another process of several: the first has the client
            self._waiting.append(Job(self._numbers, answers, *asked))
            asked = self._next_request()

    def _let_go(self) -> None:
        """End what nobody waits for."""
        jobs = [*self._waiting, *self._jobs()]
        over = [job.number for job in jobs if self._rank == 0 and job.over()]
        over = self._share_object(over or None)
        if not over:
            return
        gone = {job for job in jobs if job.number in over}
        self._waiting = deque(job for job in self._waiting if job not in gone)
        for batch in list(self._batches):
            self._leave(batch, gone)
        for job in gone:
            self._end(job, "gone")

    def _jobs(self) -> list[Job]:
        return [job for batch in self._batches for job in batch.jobs.values()]

    # A request starts

    def _start_next(self) -> bool:
        """Start the request that has waited longest; whether it is out of the way."""
        job = self._waiting[0]
        try:
            if self.model_provider.key(job.args.model) != self.model_provider.model_key:
                if self._batches:
                    return False  # theirs is another model
                self._load(job.args.model)
            if job.prompt is None:
                self._read(job)
            pictures = any(mlx_server._image_parts(job.request.messages))
            alone = pictures or not self._is_batchable(job.args)
            if not self._has_room(job) or (alone and self._batches):
                return False
        except RequestError as error:
            self._waiting.popleft()
            self._fail(job, error)
            return True
        self._waiting.popleft()
        if alone:
            self._serve_alone(job)
        else:
            with self._blamed(job):
                self._join(job, self._shared())
        return True

    def _load(self, wanted: Any) -> None:
        self.facts = None
        try:
            self.model_provider.load(wanted.model, wanted.adapter, wanted.draft)
            self._know()
        except Exception as error:
            self.model_provider.reset()
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
        self.facts = self._footprint.facts()
        print(self._footprint.line(), flush=True)

    def _read(self, job: Job) -> None:
        """Tokenise a request, and see that it can be served at all."""
        provider, args = self.model_provider, job.args
        tokenizer = provider.tokenizer
        try:
            prompt, segments, kinds, state, _ = self._tokenize(tokenizer, job.request, args)
            stop, text = self._make_state_machine(provider.model_key, tokenizer, args.stop_words)
        except Exception as error:
            raise RequestError(400, line(error)) from None
        if not prompt:
            raise RequestError(400, "the prompt is empty: give at least one token")
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

    def _has_room(self, job: Job) -> bool:
        """Whether a job may start now.

        Raises:
            RequestError: if it never may.
        """
        running = self._jobs()
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
        feeding = sum(batch.feeding for batch in self._batches)
        return len(running) < self.cli_args.decode_concurrency and feeding < self._prompts

    def _shared(self) -> Batch:
        shared = next((batch for batch in self._batches if batch.shared), None)
        return shared or self._new_batch(shared=True)

    def _new_batch(self, shared: bool) -> Batch:
        model = self.model_provider.model
        batch = Batch(model, self.cli_args, self._stream, self._prompts, shared)
        self._batches.append(batch)
        return batch

    def _join(self, job: Job, batch: Batch) -> None:
        key, tokens = self.model_provider.model_key, job.tokens
        caches, rest = self.prompt_cache.fetch_nearest_cache(key, tokens)
        count = len(tokens) - len(rest)
        if not job.begun:
            job.context.prompt_cache_count = job.reused = count
            job.counted = self._footprint.evicted(count)
            job.answers.put(job.context)
        batch.join(
            job,
            caches,
            count,
            samplers=self._sampler(job.args),
            logits_processors=mlx_server._make_logits_processors(job.args),
        )

    def _sampler(self, args: Any) -> Any:
        """One for all jobs that sample alike: mlx_lm samples for them at once then."""
        key = self.model_provider.model_key, astuple(args.sampling)
        if key not in self._samplers:
            if len(self._samplers) > 100:
                self._samplers.clear()
            made = mlx_server._make_sampler(args, self.model_provider.tokenizer)
            self._samplers[key] = made
        return self._samplers[key]

    def _serve_alone(self, job: Job) -> None:
        """What mlx_lm serves alone: a seed, a draft model, pictures, its own --kv-bits."""
        self.metrics.running.set(1)
        self.metrics.waiting.set(len(self._waiting))
        answers = _Alone(job)
        self._serve_single((answers, job.request, job.args), self._stream)
        job.reused = max(0, job.context.prompt_cache_count)
        self._end(job, answers.outcome)

    # A step

    def _advance(self, batch: Batch) -> None:
        decoding = any(job.decoding for job in self._jobs())
        try:
            prompts, steps = batch.next(BESIDE if decoding else None)
        except Exception as error:
            self._part(batch, error)
            return
        over: set[Job] = set()
        for response in prompts:
            job = batch.jobs[response.uid]
            with self._blamed(job, over):
                job.fed = job.reused + response.progress[0]
                job.answers.put(response.progress)
                if response.end_of_prompt:
                    job.decoding = True
                elif response.end_of_segment and job.kinds:
                    kind, *job.kinds = job.kinds
                    caches, tokens = batch.generator.extract_cache([response.uid])[response.uid]
                    self._keep(caches, tokens, kind)
        for response in steps:
            job = batch.jobs[response.uid]
            if job not in over:
                with self._blamed(job, over):
                    self._answer(job, response)
                if response.finish_reason is not None:
                    over.add(job)  # mlx_lm has let it go
                    del batch.jobs[response.uid]
        self._leave(batch, over)

    def _answer(self, job: Job, response: Any) -> None:
        tokenizer, reason = self.model_provider.tokenizer, response.finish_reason
        job.answered.append(response.token)
        top = max(0, job.args.top_logprobs)
        answer = mlx_server.Response(
            job.text(response.token, reason),
            response.token,
            # It costs a read of the device's memory, so only for those who ask.
            response.logprobs[response.token].item() if job.args.logprobs else 0.0,
            reason,
            mlx_server._format_top_logprobs(response.logprobs, top, tokenizer),
        )
        if reason is not None:
            self._keep(response.prompt_cache, response.all_tokens, "assistant")
        job.answers.put(answer)
        if reason is not None:
            job.answers.put(None)
            self._end(job, reason)

    def _keep(self, caches: list[Any], tokens: list[int], kind: str) -> None:
        key = self.model_provider.model_key
        self.prompt_cache.insert_cache(key, tokens[:], caches, cache_type=kind, counted=True)

    def _leave(self, batch: Batch, jobs: set[Job]) -> None:
        try:
            batch.leave(jobs)
        except Exception as error:
            for uid in [uid for uid, job in batch.jobs.items() if job in jobs]:
                del batch.jobs[uid]
            self._part(batch, error)
        else:
            if not batch.jobs:
                self._close(batch)

    def _part(self, batch: Batch, error: Exception) -> None:
        """A step of a batch has failed, for one job or for all: each goes on in its own.

        What a job's caches hold is not known after that: its tokens are fed anew.
        """
        jobs = list(batch.jobs.values())
        self._close(batch)
        mx.clear_cache()
        if len(jobs) == 1:
            self._fail(jobs[0], error)
            return
        logging.error(f"A step of {len(jobs)} requests failed ({line(error)}): each goes on alone")
        for job in jobs:
            with self._blamed(job):
                self._join(job, self._new_batch(shared=False))

    def _close(self, batch: Batch) -> None:
        if batch in self._batches:
            self._batches.remove(batch)
        batch.close()

    # A request ends

    @contextmanager
    def _blamed(self, job: Job, over: set[Job] | None = None) -> Iterator[None]:
        """What fails here ends this job, and no other."""
        try:
            yield
        except Exception as error:
            self._fail(job, error)
            if over is not None:
                over.add(job)

    def _fail(self, job: Job, error: Exception | RequestError) -> None:
        refused = isinstance(error, RequestError)
        status = error.status if isinstance(error, RequestError) else 500
        text = str(error) if refused else line(error)
        say = logging.warning if refused else logging.error
        say(f"Request {job.number} ends with {status}: {text}")
        logging.debug("Where:", exc_info=error)
        job.answers.put(RequestError(status, text))
        self._end(job, "refused" if refused else "failed")

    def _end(self, job: Job, outcome: str) -> None:
        metrics = self.metrics
        metrics.finished.labels(outcome).inc()
        metrics.generated_tokens.inc(len(job.answered))
        if job.prompt is not None and outcome != "refused":
            metrics.prompt_tokens.inc(len(job.prompt))
            metrics.reused_tokens.inc(job.reused)
            metrics.hits.inc(job.reused > 0)
            self._count_evicted(job)

    def _count_evicted(self, job: Job) -> None:
        now = self._footprint.evicted(job.fed + len(job.answered))
        self.metrics.evicted_tokens.inc(max(0, now - job.counted))
        job.counted = max(now, job.counted)

    def _measure(self) -> None:
        """Bring the figures up to date; bytes now and then, since they take a walk."""
        metrics, jobs = self.metrics, self._jobs()
        metrics.running.set(len(jobs))
        metrics.waiting.set(len(self._waiting) + self.requests.qsize())
        if jobs and time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _EVERY
        metrics.kv_bytes.set(sum(batch.nbytes for batch in self._batches))
        lengths = [job.fed + len(job.answered) for job in jobs]
        metrics.kv_bytes_if_fp16.set(sum(map(self._footprint.fp16_bytes, lengths)) if jobs else 0)
        metrics.prompt_cache_bytes.set(self.prompt_cache.nbytes)
        for job in jobs:
            self._count_evicted(job)


class _Alone:
    """The answers of a job that mlx_lm's `_serve_single` computes, seen as they pass."""

    def __init__(self, job: Job) -> None:
        self.outcome = "gone"
        self._job = job

    def put(self, item: Any) -> None:
        job = self._job
        if isinstance(item, ClientGone):
            return
        if isinstance(item, Exception):
            logging.error(f"Request {job.number} ends with 500: {line(item)}")
            self.outcome = "failed"
        elif job.answers.gone():
            raise ClientGone  # which ends the work, and comes back
        elif isinstance(item, mlx_server.GenerationContext):
            job.context, job.fed = item, len(item.prompt)
        elif isinstance(item, mlx_server.Response):
            job.answered.append(item.token)
            self.outcome = item.finish_reason or self.outcome
        job.answers.put(item)
