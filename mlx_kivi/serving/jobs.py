"""A request from its arrival to its end, and the batches in which requests are computed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from mlx_lm import server as mlx_server
from mlx_lm.generate import BatchGenerator

from .answers import ClientGone, line

_LEAST = 32  # tokens of a prompt that are fed at once, at least


@dataclass(eq=False)
class Job:
    """A request.

    answers: where its thread waits; request, args: mlx_lm's; prompt: tokens, None until they
    are known; segments, kinds: parts of the prompt, at whose ends caches are kept, and as what;
    due: kinds of those that are yet to be fed; limit: tokens to generate at most; answered:
    generated so far; decoding: whether the prompt has been fed; fed: tokens of it that have been,
    ``reused`` ones included; counted: tokens that the figures know to be evicted.
    """

    number: int
    answers: Any
    request: Any
    args: Any
    prompt: list[int] | None = None
    segments: list[list[int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    due: list[str] = field(default_factory=list)
    limit: int = 0
    context: Any = None
    detokenizer: Any = None
    stop_sequences: Any = None
    answered: list[int] = field(default_factory=list)
    decoding: bool = False
    fed: int = 0
    reused: int = 0
    counted: int = 0

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [*(self.prompt or []), *self.answered]

    @property
    def longest(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt or []) + self.limit

    def over(self) -> bool:
        """Whether nobody waits for it: its thread has ended, or the client is gone."""
        stopped = self.context is not None and self.context._should_stop
        return stopped or self.answers.gone()

    def text(self, token: int, reason: str | None) -> str:
        """What one more token adds to the text. A token that stops it is not part of it."""
        if reason != "stop":
            self.detokenizer.add_token(token)
        if reason is not None:
            self.detokenizer.finalize()
        return self.detokenizer.last_segment

    def left(self, count: int) -> list[list[int]]:
        """The prompt's segments without its first ``count`` tokens; for a prompt that was begun
        once, and all that was generated since, one. Kinds that are due are theirs."""
        self.due = [] if self.answered else self.kinds
        if self.answered:
            return [self.tokens[count:]]
        segments = []
        for segment in self.segments:
            if count >= len(segment):
                count -= len(segment)
                self.due = self.due[1:]
            else:
                segments.append(segment[count:])
                count = 0
        return segments


class Resumed:
    """Stop sequences for an answer of which a part has been generated elsewhere."""

    def __init__(self, sequences: Any, answered: list[int]) -> None:
        self._sequences, self._answered = sequences, answered

    def matcher(self) -> Any:
        matcher = self._sequences.matcher()
        for token in self._answered:
            matcher.advance(token)
        return matcher


class Batch:
    """Jobs that are computed together.

    Args:
        model: mlx_lm's.
        args: The server's.
        stream: mlx's, of the generation thread.
        prompts: How many may be fed at a time.
        shared: Whether other jobs may join.
    """

    def __init__(self, model: Any, args: Any, stream: Any, prompts: int, shared: bool) -> None:
        self.shared = shared
        self.jobs: dict[int, Job] = {}
        self._step_size = args.prefill_step_size
        self.generator = BatchGenerator(
            model,
            completion_batch_size=args.decode_concurrency,
            prefill_batch_size=prompts,
            prefill_step_size=args.prefill_step_size,
            stream=stream,
        )

    def close(self) -> None:
        self.generator.close()
        self.jobs.clear()

    @property
    def feeding(self) -> int:
        """Jobs whose prompts are being fed."""
        return sum(not job.decoding for job in self.jobs.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, 0 if they are of a kind that does not tell."""
        try:
            return self.generator.prompt_cache_nbytes
        except NotImplementedError:
            return 0

    def join(self, job: Job, caches: list[Any] | None, count: int, **given: Any) -> None:
        """Add a job of which ``caches`` hold the first ``count`` tokens."""
        held: list[Any] = [caches]
        stop: Any = job.stop_sequences
        if job.answered:
            stop = Resumed(stop, job.answered)
        (uid,) = self.generator.insert_segments(
            segments=[job.left(count)],
            max_tokens=[job.limit - len(job.answered)],
            caches=held,
            all_tokens=[job.tokens[:count]],
            stop_sequences=[stop],
            **{name: [value] for name, value in given.items()},
        )
        self.jobs[uid] = job
        job.decoding = False

    def leave(self, jobs: set[Job]) -> None:
        """Free the rows of jobs that do not go on."""
        uids = [uid for uid, job in self.jobs.items() if job in jobs]
        if uids:
            self.generator.remove(uids)
        for uid in uids:
            del self.jobs[uid]

    def next(self, beside: int | None) -> tuple[list[Any], list[Any]]:
        """A step for all that decode, and a part of the prompts of the others.

        Args:
            beside: Tokens of prompts to feed at once beside running answers; None: none runs.
        """
        step = self._step_size
        if beside is not None:
            step = min(step, max(_LEAST, beside // max(1, self.feeding)))
        self.generator.prefill_step_size = step
        return self.generator.next()


class Alone:
    """The answers of a job that mlx_lm's `_serve_single` computes, seen as they pass."""

    def __init__(self, job: Job) -> None:
        self.outcome = "gone"
        self._job = job

    def put(self, item: Any) -> None:
        job = self._job
        if isinstance(item, ClientGone):
            pass
        elif isinstance(item, Exception):
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
