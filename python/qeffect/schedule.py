"""Schedules: which rank does which action when, in PyTorch's words; proofs about them; simulation; pictures."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Union

import numpy as np
import numpy.typing as npt

from . import _files
from ._api import ffi, lib
from .errors import ArgumentError, ContractError, c_text, check, new_error, text_of

_KINDS = {lib.QE_ACTION_F: "F", lib.QE_ACTION_I: "I", lib.QE_ACTION_W: "W", lib.QE_ACTION_B: "B"}
_TEXT_BYTES = 4096


@dataclass(frozen=True)
class Action:
    """`2F0`: stage 2, forward, microbatch 0. `kind`: F forward, I input gradient, W weight gradient, B both of them.
    `paired`: it runs overlapped with the next action of its rank."""

    stage: int
    kind: str
    microbatch: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Raises: ArgumentError."""
        match = re.fullmatch(r"(\d+)([FIWB])(\d+)", text.strip())
        if match is None:
            raise ArgumentError(f"{text!r} is no action; expected stage, F, I, W or B, microbatch, as 2F0")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Peak:
    """What one rank keeps at once, at most, in (stage, microbatch) pairs: F until I or B; I until W; either."""

    activation: int
    weight: int
    live: int


@dataclass(frozen=True)
class Certificate:
    """What is proved of a schedule under the rules that were asked for. `peaks`: one per rank; `peak_activation`: the
    largest live, in microbatches of a full rank; `ascending`: gradients add up in the order of microbatches."""

    ranks: int
    stages: int
    microbatches: int
    actions: int
    peaks: tuple[Peak, ...]
    peak_activation: float
    ascending: bool
    least_capacity: int


def _refuse(status: int, counterexample: Any, error: Any) -> None:
    """Raises what a judgement of a schedule answered, with the counterexample as text."""
    if status == lib.QE_CONTRACT and counterexample.rule != lib.QE_RULE_NONE:
        text = ffi.new("char[]", _TEXT_BYTES)
        lib.qe_counterexample_text(counterexample, text, _TEXT_BYTES)
        told = text_of(text)
        raise ContractError(told, rule=text_of(lib.qe_rule_id(counterexample.rule)), counterexample=told)
    check(status, error)


def _new_counterexample() -> Any:
    return ffi.gc(ffi.new("qe_counterexample *"), lib.qe_counterexample_deinit)


