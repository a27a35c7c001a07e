"""What a module's forward leaves behind in the module: a replay does not do that again. Buffers that it binds anew, and
attributes from one forward to the next, would stay in a graph as they were at capture."""
from __future__ import annotations

from typing import Any, Callable

from ._need import torch
from .attributes import Attribute, Skips, attributes_of, same
from .build import named_modules


class _Unset:
    """In place of an attribute, to see whether forward reads it before it writes it: every use of it raises."""


class Habits:
    """Made ahead of a module's first forward; `settle` behind it, for what is made when it is first needed; `broken`
    behind all others. `knows(class)`: its attributes are known to be no part of its results."""

    def __init__(self, module: "torch.nn.Module", name: str, knows: Callable[[type], bool]) -> None:
        self._named = named_modules(module, name)
        self._knows = knows
        self._first, self._first_buffers = self._seen(), self._bound()
        self._settled, self._buffers = self._first, self._first_buffers

    def _seen(self) -> dict[str, Attribute]:
        return {a.name: a for a in attributes_of(self._named)}

    def _bound(self) -> list[tuple[str, dict[str, Any], str, Any]]:
        return [(f"{n}.{key}", m._buffers, key, tensor) for n, m in self._named for key, tensor in m._buffers.items()]

    def settle(self) -> None:
        self._settled, self._buffers = self._seen(), self._bound()

    def own(self) -> frozenset[str]:
        """Names of attributes that some forward wrote."""
        return frozenset(_differing(self._first, self._seen()))

    def broken(self, forward: Callable[[], Any]) -> str:
        """In words, what a replay would not do; "": nothing. Then buffers and attributes are again what they were at
        first. `forward` is done once more where it takes that to see."""
        told = self._told(forward)
        if told:
            for _, owner, key, tensor in self._first_buffers:
                owner[key] = tensor
            for a in self._first.values():
                if not a.is_content:
                    a.owner[a.key] = a.value
        return told

    def _told(self, forward: Callable[[], Any]) -> str:
        for name, owner, key, tensor in self._buffers:
            if owner.get(key) is not tensor:
                return f"{name} is a buffer that forward binds anew, which no replay does (graph.address)"
        kinds = {id(m.__dict__): type(m) for _, m in self._named}
        differing = _differing(self._settled, self._seen())
        changed = [a for name, a in self._settled.items()
                   if name in differing and not self._knows(kinds[id(a.owner)])]
        return _read_first(changed, forward) if changed else ""


def _read_first(changed: list[Attribute], forward: Callable[[], Any]) -> str:
    """What forward only writes is harmless: no forward sees in it the one before."""
    settled = [a.owner.get(a.key, a.value) if a.is_content else a.value for a in changed]
    for a in changed:
        a.owner[a.key] = _Unset()
    try:
        forward()
    except Exception:
        return (f"{', '.join(a.name for a in changed)} goes from one forward to the next, which no replay does "
                "(graph.constant)")
    finally:
        for a, value in zip(changed, settled):
            a.owner[a.key] = value
    return ""


def _differing(then: dict[str, Attribute], now: dict[str, Attribute]) -> set[str]:
    """Changed, gone, or new."""
    return {name for name in {**then, **now}
            if name not in then or name not in now or not same(now[name].value, then[name].value)}
