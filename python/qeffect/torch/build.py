"""What a module was made of when graphs of it were captured, which replay that from then on, whatever it becomes."""
from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Callable, Optional

from .._seal import Places
from ._need import torch

_trains: Callable[[Any], bool] = attrgetter("requires_grad")
_PARTS = {"_modules": "modules", "_parameters": "parameters", "_buffers": "buffers", "_forward_hooks": "hooks",
          "_forward_pre_hooks": "hooks", "_backward_hooks": "hooks", "_backward_pre_hooks": "hooks"}


@dataclass(frozen=True)
class Fact:
    """owner[key] was `value` (...: there was no such key); where key is None, owner had `value` keys. `rule`: what of
    the seal another value breaks, "constant" or "mode". `words`: how to tell it, of the value now and then."""

    owner: dict[str, Any]
    key: Optional[str]
    value: Any
    rule: str
    words: str

    def now(self) -> Any:
        return len(self.owner) if self.key is None else self.owner.get(self.key, ...)

    def holds(self) -> bool:
        now = self.now()
        return now is self.value or (self.key is None and now == self.value)

    def told(self) -> tuple[str, str]:
        return self.rule, self.words.format(now=self.now(), then=self.value)


class Build:
    """Modules by name, how much each has of everything, its forward, its mode, and which parameters train. Where
    parameters and buffers lie is the seal's."""

    def __init__(self, module: "torch.nn.Module", name: str) -> None:
        named = [(".".join(part for part in (name, path) if part), m) for path, m in module.named_modules()]
        self._facts = _facts(named)
        parameters = [(f"{n}.{key}", p) for n, m in named for key, p in m._parameters.items() if p is not None]
        self._names, self._parameters = [n for n, _ in parameters], [p for _, p in parameters]
        self._trained = list(map(_trains, self._parameters))
        self._places = _places(self._facts)

    def changed(self) -> Optional[tuple[str, str]]:
        """(what of the seal is broken: "constant" or "mode"; in words), or None: it is what it was."""
        trained = list(map(_trains, self._parameters))
        if self._places.changed() < 0 and trained == self._trained:
            return None
        broken = [fact for fact in self._facts if not fact.holds()]
        constants = [fact for fact in broken if fact.rule == "constant"]
        if not constants and trained != self._trained:
            i = next(i for i, (now, then) in enumerate(zip(trained, self._trained)) if now != then)
            return "constant", f"requires_grad of {self._names[i]} is {trained[i]}"
        return (constants or broken)[0].told()


def _facts(named: list[tuple[str, Any]]) -> list[Fact]:
    """In the order in which they are told."""
    found = [Fact(m._modules, key, child, "constant", f"{n}.{key} is another module")
             for n, m in named for key, child in m._modules.items()]
    found += [Fact(getattr(m, part), None, len(getattr(m, part)), "constant",
                   f"{n} has {{now}} {word} and had {{then}}") for n, m in named for part, word in _PARTS.items()]
    found += [Fact(m.__dict__, "forward", m.__dict__.get("forward", ...), "constant", f"{n} has another forward")
              for n, m in named]
    return found + [Fact(m.__dict__, "training", m.__dict__.get("training", ...), "mode", f"{n}.training is {{now}}")
                    for n, m in named]


def _places(facts: list[Fact]) -> Places:
    """All of them at one question."""
    return Places(tuple(fact.owner for fact in facts), tuple(fact.key for fact in facts),
                  tuple(... if fact.key is None else fact.value for fact in facts),
                  tuple(fact.value if fact.key is None else None for fact in facts), None)


__all__ = ["Build"]
