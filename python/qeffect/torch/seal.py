"""Where tensors lay when graphs were captured, which hold their addresses from then on."""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

from ._need import torch

Place = tuple[str, dict[str, Any], str]  # name, the dictionary that holds the tensor, its key there

_address: Callable[[Any], int] = torch.Tensor.data_ptr
_get: Callable[[dict[str, Any], str], Any] = dict.get


def _one_by_one(tensors: list[Any], addresses: list[int], indices: list[int]) -> bool:
    return list(map(_address, tensors)) == addresses


# torch's own comparison of all addresses in one call, for graph trees of its compiler; else a call per tensor
_all_at: Callable[[list[Any], list[int], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _one_by_one)


class Seal:
    """The addresses of tensors, which are looked up anew at each question: one that was exchanged is found, too."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self.places = list(places)
        self._owners, self._keys = [owner for _, owner, _ in places], [key for _, _, key in places]
        self._addresses = [owner[key].data_ptr() for _, owner, key in places]
        self._indices = list(range(len(places)))

    def moved(self) -> Optional[tuple[str, int, int]]:
        """(name, address then, address now) of a tensor that moved since; None: all are where they were."""
        try:  # asked at every replay, so without a loop of Python's
            if _all_at(list(map(_get, self._owners, self._keys)), self._addresses, self._indices):
                return None
        except (RuntimeError, TypeError):  # something is None, or no tensor
            pass
        for (name, owner, key), then in zip(self.places, self._addresses):
            tensor: Any = owner.get(key)
            now = 0 if tensor is None else tensor.data_ptr()
            if now != then:
                return name, then, now
        return None