class Schedule:
    """An order of actions per rank. Never changes."""

    def __init__(self, c_schedule: Any) -> None:
        self._c = c_schedule

    @staticmethod
    def _new() -> Any:
        return ffi.gc(ffi.new("qe_schedule *"), lib.qe_schedule_deinit)

    @classmethod
    def generate(cls, name: str, *, ranks: int, microbatches: int, chunks: Optional[int] = None,
                 forward_only: bool = False) -> "Schedule":
        """A named order (see `names`). `chunks`: stages per rank; None: what is usual for the name.

        Raises: ArgumentError says which condition fails and the nearest value that fits.
        """
        encoded = ffi.new("char[]", c_text(name))
        usual = lib.qe_schedule_usual_chunks(encoded) if chunks is None else chunks
        request = ffi.new("qe_schedule_request *", (encoded, ranks, usual, microbatches, forward_only))
        schedule, error = cls._new(), new_error()
        check(lib.qe_schedule_generate(request, schedule, error), error)
        return cls(schedule)

    @classmethod
    def read_csv(cls, source: _files.Source) -> "Schedule":
        """PyTorch's CSV, compute-only or with communication: a path, or the text (which holds a comma or line break).

        Raises: FormatError with row and cell; ContractError for communication that does not fit; FileError.
        """
        schedule, error = cls._new(), new_error()
        content, path = _files.load(source, lambda text: "," in text or "\n" in text)
        _files.with_reader(content, lambda file: check(
            lib.qe_schedule_read_csv(file, path.encode("utf-8", "surrogateescape"), schedule, error), error))
        return cls(schedule)

    @classmethod
    def of(cls, rows: Sequence[Sequence[Union[str, Action]]]) -> "Schedule":
        """A schedule of one row of actions per rank, for example [["0F0", "0B0"]]."""
        return cls.read_csv("\n".join(",".join(str(action) for action in row) for row in rows) + "\n")

    @staticmethod
    def names() -> tuple[str, ...]:
        """The orders that `generate` knows."""
        found: list[str] = []
        while (name := lib.qe_schedule_name(len(found))) != ffi.NULL:
            found.append(text_of(name))
        return tuple(found)

    def csv(self, *, communication: bool = False) -> str:
        """One row per rank, as PyTorch's pipelining reads it ("compute_only"; with communication "compute_comms")."""
        error = new_error()
        write = lib.qe_schedule_write_csv_comms if communication else lib.qe_schedule_write_csv
        return _files.written(lambda file: check(write(self._c, file, error), error))

    @property
    def ranks(self) -> int:
        return int(self._c.ranks)

    @property
    def stages(self) -> int:
        return int(self._c.stages)

    @property
    def microbatches(self) -> int:
        return int(self._c.microbatches)

    @property
    def stage_rank(self) -> tuple[int, ...]:
        """The rank that each stage lives on."""
        return tuple(int(self._c.stage_rank[stage]) for stage in range(self.stages))

    def row(self, rank: int) -> tuple[Action, ...]:
        """The actions of a rank, in order."""
        if not 0 <= rank < self.ranks:
            raise ArgumentError(f"rank {rank} of a schedule of {self.ranks} ranks")
        begin, end = self._c.rank_begin[rank], self._c.rank_begin[rank + 1]
        actions = (self._c.actions[i] for i in range(begin, end))
        return tuple(Action(int(a.stage), _KINDS[a.kind], int(a.microbatch), bool(a.paired)) for a in actions)

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(self.row(rank) for rank in range(self.ranks))

    def check(self) -> None:
        """Proves placement, counts, order and freedom from deadlock.

        Raises: ContractError with an irreducible `counterexample`.
        """
        counterexample, error = _new_counterexample(), new_error()
        _refuse(lib.qe_schedule_check(self._c, counterexample, error), counterexample, error)

    def certify(self, *, memory_limit: float = 0.0, batched_sends: bool = False, one_communicator: bool = False,
                capacity: int = 0, any_gradient_order: bool = False, fold_at_last_microbatch: bool = False,
                fill_at_first_microbatch: bool = False, find_capacity: bool = False) -> Certificate:
        """Proves what `check` proves under these rules of transport, and the life of what is kept, its peak against
        `memory_limit` (in activations of one microbatch on a full rank; 0: none), folds, fills, order of gradients.

        Raises: ContractError with an irreducible `counterexample`.
        """
        request = ffi.new("qe_certificate_request *")
        request.transport.sends = lib.QE_SENDS_BATCHED if batched_sends else lib.QE_SENDS_SINGLE
        request.transport.communicators = (
            lib.QE_COMMUNICATORS_ONE if one_communicator else lib.QE_COMMUNICATORS_EDGE)
        request.transport.release = lib.QE_RELEASE_OP
        request.transport.capacity = capacity
        request.memory_limit, request.find_capacity = memory_limit, find_capacity
        request.fold = lib.QE_FOLD_LAST_MICROBATCH if fold_at_last_microbatch else lib.QE_FOLD_STEP
        request.fill = lib.QE_FILL_FIRST_MICROBATCH if fill_at_first_microbatch else lib.QE_FILL_STEP
        request.gradients = lib.QE_GRADIENTS_OWN if any_gradient_order else lib.QE_GRADIENTS_ASCENDING
        found = ffi.gc(ffi.new("qe_certificate *"), lib.qe_certificate_deinit)
        counterexample, error = _new_counterexample(), new_error()
        _refuse(lib.qe_schedule_certify(self._c, request, found, counterexample, error), counterexample, error)
        peaks = tuple(_peak(found.rank[rank].peak) for rank in range(found.ranks))
        return Certificate(int(found.ranks), int(found.stages), int(found.microbatches), int(found.actions), peaks,
                           float(found.peak_activation), found.gradient_order == lib.QE_GRADIENTS_ASCENDING,
                           int(found.least_capacity))

    def peaks(self) -> tuple[Peak, ...]:
        """What each rank keeps at once. Raises: ContractError where the schedule is not valid."""
        self.check()
        peaks = ffi.new("qe_schedule_peak[]", self.ranks)
        lib.qe_schedule_peaks(self._c, peaks)
        return tuple(_peak(peaks[rank]) for rank in range(self.ranks))

    def flattened(self) -> "Schedule":
        """The same actions on one rank, in the order in which all ranks together run them when F, I and W take the
        same time: lifetimes, postponed weight gradients and live microbatches stay those of the ranks."""
        simulation = simulate(self, times=(1.0, 1.0, 1.0))
        starts = simulation.start.tolist()
        placed = [(rank, place, str(action)) for rank, row in enumerate(self.rows) for place, action in enumerate(row)]
        cells = sorted((start, rank, place, text) for start, (rank, place, text) in zip(starts, placed))
        return Schedule.of([[text for _, _, _, text in cells]])


