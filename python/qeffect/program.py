"""Programs: objects, streams, and what a host submitted, with its effects. See docs/trace.md for what each means.

    program = Program()
    compute, send = program.stream("compute"), program.stream("send", "comm")
    out = program.buffer("out", 4096)
    program.op("forward", compute, out.write())
    program.op("send", send, out.read())
    program.judge().rule          # "sync.side": nothing orders the two
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence

from . import _files
from ._api import ffi, lib
from .errors import ArgumentError, c_text, check, new_error
from .verdict import Verdict, verdict_of

NONE: int = lib.QE_NONE
_ROLES = {"compute": lib.QE_STREAM_COMPUTE, "comm": lib.QE_STREAM_COMM, "caller": lib.QE_STREAM_CALLER,
          "host": lib.QE_STREAM_HOST}
_RECIPES = {"delayed": lib.QE_RECIPE_DELAYED, "current": lib.QE_RECIPE_CURRENT, "block": lib.QE_RECIPE_BLOCK,
            "bf16": lib.QE_RECIPE_BF16, "fp32": lib.QE_RECIPE_FP32}


@dataclass(frozen=True)
class Stream:
    """A queue of a program; `role` is compute, comm, caller or host."""

    index: int
    name: str
    role: str


@dataclass(frozen=True)
class Event:
    """An event of a program."""

    index: int


@dataclass(frozen=True)
class Effect:
    """One declared effect, made by an object's methods. Fields are those of qe_effect (program.h)."""

    object: int
    kind: int
    version: int = 0
    write: bool = False
    layouts: int = 0
    recipe: int = 0
    stage: Optional[int] = None       # None: that of the op
    microbatch: Optional[int] = None  # None: that of the op
    use: int = 0
    epoch: int = 0
    begin: int = 0
    end: int = 0
    rows: int = 0
    pitch: int = 0


@dataclass(frozen=True)
class Object:
    """A versioned object of a program. Versions count from the state at the program's beginning (`counter`), in a
    ledger from the step's beginning; only the text of a trace has absolute ones."""

    index: int
    name: str


class Scale(Object):
    """Hidden scaling state; its counter is the epoch."""

    def use(self, epoch: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_SCALE_USE, epoch)

    def record(self, epoch: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_SCALE_RECORD, epoch)

    def fold(self, epoch: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_SCALE_FOLD, epoch)


class Slot(Object):
    """What a forward keeps for one microbatch; its counter is the generation."""

    def acquire(self, generation: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_SLOT_ACQUIRE, generation)

    def borrow(self, generation: int, write: bool = False) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_SLOT_BORROW, generation, write)

    def release(self, generation: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_SLOT_RELEASE, generation)


class Weight(Object):
    """A master parameter; its counter is the version."""

    def read(self, version: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_WEIGHT_READ, version)

    def commit(self, version: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_WEIGHT_COMMIT, version)


class Cache(Object):
    """A quantized copy of a weight; its key is (weight version, scale epoch, recipe), `layouts` a set of bits."""

    def fill(self, version: int, *, epoch: int = 0, layouts: int = 0, recipe: str = "delayed") -> Effect:
        return Effect(self.index, lib.QE_EFFECT_CACHE_FILL, version, layouts=layouts, recipe=_recipe(recipe),
                      epoch=epoch)

    def use(self, version: int, *, epoch: int = 0, layouts: int = 0, recipe: str = "delayed") -> Effect:
        return Effect(self.index, lib.QE_EFFECT_CACHE_USE, version, layouts=layouts, recipe=_recipe(recipe),
                      epoch=epoch)


class Grad(Object):
    """The main gradient of a weight; its counter is takes so far."""

    def deposit(self, microbatch: Optional[int] = None, *, set: bool = False, use: int = 0) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_GRAD_DEPOSIT, write=set, microbatch=microbatch, use=use)

    def take(self) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_GRAD_TAKE)


