"""Work that is recorded once and replayed: on a GPU as a CUDA graph; on a CPU by doing it again into the same memory,
so that fixed addresses, aliases and their contracts are there too. And tensors that are handed out and taken back."""
from __future__ import annotations

from typing import Any, Callable, Optional, Protocol

from torch.multiprocessing.reductions import StorageWeakRef

from ._need import torch

Tensors = list[Optional["torch.Tensor"]]
Work = Callable[[], Tensors]


class Recording(Protocol):
    """`outputs`: where each replay leaves its results."""

    outputs: Tensors

    def replay(self) -> None:
        """Does the work again."""


class GraphRecording:
    """A CUDA graph. Its memory is of `pool` and lives as long as the recording."""

    def __init__(self, work: Work, pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": NCCL's watchdog asks about its events in a thread of its own, which must not end a capture.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            made = work()
        self.outputs: Tensors = [None if tensor is None else tensor.detach() for tensor in made]

    def replay(self) -> None:
        self._graph.replay()


class HostRecording:
    """The same contract on a CPU: results are always at the addresses of the first time."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs: Tensors = [None if tensor is None else tensor.detach().clone() for tensor in work()]

    def replay(self) -> None:
        with torch.no_grad():
            for kept, made in zip(self.outputs, self._work()):
                if kept is not None and made is not None:
                    kept.copy_(made)


def can_take_back() -> bool:
    """This torch can make tensors whose later use raises; where it cannot, copies are handed out."""
    return all(hasattr(torch._C, name) for name in ("_construct_storage_from_data_pointer",
                                                    "_set_storage_data_ptr_access_error_msg"))


class Handed:
    """Tensors over memory of a slot that were handed to the caller. They are valid until the slot's next use; then
    `take_back` makes every access to them raise with the reason."""

    def __init__(self) -> None:
        self._storages: list[Any] = []

    @property
    def pending(self) -> bool:
        """Something was given since the last take_back."""
        return bool(self._storages)

    def give(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A tensor over the same memory, or a copy where it could not be taken back."""
        if not can_take_back() or tensor.numel() == 0:
            return tensor.detach().clone()
        reach = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride()))
        size = reach * tensor.element_size()
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
        given = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage, 0, tensor.size(), tensor.stride())
        self._storages.append(StorageWeakRef(given.untyped_storage()))
        return given

    def __del__(self) -> None:
        self.take_back("slot.stale: the captured module whose memory this tensor is, is gone")

    def take_back(self, reason: str) -> None:
        """Accesses from now on raise RuntimeError with `reason`. Nothing where nobody holds a tensor any more."""
        for reference in self._storages:
            if not reference.expired():
                torch._C._set_storage_data_ptr_access_error_msg(reference.cdata, reason)
        self._storages.clear()
