"""The ledger of a set of stages: what each action does to slots, weights and gradients, proved before anything runs,
checked at every submission."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Sequence

from ..errors import ContractError, LimitError
from ..ledger import Ledger, Submission
from ..plan import Plan, Stages
from ..program import Effect, Event, Grad, Graph, Program, Slot, Stream, Weight
from ..schedule import Action, Schedule
from .streams import Streams, peek_of

STREAMS_MAX = 8       # streams of the caller that work was ever submitted to; a pipeline has one or two
_EFFECTS = 13         # of the 16 of an op, beside a slot's acquire or borrow, a weight's read and the slot's release
FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD = "F", "I", "W", "B"


@dataclass
class StageObjects:
    """The objects of one stage. The stage's parameters are one weight, because they commit together; each has a
    gradient of its own."""

    name: str
    slots: list[Slot]
    weight: Weight
    grads: list[Grad]
    graph: Graph


@dataclass(frozen=True)
class Place:
    """The slot of a (stage, microbatch) and its generation, from the beginning of the step."""

    slot: int
    generation: int


class Planned(NamedTuple):
    """What an action submits, and its place."""

    items: tuple[int, ...]
    place: Place


class Contract:
    """Contract of planned work. `names` and `parameters`: of each stage; `actions`: one row, the whole step.

    Raises: ContractError where the order is not valid or the program breaks a rule.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Sequence[str]], actions: Sequence[Action],
                 streams: Streams) -> None:
        self.streams = streams  # its setter
        self.lock = threading.RLock()
        self.actions = tuple(actions)
        self.microbatches = 1 + max(action.microbatch for action in actions)
        self.places, self.slot_counts = _places([str(action) for action in actions], len(names), self.microbatches)
        program = Program()
        self._streams = [program.stream(f"caller{i}", "caller") for i in range(STREAMS_MAX)]
        self._edge: Event = program.event()
        self.stages = [self._declare(program, i, names[i], parameters[i]) for i in range(len(names))]
        self._items: dict[tuple[int, str, int], tuple[int, ...]] = {}
        self._effects: dict[int, tuple[str, tuple[Effect, ...], int, Optional[int]]] = {}
        self._deposited = [False] * len(names)
        self._first: dict[int, int] = {}
        for action in self.actions:
            if action.kind in (WEIGHT_GRAD, BACKWARD):
                self._first.setdefault(action.stage, action.microbatch)
        for action in self.actions:
            key = (action.stage, action.kind, action.microbatch)
            self._items[key] = self._add(program, action)
        self.planned = {key: Planned(items, self.places[key[0], key[2]]) for key, items in self._items.items()}
        self._lives = {place: self._life(*place) for place in self.places}
        self._take_items = [self._take(program, i) for i in range(len(names))]
        self._commit_items = [self._commit(program, i) for i in range(len(names))]
        self.ledger = Ledger(program)
        self.ledger.certify()
        self._known: dict[Any, int] = {}
        self._last: Any = None
        self._last_index = 0
        self._left = len(self.actions)
        self._moved: dict[tuple[int, int], Submission] = {}

    @property
    def streams(self) -> Streams:
        """Where work goes; whoever watches puts its own in place."""
        return self._all_streams

    @streams.setter
    def streams(self, streams: Streams) -> None:
        self._all_streams = streams
        self.peek = peek_of(streams)  # asked at every replay

    # ---- the program ----

    def _declare(self, program: Program, index: int, name: str, parameters: Sequence[str]) -> StageObjects:
        short = _short(name)
        weight = program.weight(short)
        slots = [program.slot(_short(name, f".slot{k}")) for k in range(self.slot_counts[index])]
        order = [a.microbatch for a in self.actions if a.stage == index and a.kind in (WEIGHT_GRAD, BACKWARD)]
        grads = [program.grad(_short(parameter), weight, due=self.microbatches) for parameter in parameters]
        for grad in grads:
            program.order(grad, order)
        return StageObjects(name, slots, weight, grads, program.graph(short, counter=1))

    def life(self, stage: int, microbatch: int) -> str:
        """1: its deposit is the first of the step, and sets. s: its backward is I and W. In this order."""
        return self._lives[stage, microbatch]

    def _life(self, stage: int, microbatch: int) -> str:
        split = (stage, WEIGHT_GRAD, microbatch) in self._items
        return ("1" if self._first.get(stage) == microbatch else "") + ("s" if split else "")

    def _add(self, program: Program, action: Action) -> tuple[int, ...]:
        objects = self.stages[action.stage]
        place = self.places[action.stage, action.microbatch]
        slot = objects.slots[place.slot]
        if action.kind == FORWARD:
            chunks: list[list[Effect]] = [[slot.acquire(place.generation), objects.weight.read(0)]]
        elif action.kind == INPUT_GRAD:
            chunks = [[slot.borrow(place.generation, write=True), objects.weight.read(0)]]
        else:
            first = not self._deposited[action.stage]
            self._deposited[action.stage] = True
            deposits = [grad.deposit(set=first) for grad in objects.grads]
            ahead: list[Effect] = [slot.borrow(place.generation)]
            if action.kind == BACKWARD:
                ahead = [slot.borrow(place.generation, write=True), objects.weight.read(0)]
            chunks = [ahead + deposits[i:i + _EFFECTS] for i in range(0, max(1, len(deposits)), _EFFECTS)]
            chunks[-1].append(slot.release(place.generation))
        return tuple(self._op(program, action.kind, chunk, action.stage, action.microbatch) for chunk in chunks)

    def _op(self, program: Program, label: str, effects: Sequence[Effect], stage: int,
            microbatch: Optional[int]) -> int:
        item = program.op(label, self._streams[0], *effects, stage=stage, microbatch=microbatch)
        self._effects[item] = (label, tuple(effects), stage, microbatch)
        return item

    def _take(self, program: Program, stage: int) -> tuple[int, ...]:
        takes = [grad.take() for grad in self.stages[stage].grads]
        return tuple(self._op(program, "take", takes[i:i + _EFFECTS], stage, None)
                     for i in range(0, len(takes), _EFFECTS))

    def _commit(self, program: Program, stage: int) -> tuple[int, ...]:
        return (self._op(program, "commit", [self.stages[stage].weight.commit(0)], stage, None),)

    # ---- the step ----

    def begin(self) -> None:
        """A step begins; one that is open is an error of the caller's."""
        with self.lock:
            self.ledger.step_begin()
            self._left = len(self.actions)  # the stream of the step before is still the last one: work may still run

    @property
    def is_open(self) -> bool:
        return self.ledger.is_open

    @property
    def is_complete(self) -> bool:
        """Every action of the step was submitted."""
        return self._left == 0

    def abort(self) -> None:
        """The step is given up; nothing happens where none is open."""
        with self.lock:
            if self.ledger.is_open:
                self.ledger.step_abort()

    def submit(self, stage: int, kind: str, microbatch: int) -> Place:
        """Judges an action on the current stream. Raises: ContractError; nothing has changed."""
        planned = self.planned.get((stage, kind, microbatch))
        if planned is None:
            raise ContractError(f"schedule.missing: {stage}{kind}{microbatch} is no action of the step's order",
                                rule="schedule.missing")
        self.submit_planned(planned)
        return planned.place

    def submit_planned(self, planned: Planned) -> None:
        """As `submit`, of one of `planned`."""
        with self.lock:
            stream = self._last_index if self.peek() == self._last else self.enter()
            if stream == 0:
                self.ledger.issue_all(planned.items)
            else:
                self._submit(planned.items, stream)
            self._left -= 1

    def take(self) -> None:
        """Every gradient goes to the optimizer. Raises: ContractError (grad.missing)."""
        self._each(self._take_items)

    def commit(self) -> None:
        """Every weight gets its next version."""
        self._each(self._commit_items)

    def _each(self, stages: Sequence[tuple[int, ...]]) -> None:
        with self.lock:
            stream = self.enter()
            for items in stages:
                self._submit(items, stream)

    def end(self) -> None:
        """Raises: ContractError (slot.leak, grad.missing); the step stays open and must be aborted."""
        with self.lock:
            self.ledger.step_end()

    def _submit(self, items: tuple[int, ...], stream: int) -> None:
        if stream == 0:
            self.ledger.issue_all(items)
            return
        for item in items:
            self.ledger.submit(self._on(item, stream))

    def _on(self, item: int, stream: int) -> Submission:
        """The item on another stream than the one it was planned on."""
        found = self._moved.get((item, stream))
        if found is None:
            label, effects, stage, microbatch = self._effects[item]
            found = self.ledger.prepare(label, self._streams[stream], effects, stage=stage, microbatch=microbatch,
                                        item=item)
            self._moved[item, stream] = found
        return found

    def enter(self) -> int:
        """The current stream waits for the work of this contract that went to another one. Returns its index."""
        current = self.streams.current()
        if current == self._last:
            return self._last_index
        index = self._known.get(current)
        if index is None:
            index = self._add_stream(current)
        if self._last is not None:
            self.streams.order(self._last, current)
            if self.ledger.is_open:
                self.ledger.record(self._edge, self._streams[self._known[self._last]])
                self.ledger.wait(self._edge, self._streams[index])
        self._last, self._last_index = current, index
        return index

    def _add_stream(self, stream: Any) -> int:
        if len(self._known) == STREAMS_MAX:
            raise LimitError(f"work was submitted to more than {STREAMS_MAX} streams", status="limit",
                             remedy="submit from fewer streams")
        self._known[stream] = len(self._known)
        return self._known[stream]

    def refuse_launch(self, stage: int, microbatch: int, frozen: str, captured: int, now: int) -> None:
        """Tells the ledger of a launch whose seal is broken. Raises: ContractError (graph.address, ...)."""
        with self.lock:
            objects = self.stages[stage]
            launch = self.ledger.prepare(FORWARD, self._streams[self.enter()],
                                         [objects.graph.launch(0, frozen, captured, now)], stage=stage,
                                         microbatch=microbatch)
            self.ledger.submit(launch)


def _places(cells: Sequence[str], stages: int,
            microbatches: int) -> tuple[dict[tuple[int, int], Place], list[int]]:
    """The slot of every (stage, microbatch), and how many slots each stage has: as many as are live at once."""
    plan = Plan(Schedule.of([list(cells)]), Stages(stages, microbatches))
    places: dict[tuple[int, int], Place] = {}
    for unit in plan.units(0):
        if unit.kind == FORWARD and unit.microbatch is not None:
            places[unit.stage, unit.microbatch] = Place(*unit.slots["X"])
    counts = [0] * stages
    for (stage, _), place in places.items():
        counts[stage] = max(counts[stage], place.slot + 1)
    return places, counts


def _short(name: str, suffix: str = "") -> str:
    """A name that fits an object: of a longer one its end, which tells more."""
    room = 95 - len(suffix.encode())
    encoded = name.encode()
    if len(encoded) > room:
        name = ".." + encoded[-(room - 2):].decode("utf-8", "ignore")
    return name + suffix


__all__ = ["BACKWARD", "Contract", "FORWARD", "INPUT_GRAD", "Place", "StageObjects", "Stream", "WEIGHT_GRAD"]
