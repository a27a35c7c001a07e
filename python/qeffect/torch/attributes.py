"""What modules hold beside parameters, buffers and modules: numbers, words, functions, tensors that were just assigned.
A graph has built in what they were when it was captured, whatever becomes of them."""
from __future__ import annotations

import dis
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Callable, Iterator, Optional, Sequence

import numpy as np

from ._need import torch
from .inside import is_plain

Named = Sequence[tuple[str, Any]]  # modules by their full names
Skips = Callable[[type], frozenset[str]]

_ATOMS = (int, float, complex, str, bytes, type(None), range, Enum, np.generic, torch.dtype, torch.device, torch.layout,
          torch.memory_format, torch.Size, type, FunctionType, BuiltinFunctionType, MethodType, partial)
_CONTAINERS = (list, dict, set)  # changed in place, so a copy is kept
_DEPTH, _LENGTH = 3, 64          # of containers that are looked into; deeper and longer ones are data, and no setting
_TORCHS = frozenset(torch.nn.Module().__dict__)  # what every module has, which others look at


@dataclass(frozen=True)
class Attribute:
    """owner[key] is `value`; of a container, a copy. owner: a module's dictionary."""

    name: str
    owner: dict[str, Any]
    key: str
    value: Any

    @property
    def is_content(self) -> bool:
        """It may change in place."""
        return _may_change(self.value)

    @property
    def address(self) -> Optional[int]:
        return self.value.data_ptr() if is_plain(self.value) else None


def attributes_of(named: Named) -> list[Attribute]:
    """All that are looked at."""
    return [Attribute(f"{name}.{key}", m.__dict__, key, _kept(value))
            for name, m in named for key, value in m.__dict__.items()
            if key not in _TORCHS and key != "forward" and (_is_setting(value) or _is_tensor(value))]


def same(now: Any, then: Any) -> bool:
    """A graph with `then` built in does what the module does with `now`. Tensors are what they are."""
    return now is then or (type(now) is type(then) and not is_plain(then) and bool(now == then))


def _is_setting(value: Any, depth: int = _DEPTH) -> bool:
    kind = type(value)
    if isinstance(value, _ATOMS):
        return True
    if kind not in (tuple, frozenset, *_CONTAINERS) or depth == 0 or len(value) > _LENGTH:
        return False
    parts = [*value.keys(), *value.values()] if kind is dict else value
    return all(_is_setting(part, depth - 1) for part in parts)


def _kept(value: Any) -> Any:
    """It, or where it may change in place, a copy as deep as it is looked into."""
    kind = type(value)
    if kind is dict:
        return {key: _kept(part) for key, part in value.items()}
    return kind(map(_kept, value)) if kind in (tuple, list, set) else value


def _may_change(value: Any) -> bool:
    return type(value) in _CONTAINERS or (type(value) is tuple and any(map(_may_change, value)))


def _is_tensor(value: Any) -> bool:
    return is_plain(value) and value.layout == torch.strided and not value.is_meta


def hides(named: Named, skips: Skips) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, owner, key) of what a module has from its class and would lose by an attribute of the same name."""
    for name, m in named:
        kind: Any = type(m)
        skipped = skips(kind)
        for key in own_names(kind):
            if key not in m.__dict__ and key not in skipped and key != "forward":
                yield f"{name}.{key}", m.__dict__, key


@cache
def own_names(kind: type) -> frozenset[str]:
    """Functions and settings of the class and of those above it, below torch.nn.Module."""
    return frozenset(key for owner in _above(kind) for key, value in vars(owner).items()
                     if not key.startswith("__") and _is_setting(value))


def _above(kind: type) -> list[type]:
    return [owner for owner in kind.__mro__ if owner not in torch.nn.Module.__mro__]


@cache
def stored_by_forward(kind: type) -> frozenset[str]:
    """Names that the class's forward assigns to attributes: what it keeps there is its own business."""
    return frozenset(_stored(getattr(getattr(kind, "forward", None), "__code__", None)))


@cache
def written_anywhere(kind: type) -> frozenset[str]:
    """Names that any function of the class but __init__ assigns to attributes, and all words in it, for some assign by
    name."""
    found: set[str] = set()
    for owner in _above(kind):
        for key, value in vars(owner).items():
            code = getattr(value, "__code__", None)
            if isinstance(code, CodeType) and key != "__init__":
                found |= _stored(code) | {word for word in code.co_consts if isinstance(word, str)}
    return frozenset(found)


def _stored(code: Any) -> set[str]:
    if not isinstance(code, CodeType):
        return set()
    found = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return found.union(*(_stored(inner) for inner in code.co_consts))
