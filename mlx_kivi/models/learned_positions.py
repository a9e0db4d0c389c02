"""Learned absolute positions: what happens where a model's table of them ends.

.tinygpt, gpt2 and gpt_bigcode models have learned a table of positions and know none beyond it.
With a window in force the text goes on: each kept token takes its place in the cache as its
position, as in StreamingLLM (arXiv:2309.17453, section 3.2). When the table is full, the caches
are emptied and the sinks and the last part of the window are fed again from position 0 on.
Without a window the end of the table is an error, `PositionTableFull`. No position is clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from .. import hooks
from ..batch_cache import BatchCache
from ..config import KVCacheConfig
from ..quantized_streaming_cache import QuantizedStreamingCache

# By the module of a model's class: where its tables of positions and of tokens are.
_TABLES = {
    "mlx_lm.models.gpt2": ("model.wpe", "model.wte"),
    "mlx_lm.models.gpt_bigcode": ("transformer.wpe", "transformer.wte"),
    "mlx_kivi.tinygpt.model": ("position_embedding", "token_embedding"),
}


class PositionTableFull(ValueError):
    """The model has learned no position as late as the one asked for."""

    def __init__(self, position: int, size: int, mend: str | None = None):
        mend = mend or (
            "shorten the prompt, generate fewer tokens, or stream with a window "
            "(--streaming-llm-window M)"
        )
        super().__init__(
            f"position {position} is beyond the model's learned position table (ctx = {size}, "
            f"positions 0 to {size - 1}): {mend}"
        )


def table_size(model: Any) -> int | None:
    """Positions that a model has learned; None for models without such a table."""
    return _size(model) if _modules(model) else None


def _modules(model: Any) -> list[str]:
    """The modules of a model's class, and of those that it derives from, that are in `_TABLES`."""
    return [c.__module__ for c in type(model).__mro__ if c.__module__ in _TABLES]


def _size(model: Any) -> int:
    """Positions that a model with such a table has learned."""
    return _rows(model, _TABLES[_modules(model)[0]][0])


def _rows(model: Any, path: str) -> int:
    for name in path.split("."):
        model = getattr(model, name)
    return model.weight.shape[0]