def _peak(peak: Any) -> Peak:
    return Peak(int(peak.activation), int(peak.weight), int(peak.live))


@dataclass(frozen=True)
class StageCost:
    """One stage, in the caller's units of time and size. `both`: time of a B; None: input + weight. `keep_*`: size of
    what one microbatch keeps from F until I, from F until W, from I until W."""

    forward: float
    input: float
    weight: float
    both: Optional[float] = None
    optimizer: float = 0.0
    keep_input: float = 0.0
    keep_forward: float = 0.0
    keep_weight: float = 0.0
    output: float = 0.0
    gradient: float = 0.0


@dataclass(frozen=True)
class SimulatedRank:
    """Times of a rank: first start, last end, time in actions; largest size kept at once."""

    begin: float
    end: float
    busy: float
    peak_kept: float


class Simulation:
    """What a schedule costs. `makespan`: end of the last action; `makespan_bubble`: what a step loses whose optimizer
    waits for all; `stage_bubble`: what one loses whose optimizers do not; `step`: from step to step.

    `start` and `end` are NumPy views, float64 [actions], ranks one behind the other; they hold the simulation alive.
    """

    def __init__(self, c_simulation: Any, schedule: Schedule) -> None:
        self._c, self.schedule = c_simulation, schedule
        self.makespan, self.span, self.work = (
            float(c_simulation.makespan), float(c_simulation.span), float(c_simulation.work))
        self.makespan_bubble, self.stage_bubble = float(c_simulation.makespan_bubble), float(c_simulation.stage_bubble)
        self.step, self.peak_kept = float(c_simulation.step), float(c_simulation.peak_kept)
        self.ranks = tuple(
            SimulatedRank(float(r.begin), float(r.end), float(r.busy), float(r.peak_kept))
            for r in (c_simulation.ranks[i] for i in range(c_simulation.ranks_count)))

    def _view(self, pointer: Any) -> npt.NDArray[np.float64]:
        count = self._c.actions_count
        # The memory belongs to the simulation: what the array is made from keeps it.
        owner = ffi.gc(ffi.cast("double(*)[%d]" % max(1, count), pointer), lambda _, keep=self._c: None)
        return np.frombuffer(ffi.buffer(owner, 8 * count), dtype=np.float64)

    @property
    def start(self) -> npt.NDArray[np.float64]:
        return self._view(self._c.start)

    @property
    def end(self) -> npt.NDArray[np.float64]:
        return self._view(self._c.end)

    def _draw(self, write: Any, *arguments: Any, title: str, unit: str, unit_us: float) -> str:
        keep = ffi.new("char[]", c_text(title)), ffi.new("char[]", c_text(unit))
        drawing = ffi.new("qe_drawing *", (self.schedule._c, self._c, keep[0], keep[1], unit_us))
        error = new_error()
        return _files.written(lambda file: check(write(drawing, *arguments, file, error), error))

    def svg(self, title: str = "", unit: str = "") -> str:
        """A Gantt chart as one SVG file."""
        return self._draw(lib.qe_draw_svg, title=title, unit=unit, unit_us=1.0)

    def chart(self, columns: int = 120) -> str:
        """A line of text per rank."""
        return self._draw(lib.qe_draw_text, columns, title="", unit="", unit_us=1.0)

    def timeline(self, title: str = "", unit_us: float = 1000.0) -> str:
        """Chrome's trace events as JSON; `unit_us`: microseconds of one unit of time.

        Raises: ArgumentError where `unit_us` is not above 0."""
        if not 0.0 < unit_us < math.inf:
            raise ArgumentError(f"unit_us is {unit_us}; expected a number of microseconds above 0")
        return self._draw(lib.qe_draw_timeline, title=title, unit="", unit_us=unit_us)


