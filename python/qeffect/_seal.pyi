# Compiled from python/seal.c.
from typing import Any, Optional, Sequence

class Torch:
    """torch's functions for what is asked about tensors at every replay. offset: of the at::Tensor in objects of
    `kinds`; functions: addresses of data_ptr, rank, sizes, dtype, device type, device index."""

    def __init__(self, offset: int, kinds: tuple[type, type], functions: tuple[int, ...], /) -> None: ...
    def look(self, tensor: Any, /) -> Optional[bytes]:
        """Shape, dtype and device of a tensor, for `fit`; None for what it cannot tell."""
    def fit(self, looks: tuple[Optional[bytes], ...], arguments: Sequence[Any], /) -> bool:
        """Every argument looks like the one whose look stands in its place. False: not so, or it cannot tell."""

class Places:
    """owners[i][keys[i]] was values[i] (...: there was no such key), a tensor at addresses[i] (None: not asked). Where
    keys[i] is None, owners[i] had addresses[i] keys."""

    def __init__(self, owners: tuple[dict[str, Any], ...], keys: tuple[Optional[str], ...], values: tuple[Any, ...],
                 addresses: tuple[Optional[int], ...], torch: Optional[Torch], /) -> None: ...
    def changed(self) -> int:
        """Index of the first place that is not as it was; -1: all are."""

class Issuer:
    """issue, ledger, violations: addresses of qe_ledger_issue and of what it is given; items: how many the program has.
    Whoever makes it keeps ledger and violations, and asks only while a certified step is open."""

    def __init__(self, issue: int, ledger: int, violations: int, items: int, /) -> None: ...
    def issue(self, items: tuple[int, ...], /) -> int:
        """Submits items of the program, up to the first that is refused. Its status; 0: all were taken.

        Raises: IndexError, OverflowError, TypeError for what is no item; those before it are submitted.
        """

def attributes(objects: tuple[Any, ...], name: str, /) -> tuple[Any, ...]:
    """The attribute of each object."""