@dataclass(frozen=True)
class Buffer(Object):
    """Bytes. Ranges are [begin, end) in bytes, the whole buffer where they are left out."""

    bytes: int = 0

    def _range(self, kind: int, begin: int, end: Optional[int], version: int, rows: int, pitch: int) -> Effect:
        return Effect(self.index, kind, version, begin=begin, end=self.bytes if end is None else end, rows=rows,
                      pitch=pitch)

    def read(self, begin: int = 0, end: Optional[int] = None, *, version: int = 0, rows: int = 0,
             pitch: int = 0) -> Effect:
        """`version`: which write of this step is due (0: any); `rows` ranges lie `pitch` bytes apart."""
        return self._range(lib.QE_EFFECT_BUFFER_READ, begin, end, version, rows, pitch)

    def write(self, begin: int = 0, end: Optional[int] = None, *, rows: int = 0, pitch: int = 0) -> Effect:
        return self._range(lib.QE_EFFECT_BUFFER_WRITE, begin, end, 0, rows, pitch)

    def alloc(self) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_BUFFER_ALLOC)

    def free(self) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_BUFFER_FREE)


class Graph(Object):
    """A captured program; its counter is the seal: how often it was captured."""

    def begin(self) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_GRAPH_BEGIN)

    def capture(self, seal: int) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_GRAPH_CAPTURE, seal)

    def launch(self, seal: int, frozen: str = "", captured: int = 0, now: int = 0) -> Effect:
        """`frozen`: "mode", "address" or "constant", with what it was captured with and what is there now."""
        kinds = {"": lib.QE_FROZEN_NOTHING, "mode": lib.QE_FROZEN_MODE, "address": lib.QE_FROZEN_ADDRESS,
                 "constant": lib.QE_FROZEN_CONSTANT}
        if frozen not in kinds:
            raise ArgumentError(f"frozen is {frozen!r}; expected mode, address or constant")
        return Effect(self.index, lib.QE_EFFECT_GRAPH_LAUNCH, seal, use=kinds[frozen], begin=captured, end=now)


class Rng(Object):
    """A counter-based generator; its counter is the offset of the next number."""

    def draw(self, offset: int, count: int = 1, *, again: bool = False) -> Effect:
        return Effect(self.index, lib.QE_EFFECT_RNG_DRAW, offset, again, end=count)


def _recipe(name: str) -> int:
    if name not in _RECIPES:
        raise ArgumentError(f"recipe {name!r} does not exist; expected one of {', '.join(_RECIPES)}")
    return int(_RECIPES[name])


def fill_effect(into: Any, effect: Effect, stage: int, microbatch: int) -> None:
    """`into`: qe_effect, zeroed. Slots and deposits belong to the op's stage and microbatch unless they say so."""
    into.object, into.kind, into.write = effect.object, effect.kind, effect.write
    into.layouts, into.recipe, into.use = effect.layouts, effect.recipe, effect.use
    into.version, into.epoch = effect.version, effect.epoch
    into.begin, into.end = effect.begin, effect.end
    into.stage = stage if effect.stage is None else effect.stage
    into.microbatch = microbatch if effect.microbatch is None else effect.microbatch
    if effect.kind in (lib.QE_EFFECT_BUFFER_READ, lib.QE_EFFECT_BUFFER_WRITE):
        into.rows, into.pitch = effect.rows, effect.pitch
    if effect.kind not in _WITH_OWNER:
        into.stage = 0
        if effect.kind not in _WITH_MICROBATCH:
            into.rows = effect.rows


_WITH_OWNER = (lib.QE_EFFECT_SLOT_ACQUIRE, lib.QE_EFFECT_SLOT_BORROW, lib.QE_EFFECT_SLOT_RELEASE)
_WITH_MICROBATCH = (lib.QE_EFFECT_GRAD_DEPOSIT, lib.QE_EFFECT_RNG_DRAW)


def fill_item(into: Any, kind: int, *, stream: int = 0, event: int = 0, label: int = 0, stage: int = 0,
              microbatch: Optional[int] = None, effect_count: int = 0, line: int = 0) -> None:
    """`into`: qe_item, zeroed."""
    into.kind, into.stream, into.event, into.label = kind, stream, event, label
    into.stage, into.microbatch = stage, NONE if microbatch is None else microbatch
    into.effect_count, into.line = effect_count, line


