"""Where tensors lay when graphs were captured, which hold their addresses from then on."""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

from .._seal import Places
from .inside import inside, is_plain

Place = tuple[str, dict[str, Any], str]  # name, the dictionary that holds the tensor, its key there
Mark = tuple[dict[str, Any], str]        # a dictionary and a key of it


class Seal:
    """The addresses of tensors, which are looked up anew at each question: one that was exchanged is found, too.

    `quick()` is asked at every replay: below 0, every tensor is the one it was, where it was, and so is what `marks`
    name; else `moved` tells what moved, if anything did. `tensors` that torch's C functions do not know as they are
    known to Python, and another torch than those it was made for, have no short way: it always says to look closer."""

    def __init__(self, places: Sequence[Place] = (), marks: Sequence[Mark] = ()) -> None:
        self.places = list(places)
        self._addresses = [owner[key].data_ptr() for _, owner, key in places]
        self.quick: Callable[[], int] = self._quick(marks) or (lambda: 0)

    def _quick(self, marks: Sequence[Mark]) -> Optional[Callable[[], int]]:
        own, tensors = inside(), [owner[key] for _, owner, key in self.places]
        if own is None or not all(map(is_plain, tensors)):
            return None
        made = Places((*(owner for _, owner, _ in self.places), *(owner for owner, _ in marks)),
                      (*(key for _, _, key in self.places), *(key for _, key in marks)),
                      (*tensors, *(owner.get(key, ...) for owner, key in marks)),
                      (*self._addresses, *(None for _ in marks)), own)
        return made.changed if made.changed() < 0 else None

    def moved(self) -> Optional[tuple[str, int, int]]:
        """(name, address then, address now) of a tensor that moved since; None: all are where they were."""
        if self.quick() < 0:
            return None
        for (name, owner, key), then in zip(self.places, self._addresses):
            tensor: Any = owner.get(key)
            now = 0 if tensor is None else tensor.data_ptr()
            if now != then:
                return name, then, now
        return None
