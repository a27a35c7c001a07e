"""One stage: a module with its forward F, input gradient I and weight gradient W as explicit actions on slots.

A slot is the memory that one live microbatch needs: inputs, what autograd saved, boundary gradients, postponed weight
gradients. Captured, a slot has graphs of its own in a memory pool of its own, so whatever order slots are used in, none
touches another's memory; a stage has as many as the plan has live microbatches.

    slot:  free --F--> kept --I--> postponed --W--> free        B is I, then W                                       """
from __future__ import annotations

import gc
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence, Union

from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ArgumentError, Error, UnsupportedError
from ._need import torch
from .attributes import stored_by_forward
from .build import Build
from .habits import Habits
from .inside import count_writes, fitting
from .record import GraphRecording, Handed, HostRecording, Recording, Tensors
from .seal import Place, Seal
from .split import Postponed, Queue, split_linears
from .trap import breach, submitted_at

LIVES = ("1s", "s", "1", "")  # 1: the first of the step; s: backward is I and W, else B
Weights = Union[tuple[()], tuple[int, tuple[int, ...]]]  # nothing, or commits and how often each was written
WARMUPS = 3  # libraries choose algorithms and make workspaces in the first calls, which must not be captured


class Slot:
    """Memory of one live microbatch. `inputs`, `fixed`: static inputs and gradients of a captured slot."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation, self.microbatch, self.submitted = 0, 0, ""
        self.inputs: list[Any] = []
        self.gradients: list[Optional["torch.Tensor"]] = []
        self.fixed: list[Optional["torch.Tensor"]] = []  # the gradients that its graphs read
        self.live: list["torch.Tensor"] = []      # outputs with their autograd graph
        self.leaves: list[Any] = []               # inputs as autograd sees them
        self.queue = Queue()
        self.stash: dict[int, "torch.Tensor"] = {}  # parameter index -> gradient that came with the input gradient
        self.recordings: dict[str, Recording] = {}
        self.handed = Handed()
        self.pool: Any = None
        self.fused: list[int] = []  # parameters (by index) that the module itself deposits
        self.weights: Weights = ()  # versions of the parameters that its forward read
        self.life = ""  # of LIVES: which of its recordings the microbatch uses

    @property
    def first(self) -> bool:
        """It holds the microbatch whose contributions are the first of the step: it fills caches and sets gradients."""
        return self.life.startswith("1")

    def forget(self) -> None:
        """What autograd kept for a microbatch."""
        self.live, self.leaves = [], self.inputs
        self.drop_postponed()

    def drop_postponed(self) -> None:
        """The queue is emptied, too: the autograd graph behind what waits in it holds it, where no collector sees."""
        self.queue.entries.clear()
        self.queue, self.stash = Queue(), {}


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Stage:
    """A module as a stage. `capture`: "graph" (CUDA), "host" (replayed work with fixed memory, on a CPU) or "" (eager).
    `placement`: gradients are accumulated where they live ("direct") or moved to scratch and back ("copy"); the bits
    are the same. `accumulate`: into `main_grad`; else gradients are results of W."""

    def __init__(self, module: "torch.nn.Module", name: str, index: int, slots: int, *, capture: str = "",
                 placement: str = "direct", accumulate: bool = True, allow_unused: bool = False) -> None:
        if placement not in ("direct", "copy"):
            raise ArgumentError(f"placement is {placement!r}; expected direct or copy")
        self.module, self.name, self.index = module, name, index
        self.capture, self.placement, self.accumulate = capture, placement, accumulate
        self.allow_unused = allow_unused
        _must_be_whole(module, name)
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = [f"{name}.{n}" if name else n for n, _ in named]
        self.parameters: list[Any] = [p for _, p in named]
        self._index_of = {id(p): i for i, p in enumerate(self.parameters)}
        self.slots = [Slot(k) for k in range(slots)]
        self.lock = threading.RLock()
        self.capture_seconds = 0.0
        self.commits = 0  # steps of optimizers over its parameters that were told (fused ones leave no other trace)
        self._active: Optional[Slot] = None
        self.seals = (Seal(), Seal())
        self.build: Optional[Build] = None  # what was captured
        self._own: frozenset[str] = frozenset()  # attributes that its forward was seen to write
        self._written = count_writes(self.parameters)
        self.step_weights: Weights = ()  # versions of the parameters that the whole step reads, where told
        self._fits: Callable[[Sequence[Any]], bool] = lambda arguments: False
        self._sealed_training = module.training
        self._captured_on, self._autocast = "cpu", None  # device and autocast that it was captured under
        self._scratch: dict[int, "torch.Tensor"] = {}
        before = module.__dict__.get("forward")
        self._undo: Callable[[], None] = split_linears(module, self._queue_now, self._trains)
        self._wrapped = module.__dict__.get("forward") is not before
        self.tell: Any = None  # told what replays touch, while somebody watches (watch.py)
        self.spec: Any = None  # how arguments were given, where they are more than a row of them
        self._shape: Any = None
        self.function: Callable[..., Any] = module.forward
        if has_hooks(module):
            if capture:
                raise ArgumentError(f"{name} has hooks, which a replay would not call",
                                    remedy="remove them, or leave it out of capture")
            self.function = module

    def _queue_now(self) -> Optional[Queue]:
        return None if self._active is None else self._active.queue

    def _trains(self, parameter: Any) -> bool:
        return bool(parameter.requires_grad) and id(parameter) in self._index_of

    def close(self) -> None:
        """Gives the module back as it was. Captured memory lives as long as the stage."""
        self._undo()

    @property
    def wraps_forward(self) -> bool:
        """The module's forward is this stage's doing, which `close` undoes."""
        return self._wrapped

    @property
    def device(self) -> "torch.device":
        return device_of(self.module)

    def main_grads(self) -> list[Any]:
        """The gradient of each parameter, fp32 unless the parameter came with another one; made where there is none."""
        for parameter in self.parameters:
            if getattr(parameter, "main_grad", None) is None:
                parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        return [parameter.main_grad for parameter in self.parameters]

    def _call(self, leaves: Sequence[Any]) -> Any:
        if self.spec is None:
            return self.function(*leaves)
        arguments, keywords = tree_unflatten(list(leaves), self.spec)
        return self.function(*arguments, **keywords)

    def evaluate(self, arguments: Sequence[Any]) -> Any:
        """What the module returns, eagerly, without a slot."""
        return self._call(arguments)

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Outputs in the shape in which the module returned them."""
        return tree_unflatten(list(outputs), self._shape)

    # ---- what an action computes: the same work eager and recorded ----

    def _forward(self, slot: Slot) -> Tensors:
        slot.drop_postponed()
        self._active = slot
        casts = torch.is_autocast_cache_enabled()  # its copies of weights outlive a step, and a graph would keep them
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.enable_grad():
                made = self._call(slot.leaves)
        finally:
            torch.set_autocast_cache_enabled(casts)
            self._active = None
        outputs, self._shape = tree_flatten(made)
        for output in outputs:
            if not is_tensor(output):
                raise ArgumentError(f"module {self.name} returns {type(output).__name__}; a stage returns tensors")
        slot.live = outputs
        return list(outputs)

    def _input_grad(self, slot: Slot) -> Tensors:
        """Gradients of the inputs; None for one that needs none. Parameters' gradients that come with them wait."""
        pairs = [(o, g) for o, g in zip(slot.live, slot.gradients) if o.requires_grad and g is not None]
        wanted = [leaf for leaf in slot.leaves if is_tensor(leaf) and leaf.requires_grad]
        targets = wanted + self.parameters
        self._active, slot.queue.open = slot, True  # a checkpointed forward that autograd runs again
        try:
            found: Sequence[Any] = torch.autograd.grad(
                [o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True) if targets and pairs else []
        finally:
            self._active, slot.queue.open = None, False
        gradients = iter(found[:len(wanted)])
        slot.stash = {i: g for i, g in enumerate(found[len(wanted):]) if g is not None}
        slot.live = []
        return [next(gradients, None) if is_tensor(leaf) and leaf.requires_grad else None for leaf in slot.leaves]

    def _weight_grad(self, slot: Slot) -> Tensors:
        """Every contribution of the microbatch, in the order in which backward made them."""
        made = self._own_weight_grads(slot)
        into, first = self.main_grads() if self.accumulate else [], slot.first
        with torch.no_grad():
            for entry in slot.queue.entries:
                self._place_product(entry, into, first, made)
            for i, gradient in slot.stash.items():
                self._place_sum(i, gradient, into, first, made)
        slot.drop_postponed()
        missing = [self.names[i] for i in range(len(self.parameters)) if i not in made]
        if missing and not self.allow_unused:
            raise breach("grad.missing", f"backward computed no gradient of {', '.join(missing)}; freeze it "
                         "(requires_grad=False) or say allow_unused", self.name, slot.microbatch, slot.submitted)
        return [] if self.accumulate else [made.get(i) for i in range(len(self.parameters))]

    def _own_weight_grads(self, slot: Slot) -> dict[int, Any]:
        """Parameters (by index) whose contribution the module itself puts into main_grad."""
        return {}

    def _place_product(self, entry: Postponed, into: list[Any], first: bool, made: dict[int, Any]) -> None:
        x, dy = entry.x.reshape(-1, entry.x.shape[-1]), entry.dy.reshape(-1, entry.dy.shape[-1])
        if entry.weight is not None:
            i = self._index_of[id(entry.weight)]
            if self.accumulate:
                self._with_place(i, into, lambda at: _add_product(at, dy, x, first and i not in made))
                made[i] = into[i]
            else:
                made[i] = made[i] + dy.t().mm(x) if i in made else dy.t().mm(x)
        if entry.bias is not None:
            self._place_sum(self._index_of[id(entry.bias)], dy.sum(0), into, first, made)

    def _place_sum(self, i: int, gradient: "torch.Tensor", into: list[Any], first: bool, made: dict[int, Any]) -> None:
        if not self.accumulate:
            made[i] = made[i] + gradient if i in made else gradient
            return
        sets = first and i not in made
        self._with_place(i, into, lambda at: at.copy_(gradient) if sets else at.add_(gradient))
        made[i] = into[i]

    def _with_place(self, i: int, into: list[Any], put: Callable[[Any], Any]) -> None:
        if self.placement == "direct":
            put(into[i])
            return
        scratch = self._scratch.setdefault(i, torch.empty_like(into[i]))
        scratch.copy_(into[i])
        put(scratch)
        into[i].copy_(scratch)

    # ---- actions ----

    def forward(self, slot: Slot, arguments: Sequence[Any], microbatch: int, generation: int, *,
                life: str = "", hand_out: bool = True, submitted: str = "") -> list["torch.Tensor"]:
        """F. The outputs have no autograd history of the caller's; captured ones are the slot's memory, valid until the
        slot is used again: `hand_out` makes their later use raise. `life`: of LIVES. The caller has asked the
        ledger."""
        with self.lock:
            if slot.handed.pending:
                slot.handed.take_back(
                    f"slot.stale: this tensor is memory of module {self.name}, slot {slot.index}, generation "
                    f"{slot.generation} (microbatch {slot.microbatch}, submitted at {slot.submitted or 'unknown'}), "
                    f"which is used again as generation {generation}; clone what is kept longer")
            slot.generation, slot.microbatch, slot.submitted = generation, microbatch, submitted or submitted_at()
            slot.life, slot.weights = life, self.step_weights or self._versions()
            if not self.capture:
                slot.leaves = [_leaf(a) for a in arguments]
                return [o.detach() for o in self._forward(slot) if o is not None]
            self._fill(slot, arguments)
            recording = slot.recordings["F" + life]
            self._replay(slot, "F", recording)
            made = [o for o in recording.outputs if o is not None]
            return [slot.handed.give(o) for o in made] if hand_out else made

    def input_grad(self, slot: Slot, gradients: Sequence[Optional["torch.Tensor"]]) -> Tensors:
        """I. Gradients of the outputs in, of the inputs out (the slot's memory where captured)."""
        with self.lock:
            self._set_gradients(slot, gradients)
            return self._run(slot, "I", lambda: self._input_grad(slot))

    def weight_grad(self, slot: Slot) -> Tensors:
        """W. Contributions of the step's first microbatch set, later ones add."""
        with self.lock:
            made = self._run(slot, "W", lambda: self._weight_grad(slot))
            if not self.capture:
                slot.forget()
            return made

    def backward(self, slot: Slot, gradients: Sequence[Optional["torch.Tensor"]]) -> tuple[Tensors, Tensors]:
        """B: (gradients of the inputs, results of W)."""
        with self.lock:
            self._set_gradients(slot, gradients)
            count = len(slot.leaves)
            made = self._run(slot, "B", lambda: self._both(slot))
            if not self.capture:
                slot.forget()
            return made[:count], made[count:]

    def _both(self, slot: Slot) -> Tensors:
        return self._input_grad(slot) + self._weight_grad(slot)

    def _run(self, slot: Slot, kind: str, work: Callable[[], Tensors]) -> Tensors:
        if not self.capture:
            return work()
        recording = slot.recordings[kind + slot.life]
        self._replay(slot, kind, recording)
        return recording.outputs

    def _replay(self, slot: Slot, kind: str, recording: Recording) -> None:
        if self.tell is not None:
            reads = [t for t in (slot.inputs if kind == "F" else slot.gradients) if is_tensor(t)]
            deposits = self.main_grads() if kind in "WB" and self.accumulate else []
            writes = [t for t in recording.outputs if t is not None]
            self.tell(f"replay of {kind} of {self.name}", [*reads, *self.parameters], [*writes, *deposits])
        recording.replay()

    def receive(self, slot: Slot, gradients: Sequence[Optional["torch.Tensor"]]) -> None:
        """Gradients of the outputs, ahead of the I or B that takes them."""
        with self.lock:
            self._set_gradients(slot, gradients)

    def _set_gradients(self, slot: Slot, gradients: Sequence[Optional["torch.Tensor"]]) -> None:
        if not self.capture:
            slot.gradients = list(gradients)
            return
        slot.gradients = slot.fixed
        for i, (static, given) in enumerate(zip(slot.gradients, gradients)):
            if static is None or static is given:
                continue
            if given is None:
                static.zero_()
                continue
            _must_match(f"gradient of output {i} of {self.name}", static, given)
            if static.data_ptr() != given.data_ptr():
                static.copy_(given)

    def check_arguments(self, arguments: Sequence[Any]) -> None:
        """Raises: ArgumentError where they are not what was captured."""
        if not self.capture or self._fits(arguments):
            return
        expected = self.slots[0].inputs
        if len(arguments) != len(expected):
            raise ArgumentError(f"{self.name} was captured with {len(expected)} arguments; {len(arguments)} came")
        for i, (static, given) in enumerate(zip(expected, arguments)):
            if is_tensor(static):
                _must_match(f"argument {i} of {self.name}", static, given)
            elif static != given:
                raise ArgumentError(f"argument {i} of {self.name} is {given!r}; it was captured as {static!r}",
                                    remedy="capture again, or run it with capture off")

    def _fill(self, slot: Slot, arguments: Sequence[Any]) -> None:
        with torch.no_grad():
            for static, given in zip(slot.inputs, arguments):
                if is_tensor(static) and static.data_ptr() != given.data_ptr():
                    static.copy_(given)

    # ---- capture ----

    def sample(self, arguments: Sequence[Any], side: Any = None) -> list["torch.Tensor"]:
        """Runs the module once on sample arguments: what its outputs look like. Nothing of autograd's is kept: its
        nodes belong to the stream that made them, and a capture must find its own. Hidden state is as before."""
        put_back, numbers = self.keep_hidden(), _generator_state(self.device)
        slot = Slot(-1)
        slot.leaves = [_leaf(a) for a in arguments]
        _on(side, lambda: self._forward(slot))
        put_back()
        _restore_generator(self.device, numbers)
        return [_leaf(output) for output in slot.live]

    def prepare(self, arguments: Sequence[Any], kinds: Sequence[Sequence[str]], side: Any,
                warmups: int = WARMUPS) -> None:
        """Captures every slot. `kinds[k]`: the actions that slot k is used for, F, I, W or B, each with the life that
        it is part of. `side`: the stream that it is captured on (`capture_stream`), one for all stages: libraries
        make a workspace for each. Module buffers, gradients and generators are afterwards as they were before."""
        if not self.capture:
            return
        began = time.perf_counter()
        if side is not None:  # warm-up must not meet work of others in a workspace that libraries share
            torch.cuda.synchronize(self.device)
        put_back = self._keep_state()
        numbers = _generator_state(self.device)
        habits = Habits(self.module, self.name, self.knows)
        outputs = self.sample(arguments, side)
        habits.settle()
        with _no_collection():
            for slot, wanted in zip(self.slots, kinds):
                self._allocate(slot, arguments, outputs)
                _on(side, lambda: self._warm(slot, wanted, warmups))
                self._record_all(slot, wanted, side)
        broken = habits.broken(lambda: self.sample(arguments, side))
        put_back()
        _restore_generator(self.device, numbers)
        if side is not None:
            torch.cuda.synchronize(self.device)
        if broken:
            raise UnsupportedError(broken, remedy="write it in place, or leave the module out of capture",
                                   status="unsupported")
        self._own = habits.own()
        self.seals = self._sealed()
        self.seal_build()
        self._fits = fitting(self.slots[0].inputs)
        self._sealed_training, self._captured_on = self.module.training, self.device.type
        self._autocast = _autocast_now(self._captured_on)
        self.capture_seconds = time.perf_counter() - began

    def keep_hidden(self) -> Callable[[], None]:
        """Module buffers and whatever else a forward changes beside its results. Returns what puts it back."""
        return _keep(self.module.buffers())

    def _keep_state(self) -> Callable[[], None]:
        """What capture changes and must not: hidden state and gradients. Returns what puts them back."""
        hidden, gradients = self.keep_hidden(), _keep(self.main_grads() if self.accumulate else [])

        def put_back() -> None:
            hidden()
            gradients()

        return put_back

    def _allocate(self, slot: Slot, arguments: Sequence[Any], outputs: Sequence["torch.Tensor"]) -> None:
        slot.inputs = [a.detach().clone().requires_grad_(a.requires_grad) if is_tensor(a) else a for a in arguments]
        slot.leaves = slot.inputs
        slot.fixed = [torch.zeros_like(o) if o.requires_grad else None for o in outputs]
        slot.gradients = slot.fixed
        slot.pool = torch.cuda.graph_pool_handle() if self.capture == "graph" else None

    def _warm(self, slot: Slot, kinds: Sequence[str], warmups: int) -> None:
        for turn in range(warmups if self.capture == "graph" else 0):
            slot.life = "1" if turn == 0 else ""
            self._forward(slot)
            if any(kind[0] != "F" for kind in kinds):
                self._both(slot)

    def _record_all(self, slot: Slot, kinds: Sequence[str], side: Any) -> None:
        """Each life has recordings of its own, from F on. Lives of a slot never overlap, so they share its memory."""
        for slot.life in LIVES:
            for kind in "FIWB":
                if kind + slot.life in kinds:
                    slot.recordings[kind + slot.life] = self._record(slot, kind, side)
            slot.forget()

    def _record(self, slot: Slot, kind: str, side: Any) -> Recording:
        works: dict[str, Callable[[], Tensors]] = {
            "F": lambda: self._forward(slot), "I": lambda: self._input_grad(slot),
            "W": lambda: self._weight_grad(slot), "B": lambda: self._both(slot)}
        work = works[kind]
        return GraphRecording(work, slot.pool, side) if self.capture == "graph" else HostRecording(work)

    def _sealed(self) -> tuple[Seal, Seal]:
        """Seals of what a forward and an input gradient touch, and of that and what deposits go to."""
        found: list[Place] = []
        for prefix, module in self.module.named_modules():
            path = ".".join(part for part in (self.name, prefix) if part)
            for owner in (module._parameters, module._buffers):
                found += [(f"{path}.{key}", owner, key) for key, tensor in owner.items() if tensor is not None]
        into: list[Place] = []
        if self.accumulate:
            self.main_grads()
            into = [(f"main_grad of {n}", p.__dict__, "main_grad") for n, p in zip(self.names, self.parameters)]
        mode = [(self.module.__dict__, "training")]
        return Seal(found, mode), Seal(found + into, mode)

    def moved(self, kind: str = "B") -> Optional[tuple[str, int, int]]:
        """(name, address that was captured, address now) of a tensor that moved since and that the action touches."""
        if not self.capture:
            return None
        return self.seals[kind in "WB"].moved()

    def seal_build(self) -> None:
        """The module is from now on what it is now."""
        self.build = Build(self.module, self.name, self.keeps, self._own)

    def keeps(self, kind: type) -> frozenset[str]:
        """Attributes that modules of a class write themselves, whatever they are at a time."""
        return stored_by_forward(kind)

    def knows(self, kind: type) -> bool:
        """What modules of a class leave in their attributes is known to be no part of what they compute."""
        return False

    def rebuilt(self) -> Optional[tuple[str, str]]:
        """What became of the module since it was captured (`Build.changed`); None: it is as it was. Where it runs
        eagerly, only a parameter that is not the stage's matters: nobody would give it its gradient."""
        if self.capture and self.build is not None:
            autocast = _autocast_now(self._captured_on)
            if autocast != self._autocast:
                return "mode", f"autocast is {autocast} and was {self._autocast}"
            return self.build.changed()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._index_of:
                return "constant", f"{self.name}.{name} is a parameter that came later"
        return None

    def begin_step(self) -> None:
        """All forwards and backwards from here on are of one version of the weights."""
        self.step_weights = self._versions()
        if self.accumulate and (not self.capture or any(map(_hooked, self.parameters))):  # captured: sealed
            must_deposit([self])

    def _versions(self) -> tuple[int, tuple[int, ...]]:
        return self.commits, self._written()

    def check_weights(self, slot: Slot) -> None:
        """Ahead of a backward. Raises: Trap where a parameter was written since the slot's forward."""
        now = (self.commits, self._written())
        if now == slot.weights or not slot.weights:
            return
        changed = [n for n, a, b in zip(self.names, now[1], slot.weights[1]) if a != b]
        raise breach("weight.version", f"{', '.join(changed) or 'an optimizer stepped: parameters'} changed between "
                     "forward and backward, which would meet other weights", self.name, slot.microbatch,
                     submitted_at() or slot.submitted)

    @property
    def mode_changed(self) -> bool:
        """It is in another of training and evaluation than when it was captured."""
        return bool(self.capture) and self.module.training != self._sealed_training


def has_hooks(module: "torch.nn.Module") -> bool:
    """Hooks of its own, which are called around its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, hook) for hook in hooks)


def _autocast_now(device: str) -> Any:
    """The dtype that autocast computes in; "off"."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else "off"


def _hooked(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _must_lie_apart(placed: Sequence[tuple[str, Any]]) -> None:
    """Of (name, main_grad). Raises: ArgumentError where two share memory."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name)
                   for name, t in placed if t.is_contiguous() and t.numel() > 0 and t.device.type != "meta")
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:]):
        if begin < end:
            raise ArgumentError(f"main_grad of {name} and of {other} lie in the same memory (grad.twice)",
                                remedy="give each parameter its own")


def _require_deposits(stages: Sequence[Stage]) -> None:
    _must_lie_apart([placed for stage in stages for placed in zip(stage.names, stage.main_grads())])
    for stage in stages:
        for name, parameter, into in zip(stage.names, stage.parameters, stage.main_grads()):
            if _hooked(parameter):
                raise UnsupportedError(
                    f"{name} has a hook on its gradient, which deposits in main_grad would not call (grad.missing)",
                    remedy="remove it; change .grad after the step's last action instead", status="unsupported")
            if into.shape != parameter.shape or not into.is_floating_point() or into.device != parameter.device:
                raise ArgumentError(
                    f"main_grad of {name} is {tuple(into.shape)} {into.dtype} on {into.device}; its parameter is "
                    f"{tuple(parameter.shape)} on {parameter.device} (graph.address)")


def must_deposit(stages: Sequence[Stage], opened: Sequence[Stage] = ()) -> None:
    """Raises: UnsupportedError for hooks that a deposit in main_grad would not call; ArgumentError for a main_grad that
    is not of its parameter's shape, or shares memory with another's. Then what is `opened` is closed."""
    try:
        _require_deposits(stages)
    except Error:
        for stage in opened:
            stage.close()
        raise


def must_not_share(modules: Sequence["torch.nn.Module"], names: Sequence[str]) -> None:
    """Raises: UnsupportedError for a trained parameter of two stages."""
    owners: dict[int, str] = {}
    for prefix, module in zip(names, modules):
        own = {id(p): f"{prefix}.{n}" for n, p in module.named_parameters() if p.requires_grad}
        shared = next((key for key in own if key in owners), None)
        if shared is not None:
            raise UnsupportedError(
                f"{own[shared]} is {owners[shared]}, too: each stage's first contribution of a step would set the "
                "gradient that they share, which grad.set forbids",
                remedy="put what shares it into one stage, or give each stage its own and add up their gradients",
                status="unsupported")
        owners.update(own)


def _must_be_whole(module: "torch.nn.Module", name: str) -> None:
    """Raises: UnsupportedError for parameters that somebody else gathers into other memory for each forward, and for
    gradients that somebody else takes away."""
    for path, part in module.named_modules():
        if type(part).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UnsupportedError(
                f"{name}{'.' + path if path else ''} is {type(part).__name__}, which takes gradients from autograd: a "
                "graph or a deposit in main_grad gives it none (grad.missing)",
                remedy="give the module inside, and reduce .grad after the step", status="unsupported")
    for path, parameter in module.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise UnsupportedError(
                f"{name}.{path} is sharded (DTensor): fully_shard gathers it into other memory for each use, which "
                "graph.address forbids", remedy="give the pipeline modules that are not sharded", status="unsupported")


def _keep(tensors: Iterable["torch.Tensor"]) -> Callable[[], None]:
    """Returns what gives the tensors the values that they have now."""
    kept = [(t, t.detach().clone()) for t in tensors]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)

    return put_back


def device_of(module: "torch.nn.Module") -> "torch.device":
    """Where its parameters, or else its buffers, are; the CPU where it has none."""
    tensors: list["torch.Tensor"] = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _leaf(argument: Any) -> Any:
    return argument.detach().requires_grad_(argument.requires_grad) if is_tensor(argument) else argument


def _must_match(what: str, static: "torch.Tensor", given: Any) -> None:
    if not is_tensor(given):
        raise ArgumentError(f"{what} is {type(given).__name__}; it was captured as a tensor")
    if static.shape != given.shape or static.dtype != given.dtype or static.device != given.device:
        raise ArgumentError(
            f"{what} is {tuple(given.shape)} {given.dtype} on {given.device}; captured as {tuple(static.shape)} "
            f"{static.dtype} on {static.device}", remedy="capture again, or run it with capture off")


def _add_product(at: "torch.Tensor", dy: "torch.Tensor", x: "torch.Tensor", sets: bool) -> None:
    """at = dy' x, or at += dy' x in one product."""
    beta = 0 if sets else 1
    if at.dtype == x.dtype == dy.dtype:
        torch.addmm(at, dy.t(), x, beta=beta, out=at)
    elif at.dtype == torch.float32 and at.is_cuda and x.dtype == dy.dtype:
        torch.addmm(at, dy.t(), x, out_dtype=torch.float32, beta=beta, out=at)
    else:
        product = dy.t().to(at.dtype).mm(x.to(at.dtype))
        at.copy_(product) if sets else at.add_(product)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage with graphs in it must not be collected while another graph is captured: that would invalidate it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_stream(device: "torch.device") -> Any:
    """A stream to capture on; None where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _on(side: Any, work: Callable[[], Any]) -> None:
    if side is None:
        work()
        return
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(side.device).wait_stream(side)


def _generator_state(device: "torch.device") -> Any:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore_generator(device: "torch.device", state: Any) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
