"""Where tensors lay when graphs were captured, which hold their addresses from then on."""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

from ._need import torch

Place = tuple[str, dict[str, Any], str]  # name, the dictionary that holds the tensor, its key there

_address: Callable[[Any], int] = torch.Tensor.data_ptr
_get: Callable[[dict[str, Any], str], Any] = dict.get


class Seal:
    """The addresses of tensors, which are looked up anew at each question: one that was exchanged is found, too."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self.places = list(places)
        self._owners, self._keys = [owner for _, owner, _ in places], [key for _, _, key in places]
        self._addresses = tuple(owner[key].data_ptr() for _, owner, key in places)

    def moved(self) -> Optional[tuple[str, int, int]]:
        """(name, address then, address now) of a tensor that moved since; None: all are where they were."""
        try:  # asked at every replay, so without a loop of Python's
            if tuple(map(_address, map(_get, self._owners, self._keys))) == self._addresses:
                return None
        except TypeError:  # something is None, or no tensor
            pass
        for (name, owner, key), then in zip(self.places, self._addresses):
            tensor: Any = owner.get(key)
            now = 0 if tensor is None else tensor.data_ptr()
            if now != then:
                return name, then, now
        return None