def effect_array(effects: Sequence[Effect], stage: int, microbatch: Optional[int]) -> Any:
    """qe_effect[] of an op."""
    array = ffi.new("qe_effect[]", max(1, len(effects)))
    for i, effect in enumerate(effects):
        fill_effect(array[i], effect, stage, NONE if microbatch is None else microbatch)
    return array


class Program:
    """A program that is built, read, judged and written. Not thread-safe."""

    def __init__(self) -> None:
        self._c: Any = ffi.gc(ffi.new("qe_program *"), lib.qe_program_deinit)
        lib.qe_program_init(self._c)

    @classmethod
    def read(cls, source: _files.Source) -> "Program":
        """A trace: its path, or its text (which begins with `qet`, or holds a line break).

        Raises: FormatError with line and column; FileError.
        """
        program, error = cls(), new_error()
        content, path = _files.load(source, lambda text: "\n" in text or text.startswith("qet"))
        _files.with_reader(content, lambda file: check(
            lib.qe_trace_read(file, path.encode("utf-8", "surrogateescape"), program._c, error), error))
        return program

    def text(self) -> str:
        """The program as a trace; reading it gives a program that judges the same."""
        error = new_error()
        return _files.written(lambda file: check(lib.qe_trace_write(self._c, file, error), error))

    def judge(self) -> Verdict:
        """Judges it from its beginning by every rule, the way traces are judged."""
        violations, error = ffi.new("qe_violations *"), new_error()
        status = lib.qe_program_judge(self._c, violations, error)
        if status != lib.QE_CONTRACT:
            check(status, error)
        return verdict_of(self._c, violations)

    def copy(self) -> "Program":
        """An independent copy."""
        other, error = Program(), new_error()
        check(lib.qe_program_copy(self._c, other._c, error), error)
        return other

    @property
    def item_count(self) -> int:
        """Submissions so far."""
        return int(self._c.item_count)

    # ---- declarations ----

    def stream(self, name: str, role: str = "compute") -> Stream:
        if role not in _ROLES:
            raise ArgumentError(f"stream role {role!r} does not exist; expected one of {', '.join(_ROLES)}")
        index, error = ffi.new("uint32_t *"), new_error()
        check(lib.qe_program_add_stream(self._c, c_text(name), _ROLES[role], index, error), error)
        return Stream(int(index[0]), name, role)

    def event(self) -> Event:
        return Event(int(lib.qe_program_add_event(self._c)))

    def label(self, text: str) -> int:
        """The index of an op's name; added where it is new."""
        index, error = ffi.new("uint32_t *"), new_error()
        check(lib.qe_program_add_label(self._c, c_text(text), index, error), error)
        return int(index[0])

    def _object(self, name: str, kind: int, **fields: int) -> int:
        encoded = c_text(name)
        if len(encoded) >= lib.QE_NAME_BYTES:
            raise ArgumentError(f"the name {name!r} has {len(encoded)} bytes; at most {lib.QE_NAME_BYTES - 1}")
        declared = ffi.new("qe_object *", {"kind": kind, "weight": NONE, "scale": NONE})
        declared.name = encoded
        for field, value in fields.items():
            setattr(declared, field, value)
        index, error = ffi.new("uint32_t *"), new_error()
        check(lib.qe_program_add_object(self._c, declared, index, error), error)
        return int(index[0])

    def scale(self, name: str, *, counter: int = 0, due: int = 0) -> Scale:
        """`due`: records that a step owes (0: not checked)."""
        return Scale(self._object(name, lib.QE_OBJECT_SCALE, counter=counter, due=due), name)

    def slot(self, name: str, *, counter: int = 0, address: int = 0, bytes: int = 0) -> Slot:
        return Slot(self._object(name, lib.QE_OBJECT_SLOT, counter=counter, address=address, bytes=bytes), name)

    def weight(self, name: str, *, counter: int = 0) -> Weight:
        return Weight(self._object(name, lib.QE_OBJECT_WEIGHT, counter=counter), name)

    def cache(self, name: str, weight: Weight, scale: Optional[Scale] = None) -> Cache:
        """An empty cache of the weight, made with the scale."""
        return Cache(self._object(name, lib.QE_OBJECT_CACHE, weight=weight.index,
                                  scale=NONE if scale is None else scale.index), name)

    def grad(self, name: str, weight: Optional[Weight] = None, *, due: int = 0, counter: int = 0) -> Grad:
        """`due`: deposits per step. With a weight, that is committed only after this was taken."""
        return Grad(self._object(name, lib.QE_OBJECT_GRAD, due=due, counter=counter,
                                 weight=NONE if weight is None else weight.index), name)

    def buffer(self, name: str, bytes: int, *, written: bool = False, absent: bool = False,
               address: int = 0) -> Buffer:
        """`bytes` in size. `address`: where it lies (0: not told); buffers share the bytes that they overlap in."""
        state = lib.QE_BUFFER_ABSENT if absent else lib.QE_BUFFER_WRITTEN if written else lib.QE_BUFFER_UNWRITTEN
        return Buffer(self._object(name, lib.QE_OBJECT_BUFFER, bytes=bytes, counter=state, address=address), name,
                      bytes)

    def graph(self, name: str, *, counter: int = 0) -> Graph:
        return Graph(self._object(name, lib.QE_OBJECT_GRAPH, counter=counter), name)

    def rng(self, name: str, *, counter: int = 0) -> Rng:
        return Rng(self._object(name, lib.QE_OBJECT_RNG, counter=counter), name)

    def order(self, grad: Grad, microbatches: Sequence[int], use: int = 0) -> None:
        """Appends to the order in which the contributions of a step are added up: the order is the bits."""
        for microbatch in microbatches:
            place, error = ffi.new("qe_deposit *", (grad.index, microbatch, use)), new_error()
            check(lib.qe_program_add_deposit(self._c, place, error), error)

    # ---- items ----

    def _add(self, kind: int, effects: Sequence[Effect] = (), **fields: Any) -> int:
        item, error, index = ffi.new("qe_item *"), new_error(), ffi.new("uint32_t *")
        fill_item(item, kind, effect_count=0, **fields)
        array = effect_array(effects, item.stage, fields.get("microbatch"))
        check(lib.qe_program_add_item(self._c, item, array, len(effects), index, error), error)
        return int(index[0])

    def op(self, label: str, stream: Stream, *effects: Effect, stage: int = 0, microbatch: Optional[int] = None) -> int:
        """One unit of work with at most 16 effects, each seeing what those before it left. Returns its item index."""
        return self._add(lib.QE_ITEM_OP, effects, label=self.label(label), stream=stream.index, stage=stage,
                         microbatch=microbatch)

    def record(self, event: Event, stream: Stream) -> int:
        """The event marks what the stream was given so far."""
        return self._add(lib.QE_ITEM_RECORD, event=event.index, stream=stream.index)

    def wait(self, event: Event, stream: Stream) -> int:
        """The stream's later work waits for the event's last record."""
        return self._add(lib.QE_ITEM_WAIT, event=event.index, stream=stream.index)

    def sync_event(self, event: Event) -> int:
        """The host waits for the event's last record."""
        return self._add(lib.QE_ITEM_SYNC_EVENT, event=event.index)

    def sync_stream(self, stream: Stream) -> int:
        """The host waits for the stream."""
        return self._add(lib.QE_ITEM_SYNC_STREAM, stream=stream.index)

    def sync_device(self) -> int:
        """The host waits for all streams."""
        return self._add(lib.QE_ITEM_SYNC_DEVICE)

    def step_begin(self) -> int:
        return self._add(lib.QE_ITEM_STEP_BEGIN)

    def step_end(self) -> int:
        """Slots must be free, recorded scales folded, gradients taken."""
        return self._add(lib.QE_ITEM_STEP_END)


def check_trace(source: _files.Source) -> Verdict:
    """The verdict on a trace, given as a path or as text. Raises: FormatError with line and column; FileError."""
    return Program.read(source).judge()
