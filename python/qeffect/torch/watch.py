"""Sees what crosses streams without an edge: every op of torch with the bytes it reads and writes, every event, and
what captured stages do, judged by vector clocks. For finding faults, not for production: each op costs tens of us.

    with qt.Watch(pipeline):
        with torch.cuda.stream(side):
            x.normal_()                     # written on another stream ...
        pipeline.step([x], [target])        # Trap: sync.side, at the copy of x into its slot
"""
from __future__ import annotations

from typing import Any, Iterable, Optional, Sequence

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ContractError, LimitError
from ..order import EVENTS_MAX, Order
from ._need import torch
from .pipeline import Pipeline
from .stage import is_tensor
from .streams import Streams, streams_of
from .trap import Trap, submitted_at

STREAMS_MAX = 32  # streams that are seen in one watch


class _Edges:
    """A contract's streams, with every edge told."""

    def __init__(self, inner: Streams, watch: "Watch") -> None:
        self._inner, self._watch = inner, watch

    def current(self) -> Any:
        return self._inner.current()

    def order(self, earlier: Any, later: Any) -> None:
        self._inner.order(earlier, later)
        self._watch.edge(earlier, later)


class Watch(TorchDispatchMode):
    """Watches the current thread, and backwards of what it submits, while it is entered. `target`: a pipeline whose
    captured work is told; None: torch's ops alone. Raises Trap (sync.side, sync.host) at the later access."""

    def __init__(self, target: Optional[Pipeline] = None, streams: Optional[Streams] = None) -> None:
        super().__init__()
        self._target = target
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if target is None else target.device
        self._streams = streams or (target.contract.streams if target is not None else streams_of(device))
        self._order = Order(STREAMS_MAX)
        self._known: dict[Any, int] = {}
        self._events: dict[int, int] = {}
        self._writers: dict[int, tuple[str, str, Any]] = {}
        self._entered = False
        self._inner: Optional[Streams] = None
        if device.type == "cuda":
            self._listen()

    # ---- streams and events ----

    def _index(self, stream: Any) -> int:
        key = getattr(stream, "cuda_stream", stream)
        if key not in self._known:
            if len(self._known) == STREAMS_MAX:
                raise LimitError(f"more than {STREAMS_MAX} streams in one watch", status="limit")
            self._known[key] = len(self._known)
        return self._known[key]

    def edge(self, earlier: Any, later: Any) -> None:
        """`later` waits for what `earlier` was given so far. torch's own events are seen without this."""
        self._order.edge(self._index(earlier), self._index(later))

    def _event(self, event: int) -> int:
        return self._events.setdefault(event, 1 + len(self._events) % (EVENTS_MAX - 1))

    def _listen(self) -> None:
        from torch.cuda import _gpu_trace as trace
        torch._C._activate_gpu_trace()
        trace.register_callback_for_event_record(self._on_record)
        trace.register_callback_for_event_wait(self._on_wait)
        trace.register_callback_for_stream_synchronization(self._on_stream_sync)
        trace.register_callback_for_device_synchronization(self._on_device_sync)

    def _on_record(self, event: int, stream: int) -> None:
        if self._entered:
            self._order.record(self._index(stream), self._event(event))

    def _on_wait(self, event: int, stream: int) -> None:
        if self._entered:
            self._order.wait(self._index(stream), self._event(event))

    def _on_stream_sync(self, stream: int) -> None:
        if self._entered:
            self._order.sync(self._index(stream))

    def _on_device_sync(self) -> None:
        if self._entered:
            for index in self._known.values():
                self._order.sync(index)

    # ---- accesses ----

    def tell(self, what: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Work on the current stream that torch's dispatcher does not see. Raises: Trap."""
        ranges = [(*_bytes(t), False, "") for t in reads] + [(*_bytes(t), True, "") for t in writes]
        stream = self._streams.current()
        try:
            self._order.access(self._index(stream), what, [r for r in ranges if r[1] > 0])
        except ContractError as error:
            before = next((self._writers[r[0]] for r in ranges if r[0] in self._writers), None)
            told = "" if before is None else f"; written by {before[0]} at {before[1]} on {before[2]}"
            raise Trap(ContractError(error.message + told, rule=error.rule), what, None, submitted_at()) from None
        line = submitted_at()
        for address, _, is_write, _ in ranges:
            if is_write:
                self._writers[address] = (what, line, stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads, writes = _arguments(func, args, kwargs or {})
        if reads or writes:
            self.tell(str(func), reads, writes)
        made = func(*args, **(kwargs or {}))
        fresh = [t for t, result in zip(_as_list(made), func._schema.returns) if is_tensor(t) and not result.alias_info]
        if fresh:
            self.tell(str(func), [], fresh)
        return made

    # ---- the target ----

    def __enter__(self) -> "Watch":
        self._entered = True
        if self._target is not None:
            self._inner = self._target.contract.streams
            self._target.contract.streams = _Edges(self._inner, self)
            for stage in self._target.stages:
                stage.tell = self.tell
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._entered = False
        if self._target is not None and self._inner is not None:
            self._target.contract.streams = self._inner
            for stage in self._target.stages:
                stage.tell = None


def _bytes(tensor: Any) -> tuple[int, int]:
    """(address, bytes) from the first to behind the last one that it reaches."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    reach = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), reach * tensor.element_size()


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Tensors that an op reads and writes, by its schema. A view touches nothing."""
    schema = func._schema
    if all(r.alias_info and not r.alias_info.is_write for r in schema.returns) and schema.returns:
        return [], []
    reads: list[Any] = []
    writes: list[Any] = []
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        into = writes if argument.alias_info and argument.alias_info.is_write else reads
        into += [t for t in tree_leaves(value) if is_tensor(t)]
    return reads, writes


def _as_list(made: Any) -> Sequence[Any]:
    return made if isinstance(made, (tuple, list)) else [made]
