"""The caller's streams as a contract sees them: which one is current, and the edge from one to another.

A contract makes all its work one order, whatever stream is current when a part of it is submitted: before work goes to
another stream than the part before it, that stream waits for the former (enter), and since it is the caller's own
stream, the caller's later work there comes behind (exit)."""
from __future__ import annotations

from functools import cache, partial
from typing import Any, Callable, Protocol

from ._need import torch


class Streams(Protocol):
    """Where work goes. A test may put one of its own in place."""

    def current(self) -> Any:
        """The current stream; hashable, equal for the same stream."""

    def order(self, earlier: Any, later: Any) -> None:
        """What `later` is given from now on waits for what `earlier` was given so far."""


class CudaStreams:
    """torch's streams of one device, named by their handles: asked at every replay, a stream object costs 3 us.
    `peek`: the handle alone, to be held against one that `current` told before."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.peek = partial(torch._C._cuda_getCurrentRawStream, index)
        self._streams: dict[int, Any] = {}  # handle -> stream, which keeps it alive

    def current(self) -> Any:
        handle = self.peek()
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self._index)
        return handle

    def order(self, earlier: Any, later: Any) -> None:
        self._streams[later].wait_stream(self._streams[earlier])


class HostStreams:
    """A CPU runs things in the order in which they are called."""

    def current(self) -> Any:
        return "cpu"

    def order(self, earlier: Any, later: Any) -> None:
        return None


def peek_of(streams: Streams) -> Callable[[], Any]:
    """The shortest way to see whether the current stream is one that is known."""
    found: Callable[[], Any] = getattr(streams, "peek", streams.current)
    return found


def streams_of(device: "torch.device") -> Streams:
    """One object per device: contracts that share something order their streams by it."""
    if device.type != "cuda":
        return HostStreams()
    return _cuda_streams(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_streams(index: int) -> Streams:
    return CudaStreams(index)
