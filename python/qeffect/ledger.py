"""A ledger judges work while it is submitted: who holds which version of what, what is ordered before what.

    ledger = Ledger(program)                  # declarations only, or a plan's program
    with ledger.step():
        ledger.op("forward", stream, slot.acquire(1), microbatch=0)
        ledger.op("backward", stream, slot.release(1), microbatch=0)

A refused submission raises ContractError and changes nothing. Versions count from the beginning of the step.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Optional, Sequence

from ._api import ffi, lib
from ._seal import Issuer
from .errors import ArgumentError, ContractError, Error, check, new_error
from .program import NONE, Effect, Event, Object, Program, Stream, effect_array, fill_item
from .verdict import Verdict, verdict_of


class Submission:
    """An op that is submitted again and again: made once, so that submitting it costs a call and little else."""

    def __init__(self, label: int, stream: Stream, effects: Sequence[Effect], stage: int,
                 microbatch: Optional[int], item: int = NONE) -> None:
        self._stands_for = item
        self._effects = effect_array(effects, stage, microbatch)
        self._item: Any = ffi.new("qe_item *")
        fill_item(self._item, lib.QE_ITEM_OP, label=label, stream=stream.index, stage=stage, microbatch=microbatch,
                  effect_count=len(effects))
        self._owned = [i for i, effect in enumerate(effects) if self._effects[i].kind in _OWNED]

    def set_stream(self, stream: Stream) -> None:
        self._item.stream = stream.index

    def set_version(self, effect: int, version: int) -> None:
        """`effect`: its index in the op."""
        self._effects[effect].version = version

    def set_write(self, effect: int, write: bool) -> None:
        self._effects[effect].write = write

    def set_microbatch(self, microbatch: int) -> None:
        """Of the op, and of its slots and deposits."""
        self._item.microbatch = microbatch
        for effect in self._owned:
            self._effects[effect].microbatch = microbatch


_OWNED = (lib.QE_EFFECT_SLOT_ACQUIRE, lib.QE_EFFECT_SLOT_BORROW, lib.QE_EFFECT_SLOT_RELEASE,
          lib.QE_EFFECT_GRAD_DEPOSIT, lib.QE_EFFECT_RNG_DRAW)


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Ledger:
    """Counts; touches no device. One thread at a time. The program is copied: later changes to it do not matter.

    Raises: TypeError where it is no Program; UnsupportedError where the program has what only a trace may have
    (allocations, draws, rows, ranks).
    """

    def __init__(self, program: Program) -> None:
        if not isinstance(program, Program):
            raise TypeError(f"program is {program!r}; expected a Program, as Program(), Program.read(path) or "
                            "plan.program(rank) makes one")
        self._program = program.copy()
        self._items = self._program.item_count
        self._violations = ffi.new("qe_violations *")
        self._open = False
        self._certified = False
        handle, error = ffi.new("qe_ledger **"), new_error()
        check(lib.qe_ledger_create(self._program._c, handle, error), error)
        self._c: Any = ffi.gc(handle[0], lib.qe_ledger_destroy)
        self._issuer = Issuer(_address(ffi.addressof(lib, "qe_ledger_issue")), _address(self._c),
                              _address(self._violations), self._items)
        count = self._program._c.label_count
        self._labels = {ffi.string(self._program._c.labels[i].text).decode(): i for i in range(count)}

    # ---- steps ----

    @property
    def is_open(self) -> bool:
        """Between step_begin and step_end or step_abort."""
        return self._open

    def _require(self, is_open: bool) -> None:
        if self._open != is_open:
            raise Error("no step is open" if is_open else "a step is open; end or abort it first")

    def step_begin(self) -> None:
        """Versions count from here; what streams did before is over."""
        self._require(False)
        lib.qe_ledger_step_begin(self._c)
        self._open = True

    def step_end(self) -> None:
        """Asks what the step owes (slot.leak, grad.missing, ...).

        Raises: ContractError; the step stays open and must be aborted.
        """
        self._require(True)
        status = lib.qe_ledger_step_end(self._c, self._violations)
        if status != lib.QE_OK:
            self._refuse(status)
        self._open = False

    def step_check(self) -> None:
        """As step_end, and leaves the step open: what is submitted so far is the whole step."""
        self._require(True)
        status = lib.qe_ledger_step_check(self._c, self._violations)
        if status != lib.QE_OK:
            self._refuse(status)

    def step_abort(self) -> None:
        """Gives the step up: scales and gradients as at its beginning, slots free, caches empty."""
        self._require(True)
        lib.qe_ledger_step_abort(self._c)
        self._open = False

    @contextmanager
    def step(self) -> Iterator["Ledger"]:
        """A step that ends, or is aborted by whatever is raised in it."""
        self.step_begin()
        try:
            yield self
            self.step_end()
        finally:
            if self._open:
                self.step_abort()

    # ---- submissions ----

    def label(self, text: str) -> int:
        """Raises: ArgumentError where the program has no op, and no `Program.label`, of this name."""
        if text not in self._labels:
            raise ArgumentError(f"the program names no op {text!r}; declare it with Program.label before the ledger")
        return self._labels[text]

    def prepare(self, label: str, stream: Stream, effects: Sequence[Effect], *, stage: int = 0,
                microbatch: Optional[int] = None, item: Optional[int] = None) -> Submission:
        """An op for `submit`. `item`: the item of the program that it stands for, which records of a breach name."""
        if item is not None and not 0 <= item < self._program.item_count:
            raise ArgumentError(f"item {item} of a program of {self._program.item_count} items")
        return Submission(self.label(label), stream, effects, stage, microbatch, NONE if item is None else item)

    def submit(self, submission: Submission) -> None:
        """Raises: ContractError; the ledger is unchanged."""
        if not self._open:
            self._require(True)
        status = lib.qe_ledger_submit(self._c, submission._item, submission._effects, submission._stands_for,
                                      self._violations)
        if status != lib.QE_OK:
            self._refuse(status)

    def op(self, label: str, stream: Stream, *effects: Effect, stage: int = 0,
           microbatch: Optional[int] = None) -> None:
        """One unit of work. Raises: ContractError; the ledger is unchanged."""
        self.submit(self.prepare(label, stream, effects, stage=stage, microbatch=microbatch))

    def _clock_item(self, kind: int, **fields: Any) -> None:
        self._require(True)
        item = ffi.new("qe_item *")
        fill_item(item, kind, **fields)
        status = lib.qe_ledger_submit(self._c, item, ffi.NULL, NONE, self._violations)
        if status != lib.QE_OK:
            self._refuse(status)

    def record(self, event: Event, stream: Stream) -> None:
        self._clock_item(lib.QE_ITEM_RECORD, event=event.index, stream=stream.index)

    def wait(self, event: Event, stream: Stream) -> None:
        """Raises: ContractError (sync.event) where the event has no record."""
        self._clock_item(lib.QE_ITEM_WAIT, event=event.index, stream=stream.index)

    def sync_event(self, event: Event) -> None:
        self._clock_item(lib.QE_ITEM_SYNC_EVENT, event=event.index)

    def sync_stream(self, stream: Stream) -> None:
        self._clock_item(lib.QE_ITEM_SYNC_STREAM, stream=stream.index)

    def sync_device(self) -> None:
        self._clock_item(lib.QE_ITEM_SYNC_DEVICE)

    # ---- a certified program ----

    def certify(self) -> None:
        """Judges every item of the program for two steps in a row; then `issue` may be used. Raises: ContractError."""
        self._require(False)
        error = new_error()
        status = lib.qe_ledger_certify(self._c, self._violations, error)
        if status == lib.QE_CONTRACT:
            raise ContractError.of(self._verdict())
        check(status, error)
        self._certified = True

    def issue(self, item: int) -> None:
        """Submits an item of the certified program as planned: counters only. Raises: ContractError."""
        self.issue_all((item,))

    def issue_all(self, items: tuple[int, ...]) -> None:
        """As `issue`, one after the other, up to the first that is refused."""
        if not (self._certified and self._open):
            self._require_certified()
        try:  # asked at every replay
            status = self._issuer.issue(items)
        except (IndexError, OverflowError):
            raise ArgumentError(f"one of items {items} of a program of {self._items} items") from None
        if status:
            self._refuse(status)

    def _require_certified(self) -> None:
        if not self._certified:
            raise Error("the program is not certified; call certify first")
        self._require(True)

    # ---- state ----

    def counter(self, object: Object) -> int:
        """Epoch, generation, version or takes, absolute."""
        self._known(object)
        return int(lib.qe_ledger_counter(self._c, object.index))

    def touch(self, object: Object, counter: int) -> None:
        """Something outside changed the object: a load, a rollback, a hand-made write. Weight versions rise, scale
        epochs become `counter`, caches are emptied. Only between steps."""
        self._require(False)
        self._known(object)
        lib.qe_ledger_touch(self._c, object.index, counter)

    def _known(self, object: Object) -> None:
        if not 0 <= object.index < self._program._c.object_count:
            raise ArgumentError(f"object {object.name!r} is not of this ledger's program")

    def observe(self) -> None:
        """From now on a breach is told (ContractError) and the work counts as done. Only between steps."""
        self._require(False)
        lib.qe_ledger_observe(self._c)

    def history(self) -> Program:
        """What was seen since the step began, the refused submission last, as a program that reproduces the verdict."""
        program, error = Program(), new_error()
        check(lib.qe_ledger_history(self._c, program._c, error), error)
        return program

    def _verdict(self) -> Verdict:
        return verdict_of(self._program._c, self._violations)

    def _refuse(self, status: int) -> None:
        """Raises. The record of a live submission has no item to name; the history, judged, names both ops."""
        if status != lib.QE_CONTRACT:
            check(status)
        bare = self._verdict()
        try:
            history = self.history()
        except Error:  # a step of more submissions than are kept
            raise ContractError.of(bare) from None
        raise ContractError.of(_told(bare, history.judge()), trace=history.text())


def _told(bare: Verdict, history: Verdict) -> Verdict:
    """The last breach of the history is the refusal itself: the record that names its ops, where there is one."""
    last = [violation for violation in history.violations if violation.rule == bare.rule][-1:]
    return Verdict((*last, *bare.violations[1:]), bare.total) if last else bare
