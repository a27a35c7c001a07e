"""Is what streams are really given ordered as it must be? Tell every access with its bytes, every record, wait and
sync, at the moment it is made; a ledger of bytes judges them with vector clocks (include/qeffect/order.h)."""
from __future__ import annotations

from typing import Any, Optional, Sequence

from ._api import ffi, lib
from .errors import ContractError, LimitError, c_text, check, new_error, text_of
from .program import NONE

STREAMS_MAX: int = lib.QE_PROGRAM_STREAMS_MAX - 1  # one is the host's
EVENTS_MAX = 1024  # used in turns: an event that was awaited is of no further use


class Order:
    """Streams and events are numbers below STREAMS_MAX and EVENTS_MAX. One thread at a time."""

    def __init__(self, streams: int = 16, events: int = EVENTS_MAX) -> None:
        if not 0 < streams <= STREAMS_MAX:
            raise LimitError(f"{streams} streams; from 1 to {STREAMS_MAX}", status="limit")
        handle, error = ffi.new("qe_order **"), new_error()
        check(lib.qe_order_create(handle, error), error)
        self._c: Any = ffi.gc(handle[0], lib.qe_order_destroy)
        self._breach = ffi.new("qe_breach *")
        index = ffi.new("uint32_t *")
        self._streams = []
        for i in range(streams):
            check(lib.qe_order_add_stream(self._c, b"stream %d" % i, lib.QE_STREAM_COMPUTE, index, error), error)
            self._streams.append(int(index[0]))
        self._events = [int(lib.qe_order_add_event(self._c)) for _ in range(events)]

    def access(self, stream: Optional[int], what: str, ranges: Sequence[tuple[int, int, bool, str]]) -> None:
        """Work called `what` touches (address, bytes, writes, name) on a stream, or at once on the host (None).

        Raises: ContractError (sync.side, sync.host, ...).
        """
        names = [ffi.new("char[]", c_text(name)[:95]) for *_, name in ranges]
        array = ffi.new("qe_range[]", max(1, len(ranges)))
        for into, (address, size, writes, _), name in zip(array, ranges, names):
            into.at, into.bytes, into.object = ffi.cast("void *", address), size, name
            into.read, into.write = not writes, writes
        at = NONE if stream is None else self._streams[stream]
        label = ffi.new("char[]", c_text(what))
        status = lib.qe_order_access(self._c, at, label, array, len(ranges), self._breach)
        if status == lib.QE_CONTRACT:
            rule = text_of(lib.qe_rule_id(self._breach.rule))
            raise ContractError(f"{rule}: {text_of(self._breach.text)}", rule=rule)
        check(status)

    def record(self, stream: int, event: int) -> None:
        check(lib.qe_order_record(self._c, self._streams[stream], self._events[event]))

    def wait(self, stream: int, event: int) -> None:
        """The stream waits for the event's last record."""
        check(lib.qe_order_wait(self._c, self._streams[stream], self._events[event]))

    def sync(self, stream: int) -> None:
        """The host has waited for all that the stream was given."""
        check(lib.qe_order_sync(self._c, self._streams[stream]))

    def edge(self, earlier: int, later: int) -> None:
        """`later` waits for what `earlier` was given so far."""
        self.record(earlier, 0)
        self.wait(later, 0)
