"""Functions of mlx_lm, replaced in place and put back exactly: the mechanism.

mlx_lm's modules, and users' own, bind ``make_prompt_cache`` and ``scaled_dot_product_attention``
by name at import. A new attribute in one module would not reach those copies. So the function
object stays and its ``__code__`` is swapped: every name that is bound to it, before or after,
sees the change. Several users (`patch`, `patched`, `make_prompt_cache`) hold a hook; it is
removed with the last.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any


class UnsupportedError(RuntimeError):
    """A version of mlx or mlx_lm that this package can't work with: one line, with the mend."""


class Hook:
    """One function of mlx_lm and what runs in its place.

    Args:
        function: The function of mlx_lm.
        replacement: A function with the same parameters; with ``needs``, of any. Its code runs
            with mlx_lm's globals, so it has to import what it needs.
        needs: Parameters that have to be there, in this order, whatever others are.

    Raises:
        UnsupportedError: if the parameters differ: this mlx_lm is not one that is supported.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        replacement: Callable[..., Any],
        needs: tuple[str, ...] = (),
    ) -> None:
        theirs, ours = (list(inspect.signature(f).parameters) for f in (function, replacement))
        if needs:
            theirs, ours = [name for name in theirs if name in needs], list(needs)
        if theirs != ours:
            raise UnsupportedError(
                f"this mlx-lm is not supported: {function.__module__}.{function.__name__} takes "
                f"({', '.join(theirs)}), not ({', '.join(ours)}); install mlx-lm 0.31.3 to 0.32.x"
            )
        self._function = function
        self._code = replacement.__code__
        self._original_code = function.__code__
        self.original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__

    def install(self) -> None:
        self._function.__code__ = self._code

    def remove(self) -> None:
        self._function.__code__ = self._original_code


Make = Callable[[], tuple[dict[str, Hook], list[tuple[Any, str, Any]]]]


class HookSet:
    """Hooks, and attributes added to modules, that come and go together.

    Attributes:
        make: Called once, at the first use; returns the hooks and (module, name, value) triples.
    """

    def __init__(self, make: Make | None = None) -> None:
        self.make = make
        self._lock = threading.RLock()
        self._holders: set[Any] = set()
        self._hooks: dict[str, Hook] = {}
        self._attributes: list[tuple[Any, str, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self._holders)

    def original(self, name: str) -> Callable[..., Any]:
        """mlx_lm's own function, whether or not it is hooked now."""
        self._prepare()
        return self._hooks[name].original

    def hold(self, holder: Any) -> None:
        """Install the hooks for ``holder``; again for the same one changes nothing."""
        with self._lock:
            self._prepare()
            if not self._holders:
                for hook in self._hooks.values():
                    hook.install()
                for module, name, value in self._attributes:
                    setattr(module, name, value)
            self._holders.add(holder)

    def release(self, holder: Any) -> None:
        """Give up ``holder``'s claim; the last one restores mlx_lm exactly."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.remove(holder)
            if self._holders:
                return
            for hook in self._hooks.values():
                hook.remove()
            for module, name, _ in self._attributes:
                delattr(module, name)

    def _prepare(self) -> None:
        with self._lock:
            if not self._hooks and self.make is not None:
                self._hooks, self._attributes = self.make()


# What our caches need of mlx_lm, whoever made them: `upstream.replacements` says what that is.
attention = HookSet()


def attention_hooked() -> bool:
    """Whether mlx_lm's attention accepts the handles that packed caches give out, now."""
    return attention.active
