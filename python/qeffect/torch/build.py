"""What a module was made of when graphs of it were captured, which replay that from then on, whatever it becomes."""
from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Callable, Collection, Optional

from .._seal import Places, attributes
from ._need import torch
from .attributes import Attribute, Named, Skips, attributes_of, hides, same, stored_by_forward
from .inside import inside, is_plain

_trains: Callable[[Any], bool] = attrgetter("requires_grad")
# Tables of a module; of the first three, what they hold is looked at, too.
_PARTS = {"_modules": "modules", "_parameters": "parameters", "_buffers": "buffers", "_forward_hooks": "hooks",
          "_forward_pre_hooks": "hooks", "_backward_hooks": "hooks", "_backward_pre_hooks": "hooks"}


@dataclass(frozen=True)
class Fact:
    """owner[key] was `value` (...: there was no such key); where key is None, owner had `value` keys. `rule`: what of
    the seal another value breaks, "constant" or "mode". `words`: how another value is told. `address`: where a tensor
    lay; None: not asked. `is_content`: the value may change in place, and is a copy. `is_itself`: an equal value is
    another one."""

    owner: dict[str, Any]
    key: Optional[str]
    value: Any
    rule: str
    words: Callable[[Any], str]
    address: Optional[int] = None
    is_content: bool = False
    is_itself: bool = False

    def now(self) -> Any:
        return len(self.owner) if self.key is None else self.owner.get(self.key, ...)

    def holds(self) -> bool:
        now = self.now()
        if self.is_itself:
            return now is self.value
        return same(now, self.value) and (self.address is None or now.data_ptr() == self.address)

    def told(self) -> tuple[str, str]:
        return self.rule, self.words(self.now())


class Build:
    """Modules by name, how much each has of everything, its forward and its class's, its mode, its plain attributes,
    and which parameters train. Where parameters and buffers lie is the seal's. `skips`: attributes that modules of a
    class keep for themselves; `own`: names of those that this one keeps for itself."""

    def __init__(self, module: "torch.nn.Module", name: str, skips: Skips = stored_by_forward,
                 own: Collection[str] = ()) -> None:
        named = named_modules(module, name)
        self._facts = [*_parts(named), *_attributes(named, skips, own)]
        self._modes = [_mode(n, m) for n, m in named]
        parameters = [(f"{n}.{key}", p) for n, m in named for key, p in m._parameters.items() if p is not None]
        self._names, self._parameters = [n for n, _ in parameters], [p for _, p in parameters]
        self._trained = list(map(_trains, self._parameters))
        self._kinds = tuple({type(m): None for _, m in named})
        self._forwards = attributes(self._kinds, "forward")
        self._contents = [fact for fact in self._facts if fact.is_content]
        self._places = self._seal()

    def _seal(self) -> Places:
        """All but contents, at one question, by what they are: a number that is another object is looked at anew."""
        facts = [fact for fact in (*self._facts, *self._modes) if not fact.is_content]
        return Places(tuple(fact.owner for fact in facts), tuple(fact.key for fact in facts),
                      tuple(... if fact.key is None else fact.now() for fact in facts),
                      tuple(fact.value if fact.key is None else fact.address for fact in facts), inside())

    def changed(self) -> Optional[tuple[str, str]]:
        """(what of the seal is broken: "constant" or "mode"; in words), or None: it is what it was."""
        trained, forwards = list(map(_trains, self._parameters)), attributes(self._kinds, "forward")
        if (self._places.changed() < 0 and trained == self._trained and forwards == self._forwards
                and all(fact.holds() for fact in self._contents)):
            return None
        for fact in self._facts:
            if not fact.holds():
                return fact.told()
        for kind, now, then in zip(self._kinds, forwards, self._forwards):
            if now is not then:
                return "constant", f"{kind.__name__} has another forward"
        for name, trains, trained_then in zip(self._names, trained, self._trained):
            if trains != trained_then:
                return "constant", f"requires_grad of {name} is {trains}"
        for fact in self._modes:
            if not fact.holds():
                return fact.told()
        self._places = self._seal()
        return None


def named_modules(module: "torch.nn.Module", name: str) -> Named:
    """It and all below it, by their full names."""
    return [(".".join(part for part in (name, path) if part), m) for path, m in module.named_modules()]


def _parts(named: Named) -> list[Fact]:
    found = [Fact(m._modules, key, child, "constant", _always(f"{n}.{key} is another module"))
             for n, m in named for key, child in m._modules.items()]
    found += [_count(n, getattr(m, part), word) for n, m in named for part, word in _PARTS.items()]
    found += [Fact(m.__dict__, table, getattr(m, table), "constant", _always(f"{n} has another table of {word}"),
                   is_itself=True)
              for n, m in named for table, word in list(_PARTS.items())[:3]]
    return found + [Fact(m.__dict__, "forward", m.__dict__.get("forward", ...), "constant",
                         _always(f"{n} has another forward")) for n, m in named]


def _count(name: str, owner: dict[str, Any], word: str) -> Fact:
    then = len(owner)
    return Fact(owner, None, then, "constant", lambda now: f"{name} has {now} {word} and had {then}")


def _attributes(named: Named, skips: Skips, own: Collection[str]) -> list[Fact]:
    kinds = {id(m.__dict__): type(m) for _, m in named}
    found = [_attribute(a) for a in attributes_of(named)
             if a.name not in own and a.key not in skips(kinds[id(a.owner)])]
    return found + [Fact(owner, key, ..., "constant", _always(f"{name} is no longer that of its class"))
                    for name, owner, key in hides(named, skips) if name not in own]


def _attribute(a: Attribute) -> Fact:
    if is_plain(a.value):
        return Fact(a.owner, a.key, a.value, "constant", _always(f"{a.name} is another tensor"), a.address)
    return Fact(a.owner, a.key, a.value, "constant", lambda now: f"{a.name} is {_short(now)} and was {_short(a.value)}",
                is_content=a.is_content)


def _mode(name: str, m: Any) -> Fact:
    return Fact(m.__dict__, "training", m.__dict__.get("training", ...), "mode",
                lambda now: f"{name}.training is {now}")


def _always(words: str) -> Callable[[Any], str]:
    return lambda now: words


def _short(value: Any) -> str:
    if value is ...:
        return "gone"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


__all__ = ["Build", "named_modules"]
