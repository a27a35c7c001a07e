"""Views of memory, without copies: NumPy arrays over addresses, and the addresses behind whatever speaks DLPack, the
buffer protocol or the CUDA array interface."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Optional, Sequence

import numpy as np
import numpy.typing as npt

from ._api import ffi
from .errors import ArgumentError


@dataclass(frozen=True)
class Span:
    """Where a tensor's bytes lie, from the first to behind the last one that it reaches. `device`: "cpu" or "cuda"."""

    address: int
    bytes: int
    device: str


def view(address: int, shape: Sequence[int], dtype: npt.DTypeLike, *, owner: Optional[object] = None,
         writable: bool = True) -> npt.NDArray[Any]:
    """A NumPy array over host memory at `address`, C order; it speaks DLPack. It keeps `owner` alive, who must keep
    the memory.

    Raises: ArgumentError for an address of 0 or a negative size.
    """
    kind = np.dtype(dtype)
    if any(size < 0 for size in shape):
        raise ArgumentError(f"shape {tuple(shape)} has a negative size")
    count = prod(shape)
    if count == 0:
        return np.empty(shape, kind)
    if address <= 0:
        raise ArgumentError("the address is 0")
    memory = ffi.gc(ffi.cast("char(*)[%d]" % (count * kind.itemsize), address), lambda _, keep=owner: None)
    array = np.frombuffer(ffi.buffer(memory, count * kind.itemsize), dtype=kind).reshape(shape)
    array.flags.writeable = writable
    return array


def span(tensor: Any) -> Span:
    """The bytes of anything with `__cuda_array_interface__`, `__array_interface__` or `__dlpack__` (a torch tensor, a
    CuPy or NumPy array). Raises: ArgumentError for negative strides and for what has none of them."""
    cuda = getattr(tensor, "__cuda_array_interface__", None)
    if cuda is not None:
        return _span(cuda["data"][0], cuda["shape"], cuda.get("strides"), np.dtype(cuda["typestr"]).itemsize, "cuda")
    if not hasattr(tensor, "__array_interface__"):
        if not hasattr(tensor, "__dlpack__"):
            raise ArgumentError(f"{type(tensor).__name__} shows no memory: it has no __dlpack__")
        tensor = np.from_dlpack(tensor)
    host = tensor.__array_interface__
    return _span(host["data"][0], host["shape"], host.get("strides"), np.dtype(host["typestr"]).itemsize, "cpu")


def _span(address: int, shape: Sequence[int], strides: Optional[Sequence[int]], item: int, device: str) -> Span:
    if 0 in shape:
        return Span(int(address), 0, device)
    if strides is None:
        return Span(int(address), prod(shape) * item, device)
    if min(strides, default=0) < 0:
        raise ArgumentError(f"strides {tuple(strides)} run backwards")
    return Span(int(address), sum((size - 1) * stride for size, stride in zip(shape, strides)) + item, device)