class RestartingCache(QuantizedStreamingCache):
    """The first layer's cache where positions are learned: it knows the ids of its tokens.

    ``offset`` is the position of the next token, counted from the last restart; ``seen`` counts
    every token.
    """

    def __init__(
        self, config: KVCacheConfig | None = None, *, packed_attention: bool = False
    ) -> None:
        super().__init__(config, packed_attention=packed_attention)
        self._dropped = 0

    def reset(self) -> None:
        super().reset()
        self._ids: list[mx.array] = []  # [B, n] each: the tokens at positions 0 .. offset - 1
        self._known = 0

    @property
    def seen(self) -> int:
        return self._dropped + self.offset

    def remember(self, ids: mx.array) -> None:
        """Note the ids [B, L] of tokens that are fed next."""
        if self._known > self.offset:  # trimmed since
            self._ids = [self.ids()]
            self._known = self.offset
        if self._known == self.offset:
            self._ids = [*self._ids, ids]  # a copy of the cache may share the list
            self._known += ids.shape[1]

    def ids(self) -> mx.array:
        """The ids [B, offset] of all tokens since the last restart, int32.

        Raises:
            ValueError: if some came as embeddings.
        """
        if self._known < self.offset:
            raise ValueError("tokens that came as embeddings can't be fed again")
        if not self._ids:
            return mx.zeros((1, 0), mx.int32)
        ids = mx.concatenate([x.astype(mx.int32) for x in self._ids], axis=1)
        return ids[:, : self.offset]

    def refed(self, size: int) -> int:
        """Tokens beside the sinks that are fed again when a table of ``size`` is full."""
        places = size - self.plan.sink
        window = places if self.plan.window is None else min(self.plan.window, places)
        return min(window, places - (window + 1) // 2)

    def restart(self, size: int) -> mx.array:
        """Empty the cache, its table of ``size`` positions being full.

        Returns:
            The ids [B, n] to feed again: the sinks, then as much of the window as leaves room for
            half a window of new tokens.
        """
        try:
            ids = self.ids()
        except ValueError as error:
            raise PositionTableFull(size, size, str(error)) from None
        sink, last = self.plan.sink, self.refed(size)
        kept = mx.concatenate([ids[:, :sink], ids[:, size - last :]], axis=1)
        self._dropped += size - kept.shape[1]
        self.reset()
        return kept

    # After a restart, what came before the tokens fed again is gone.

    def is_trimmable(self) -> bool:
        return not self._dropped and super().is_trimmable()

    def can_trim(self, n: int) -> bool:
        if self._dropped and n > self.offset - self.plan.sink:
            return False
        return super().can_trim(n)

    def _mergeable(self) -> bool:
        return False  # mlx_lm has no counterpart of a cache that restarts

    # The state of the base, then the ids and the count of tokens that restarts left behind.

    def _save(self) -> list[mx.array]:
        return [*super()._save(), self.ids(), mx.array([self._dropped], mx.int64)]

    def _load(self, state: list[mx.array]) -> None:
        base = QuantizedStreamingCache.from_state(state[:-2])
        ids, dropped = state[-2:]
        batch = 1 if base.keys is None else base.keys.shape[0]
        if ids.shape != (batch, base.offset) or ids.dtype != mx.int32:
            raise ValueError(f"the ids of the tokens are {ids.shape} of {ids.dtype}")
        if dropped.shape != (1,) or dropped.dtype != mx.int64 or int(dropped) < 0:
            raise ValueError("the count of tokens before the last restart is broken")
        own = {"_ids": [ids], "_known": base.offset, "_dropped": int(dropped)}
        self.__dict__ = vars(base) | own


def restarting(model: Any, config: KVCacheConfig, caches: list[Any]) -> list[Any]:
    """Let a policy's window reach beyond the model's table of positions, if it has one.

    Raises:
        ValueError: if sinks and window together are more than the table.
    """
    size = table_size(model)
    if size is None or config.window is None:
        return caches
    if config.sink + config.window > size:
        raise ValueError(
            f"window={config.window} and sink={config.sink} are more than the model's learned "
            f"position table (ctx = {size}): use window={size - config.sink} or less"
        )
    first = caches[0]
    return [
        RestartingCache(first.config, packed_attention=first.packed_attention),
        *caches[1:],
    ]


def forward(
    model: Any, run: Callable[[mx.array, Any], mx.array], inputs: mx.array, cache: Any
) -> mx.array:
    """What a model with a table of positions does in place of its own ``__call__``.

    Args:
        run: The model's own, from token ids [B, L] and caches to logits [B, L, V].
        inputs: Token ids [B, L].
        cache: One cache a layer, or None.

    Raises:
        PositionTableFull: at the end of the table, unless the caches restart there.
    """
    first = cache[0] if cache is not None else None
    if not isinstance(first, RestartingCache):
        spare = check(model, inputs.shape, first)
        return run(inputs, cache) if spare is None else spare
    size = _size(model)
    outputs, start = [], 0
    while start < inputs.shape[1]:
        again = None
        if first.offset == size:
            again = first.restart(size)
            for layer in cache[1:]:
                layer.reset()
        known = 0 if again is None else again.shape[1]
        part = inputs[:, start : start + size - first.offset - known]
        start += part.shape[1]
        if again is not None:
            part = mx.concatenate([again, part], axis=1)
        first.remember(part)
        outputs.append(run(part, cache)[:, known:])
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def check(model: Any, shape: tuple[int, ...], first: Any) -> mx.array | None:
    """Refuse what the table has no positions for.

    Args:
        shape: [B, L] of the tokens.
        first: The first layer's cache, or None: the tokens that come before them.

    Returns:
        None, or what `LookAhead` answers instead of the model.

    Raises:
        PositionTableFull: names the last position asked for.
    """
    size = _size(model)
    offset = 0 if first is None else first.offset
    latest = int(offset.max()) if isinstance(offset, mx.array) else offset
    last = latest + shape[1] - 1
    if last < size:
        return None
    ahead = _look_ahead.get()
    if ahead is None or shape[1] > 1 or latest > size:
        raise PositionTableFull(last, size)
    ahead.used = True
    return mx.zeros((*shape, _rows(model, _TABLES[_modules(model)[0]][1])))


def room(model: Any, caches: list[Any] | None) -> int | None:
    """Positions that are left; None where there is no end: no table, or caches that restart."""
    size = table_size(model)
    if size is None or (caches and isinstance(caches[0], RestartingCache)):
        return None
    return size - (caches[0].offset if caches else 0)


def tokens_to_come(model: Any, caches: list[Any] | None, prompt: int) -> int | None:
    """Tokens that can follow a prompt of ``prompt`` tokens; None where there is no end.

    They are one more than the positions left: the last one has no place and needs none.

    Raises:
        PositionTableFull: if the prompt does not fit.
    """
    left = room(model, caches)
    if left is None:
        return None
    if prompt > left:
        size = _size(model)
        mend = f"shorten the --prompt of {prompt} tokens, or stream with --streaming-llm-window M"
        raise PositionTableFull(size - left + prompt - 1, size, mend)
    return left - prompt + 1


def describe(model: Any, caches: list[Any]) -> str | None:
    """One line for people: what will happen at the table's end; None without a table."""
    size = table_size(model)
    if size is None:
        return None
    about = f"Learned positions: the table ends at {size} tokens, "
    if not isinstance(caches[0], RestartingCache):
        return about + "and the text with it"
    first = caches[0]
    return about + f"then {first.plan.sink} sinks and the last {first.refed(size)} are fed again"


def ended(model: Any) -> str:
    """One line for people: why the text ends."""
    return (
        f"Stopped at the end of the model's learned position table (ctx = {_size(model)}): "
        "--streaming-llm-window M goes on"
    )


class LookAhead:
    """``used``: whether a token was asked for that has no place in the table."""

    used = False


_look_ahead: ContextVar[LookAhead | None] = ContextVar("mlx_kivi_look_ahead", default=None)


@contextmanager
def look_ahead() -> Iterator[LookAhead]:
    """For mlx_lm's generation, which calls the model once more than it shows tokens.

    In the ``with`` block, the first call beyond the table gets logits of zero, not an error, so
    that the last token of the table is delivered. Generate no more than `room` allows.
    """
    ahead = LookAhead()
    token = _look_ahead.set(ahead)
    try:
        yield ahead
    finally:
        _look_ahead.reset(token)


def dispatch_call(model: Any, inputs: mx.array, cache: Any) -> mx.array:
    """``__call__`` of a hooked model."""
    module = _modules(model)[0]
    own = hooks.attention.original(module)
    if module.endswith("gpt_bigcode") and cache is not None and isinstance(cache[0], BatchCache):
        own = _bigcode_in_a_batch
    return forward(model, lambda ids, caches: own(model, ids, caches), inputs, cache)


def _bigcode_in_a_batch(model: Any, inputs: mx.array, cache: list[BatchCache]) -> mx.array:
    """gpt_bigcode, whose own code has one position for all rows."""
    inner = model.transformer
    positions = cache[0].offset[:, None] + mx.arange(inputs.shape[1])
    hidden = inner.wte(inputs) + inner.wpe(positions)
    mask = cache[0].make_mask(inputs.shape[1])
    for layer, of_layer in zip(inner.h, cache, strict=True):
        hidden = layer(hidden, mask, cache=of_layer)
    out = inner.ln_f(hidden)
    tied = model.args.tie_word_embeddings
    return inner.wte.as_linear(out) if tied else model.lm_head(out)