def _costs(times: Optional[Sequence[float]], costs: Optional[Sequence[StageCost]], schedule: Schedule) -> Any:
    if (times is None) == (costs is None):
        raise ArgumentError("give either times (F, I, W of a whole rank) or costs (of each stage)")
    if times is not None:
        if len(times) != 3:
            raise ArgumentError(f"times has {len(times)} numbers; expected F, I, W")
        chunks = max(1, schedule.stages // schedule.ranks)
        array = ffi.new("qe_stage_cost[1]")
        array[0] = lib.qe_stage_cost_of(times[0], times[1], times[2], 0.5, chunks)
        return array
    assert costs is not None
    if len(costs) not in (1, schedule.stages):
        raise ArgumentError(f"{len(costs)} costs for {schedule.stages} stages; give one, or one for each")
    array = ffi.new("qe_stage_cost[]", len(costs))
    for into, cost in zip(array, costs):
        into.time[lib.QE_ACTION_F], into.time[lib.QE_ACTION_I] = cost.forward, cost.input
        into.time[lib.QE_ACTION_W] = cost.weight
        into.time[lib.QE_ACTION_B] = cost.input + cost.weight if cost.both is None else cost.both
        into.optimizer, into.output, into.gradient = cost.optimizer, cost.output, cost.gradient
        into.keep[lib.QE_KEEP_I], into.keep[lib.QE_KEEP_X] = cost.keep_input, cost.keep_forward
        into.keep[lib.QE_KEEP_W] = cost.keep_weight
    return array


def schedule_of(value: object) -> Schedule:
    """The value, which is a Schedule: a name or a path in its place is a slip that wants words."""
    if not isinstance(value, Schedule):
        raise TypeError(f"schedule is {value!r}; expected a Schedule, as Schedule.generate(name, ranks=..., "
                        "microbatches=...) or Schedule.read_csv(path) makes one")
    return value


def simulate(schedule: Schedule, *, times: Optional[Sequence[float]] = None,
             costs: Optional[Sequence[StageCost]] = None, latency: float = 0.0, bandwidth: float = 0.0,
             pair: float = 0.0, meet: float = 0.0, optimizers_wait: bool = True) -> Simulation:
    """Runs a schedule in thought. `times`: F, I, W of one microbatch on a whole rank, spread evenly over its stages; or
    `costs`: of each stage (one: the same for all). `latency` of a transfer to another rank; `bandwidth` in size per
    time (0: endless); `pair`: time of an overlapped pair / (F + B), 0: nothing gained; `meet`: from the last rank's
    last action to the optimizers, where they wait for all ranks.

    Raises: ArgumentError; ContractError where the schedule stops before its end or is not valid.
    """
    schedule_of(schedule).check()
    array = _costs(times, costs, schedule)
    request = ffi.new("qe_simulation_request *")
    request.schedule, request.costs, request.cost_count = schedule._c, array, len(array)
    request.latency, request.bandwidth, request.pair, request.meet = latency, bandwidth, pair, meet
    request.sync = lib.QE_SYNC_ALL if optimizers_wait else lib.QE_SYNC_NONE
    result, error = ffi.gc(ffi.new("qe_simulation *"), lib.qe_simulation_deinit), new_error()
    check(lib.qe_simulation_run(request, result, error), error)
    return Simulation(result, schedule)


@dataclass(frozen=True)
class Found:
    """The result of a search: `value` of the schedule, `bound` that no order beats, `named` best named order that fits
    ("" where none does) with its `named_value`."""

    schedule: Schedule
    value: float
    bound: float
    named: str
    named_value: float


def search(*, ranks: int, chunks: int, microbatches: int, times: Sequence[float], latency: float = 0.0,
           memory_limit: float = 0.0) -> Found:
    """The best order for given times (F, I, W of a whole rank) under a memory limit, in microbatches of a full rank
    (0: none).

    Raises: ArgumentError where no order obeys the limit, with the least that one does; LimitError.
    """
    if len(times) != 3:
        raise ArgumentError(f"times has {len(times)} numbers; expected F, I, W")
    cost = ffi.new("qe_stage_cost[1]")
    cost[0] = lib.qe_stage_cost_of(times[0], times[1], times[2], 0.5, max(1, chunks))
    request = ffi.new("qe_search_request *")
    request.ranks, request.chunks, request.microbatches = ranks, chunks, microbatches
    request.memory_limit = memory_limit
    request.times.costs, request.times.cost_count, request.times.latency = cost, 1, latency
    result, error = ffi.gc(ffi.new("qe_search_result *"), lib.qe_search_result_deinit), new_error()
    check(lib.qe_schedule_search(request, result, error), error)
    copy, keep = Schedule._new(), ffi.addressof(result, "schedule")
    ffi.memmove(copy, keep, ffi.sizeof("qe_schedule"))
    ffi.memmove(keep, ffi.new("qe_schedule *"), ffi.sizeof("qe_schedule"))  # the copy owns its arrays now
    named = text_of(result.named) if result.named != ffi.NULL else ""
    return Found(Schedule(copy), float(result.value), float(result.bound), named, float(result.named_value))
