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
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx
from mlx_lm import server as mlx_server

from ..config import KVCacheConfig
from ..upstream.prompt_cache import PromptCache
from .admission import Admission
from .answers import Answers, ClientGone, RequestError, checked, following, line
from .jobs import Alone, Batch, Job
from .metrics import Metrics

# Tokens of prompts that are fed between two steps of running answers: benchmarks/server.py.
BESIDE = 256
_EVERY = 0.2  # seconds between two looks at the bytes in use


class Engine(Admission):
    """mlx_lm's `ResponseGenerator` with a loop of its own.

    Args:
        provider: Loads models; whose ``cli_args`` are the server's.
        prompt_cache: Where prompts and answers are kept.
        policy: What is in force; None: mlx_lm's own caches.
        kv_memory: Bytes that running caches may take; None: no bound.

    Attributes:
        metrics: What is counted.
    """

    prompt_cache: Any

    def __init__(
        self,
        provider: Any,
        prompt_cache: PromptCache,
        policy: KVCacheConfig | None = None,
        kv_memory: int | None = None,
    ) -> None:
        self.metrics = Metrics()
        self._waiting: deque[Job] = deque()
        self._batches: list[Batch] = []
        self._next_look = 0.0
        self._started = threading.Event()
        self._start_error: Exception | None = None
        super().__init__(provider, prompt_cache, policy, kv_memory)  # starts the thread

    @property
    def serves(self) -> bool:
        """Whether clients come to this process, of several that compute together."""
        return self._rank == 0

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
            self._start_error, self._stop = error, True
        finally:
            self._started.set()
        if self._is_distributed and not self._stop:
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
                time.sleep(0.1)  # or the log fills, if it is nobody's
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
            job.answers.put(ClientGone())  # its thread waits still
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
            if not self._has_room(job, self._jobs()) or (alone and self._batches):
                return False
        except (RequestError, Exception) as error:
            self._waiting.popleft()
            self._fail(job, error)
            return True
        self._waiting.popleft()
        with self._blamed(job):
            if alone:
                self._serve_alone(job)
            else:
                self._join(job, self._shared())
        return True

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
        if job.context.prompt_cache_count < 0:  # it starts for the first time
            job.context.prompt_cache_count = job.reused = count
            self._count_prompt(job)
            job.answers.put(job.context)
        batch.join(
            job,
            caches,
            count,
            samplers=self._sampler(job.args),
            logits_processors=mlx_server._make_logits_processors(job.args),
        )

    def _serve_alone(self, job: Job) -> None:
        """What mlx_lm serves alone: a seed, a draft model, pictures, its own --kv-bits."""
        self.metrics.running.set(1)
        self.metrics.waiting.set(len(self._waiting))
        answers = Alone(job)
        self._serve_single((answers, job.request, job.args), self._stream)
        self._reseed()
        job.reused = max(0, job.context.prompt_cache_count)
        self._count_prompt(job)
        self.metrics.generated_tokens.inc(len(job.answered))
        self._end(job, answers.outcome)

    # A step

    def _advance(self, batch: Batch) -> None:
        decoding = any(job.decoding for job in self._jobs())
        try:
            prompts, steps = batch.next(BESIDE if decoding else None)
        except Exception as error:
            self._part(batch, error)
            return
        self.metrics.generated_tokens.inc(len(steps))
        over: set[Job] = set()
        for response in prompts:
            job = batch.jobs[response.uid]
            with self._blamed(job, over):
                job.fed = job.reused + response.progress[0]
                job.answers.put(response.progress)
                if response.end_of_prompt:
                    job.decoding = True
                elif response.end_of_segment and job.due:
                    kind, *job.due = job.due
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
            self._part(batch, error, blame=False)
        else:
            if not batch.jobs:
                self._close(batch)

    def _part(self, batch: Batch, error: Exception, blame: bool = True) -> None:
        """A batch has failed, for one job or for all: each goes on in its own.

        What a job's caches hold is not known after that: its tokens are fed anew.

        Args:
            batch: Of which nothing is used any more.
            error: What it raised.
            blame: Whether a job that was in it alone is the cause.
        """
        jobs = list(batch.jobs.values())
        self._close(batch)
        self._reseed()
        mx.clear_cache()
        if blame and len(jobs) == 1:
            self._fail(jobs[0], error)
            return
        logging.error(f"A batch failed ({line(error)}): its {len(jobs)} requests go on alone")
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
        self._end(job, "refused" if refused else "failed")
        with suppress(Exception):  # it may be what failed
            job.answers.put(RequestError(status, text))

    def _end(self, job: Job, outcome: str) -> None:
        self.metrics.finished.labels(outcome).inc()
        if job.fed:
            self._count_evicted(job)

    def _count_prompt(self, job: Job) -> None:
        self.metrics.prompt_tokens.inc(len(job.prompt or []))
        self.metrics.reused_tokens.inc(job.reused)
        self.metrics.hits.inc(job.reused > 0)
        job.counted = self._footprint.evicted(job.reused)

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
