"""What a module was made of when graphs of it were captured, which replay that from then on, whatever it becomes."""
from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable, Optional

from ._need import torch

_get: Callable[[dict[str, Any], str], Any] = dict.get
_mode: Callable[[Any], bool] = attrgetter("training")
_trains: Callable[[Any], bool] = attrgetter("requires_grad")
_PARTS = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
          "_backward_pre_hooks")
_WORDS = ("modules", "parameters", "buffers", "hooks", "hooks", "hooks", "hooks")


class Build:
    """Modules by name, how much each has of everything, its forward, its mode, and which parameters train. Where
    parameters and buffers lie is the seal's."""

    def __init__(self, module: "torch.nn.Module", name: str) -> None:
        named = list(module.named_modules())
        self._names = [".".join(part for part in (name, path) if part) for path, _ in named]
        self._modules: list[Any] = [m for _, m in named]
        self._own: list[dict[str, Any]] = [m.__dict__ for m in self._modules]
        self._owners = [m._modules for m in self._modules for _ in m._modules]
        self._keys = [key for m in self._modules for key in m._modules]
        self._paths = [f"{n}.{key}" for n, m in zip(self._names, self._modules) for key in m._modules]
        self._parts = [getattr(m, part) for m in self._modules for part in _PARTS]
        parameters = [(n, key, p) for n, m in zip(self._names, self._modules) for key, p in m._parameters.items()
                      if p is not None]
        self._parameters = [p for _, _, p in parameters]
        self._parameter_names = [f"{n}.{key}" for n, key, _ in parameters]
        self._then = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        return (list(map(_get, self._owners, self._keys)), list(map(len, self._parts)),
                list(map(_get, self._own, ["forward"] * len(self._own))), list(map(_trains, self._parameters)),
                list(map(_mode, self._modules)))

    def changed(self) -> Optional[tuple[str, str]]:
        """(what of the seal is broken: "constant" or "mode"; in words), or None: it is what it was."""
        now, then = self._now(), self._then
        if now == then:
            return None
        children, parts, forwards, trained, modes = ([i for i, (a, b) in enumerate(zip(x, y)) if a != b]
                                                     for x, y in zip(now, then))
        if children:
            return "constant", f"{self._paths[children[0]]} is another module"
        if parts:
            i, k = divmod(parts[0], len(_PARTS))
            return "constant", f"{self._names[i]} has {now[1][parts[0]]} {_WORDS[k]} and had {then[1][parts[0]]}"
        if forwards:
            return "constant", f"{self._names[forwards[0]]} has another forward"
        if trained:
            return "constant", f"requires_grad of {self._parameter_names[trained[0]]} is {now[3][trained[0]]}"
        return "mode", f"{self._names[modes[0]]}.training is {now[4][modes[0]]}"


__all__ = ["Build"]
