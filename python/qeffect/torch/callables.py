"""A drop-in make_graphed_callables: PyTorch's and Transformer Engine's call shapes, with contracts.

What those corrupt in silence is refused here: a second forward on memory that a backward still needs, a backward of
another generation, an order that is not the captured one, an output kept over the next replay (raises where it is
used), a moved parameter. Gradients of parameters are handed over as tensors of their own."""
from __future__ import annotations

import sys
import threading
import weakref
from functools import partial
from numbers import Real
from typing import Any, Callable, Optional, Protocol, Sequence, Union

from torch.utils._pytree import tree_flatten

from ..errors import ArgumentError, ContractError
from ..ledger import Ledger, Submission
from ..program import Program
from ..schedule import Action
from ._need import torch
from .admit import told
from .contract import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Contract, _short
from .optimizer import tell_commits
from .stage import Slot, Stage, capture_stream, device_of, has_hooks, is_tensor, must_deposit, must_not_share
from .streams import Streams, streams_of
from .trap import Trap, submitted_at


class _Handle:
    """A forward's claim on its slot, held by the autograd context: whoever lets it go without a backward frees the
    slot."""

    __slots__ = ("slot", "generation", "microbatch", "leaves", "spent", "__weakref__")

    def __init__(self, slot: Slot, generation: int, microbatch: int, leaves: tuple[bool, ...]) -> None:
        self.slot, self.generation, self.microbatch = slot, generation, microbatch
        self.leaves, self.spent = leaves, False


class _Rights(Protocol):
    """Who judges the calls of graphed callables: `index` is the stage, `microbatch` the one that a call is for."""

    def forward(self, index: int, slots: Sequence[Slot], microbatch: int) -> tuple[Slot, int, int]:
        """(slot, generation, microbatch) of a forward."""

    def keep(self, index: int, handle: _Handle) -> None:
        """The handle stands for the forward from now on."""

    def backward(self, index: int, handle: _Handle, kind: str) -> None:
        """I, W or B of the handle's microbatch."""

    def refuse_launch(self, index: int, microbatch: int, frozen: str, captured: int, now: int) -> None:
        """Raises: ContractError."""

    def abort(self) -> None:
        """What is in flight is given up."""


class _Free:
    """Callables without a declared order: each has one slot, so one microbatch in flight."""

    def __init__(self, names: Sequence[str], streams: Streams) -> None:
        self.streams = streams
        program = Program()
        stream = program.stream("caller", "caller")
        slots = [program.slot(_short(name)) for name in names]
        self._graphs, self._stream = [program.graph(_short(name), counter=1) for name in names], stream
        for slot in slots:
            program.op(FORWARD, stream, slot.acquire(1), microbatch=0)
            program.op(BACKWARD, stream, slot.borrow(1), slot.release(1), microbatch=0)
        self.ledger = Ledger(program)
        self._forward = [self.ledger.prepare(FORWARD, stream, [slot.acquire(0)], item=2 * i)
                         for i, slot in enumerate(slots)]
        self._backward = [self.ledger.prepare(BACKWARD, stream, [slot.borrow(0), slot.release(0)], item=2 * i + 1)
                          for i, slot in enumerate(slots)]
        self._last: Any = None
        self._live: dict[int, Any] = {}
        self._made = [0] * len(names)    # generations of each slot, and how many of them before the last abort
        self._before = [0] * len(names)
        self._lock = threading.RLock()  # forwards and backwards may come from different threads
        self.ledger.step_begin()

    def _enter(self) -> None:
        current = self.streams.current()
        if self._last is not None and current != self._last:
            self.streams.order(self._last, current)
        self._last = current

    def _submit(self, submission: Submission, index: int, generation: int, effects: int) -> None:
        """Microbatches and generations are counted from the first call; the ledger counts from the last abort."""
        if generation <= self._before[index]:
            raise ContractError(f"slot.stale: generation {generation} was given up; the slot is at "
                                f"{self._made[index]}", rule="slot.stale")
        submission.set_microbatch(generation - 1)
        for effect in range(effects):
            submission.set_version(effect, generation - self._before[index])
        self.ledger.submit(submission)

    def forward(self, index: int, slots: Sequence[Slot], microbatch: int) -> tuple[Slot, int, int]:
        (slot,) = slots
        with self._lock:
            reference = self._live.get(index)
            if reference is not None and reference() is None:  # its autograd graph is gone: no backward will come
                self._submit(self._backward[index], index, slot.generation, 2)
                del self._live[index]
            generation = slot.generation + 1
            self._enter()
            self._submit(self._forward[index], index, generation, 1)
            self._made[index] = generation
            return slot, generation, generation - 1

    def keep(self, index: int, handle: _Handle) -> None:
        with self._lock:
            self._live[index] = weakref.ref(handle)

    def backward(self, index: int, handle: _Handle, kind: str) -> None:
        with self._lock:
            self._enter()
            self._submit(self._backward[index], index, handle.generation, 2)
            self._live.pop(index, None)

    def refuse_launch(self, index: int, microbatch: int, frozen: str, captured: int, now: int) -> None:
        with self._lock:
            self.ledger.op(FORWARD, self._stream, self._graphs[index].launch(0, frozen, captured, now))

    def abort(self) -> None:
        with self._lock:
            self.ledger.step_abort()
            self._live.clear()
            self._before = list(self._made)
            self.ledger.step_begin()


class _Planned:
    """Callables with a declared order: a step is the whole order, and slots are those of its plan."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._began: dict[int, int] = {}

    def _open(self) -> None:
        if self.contract.is_open and self.contract.is_complete:
            self.contract.take()
            self.contract.commit()
            self.contract.end()
        if not self.contract.is_open:
            self.contract.begin()

    def forward(self, index: int, slots: Sequence[Slot], microbatch: int) -> tuple[Slot, int, int]:
        self._open()
        place = self.contract.submit(index, FORWARD, microbatch)
        slot = slots[place.slot]
        return slot, slot.generation + 1, microbatch

    def keep(self, index: int, handle: _Handle) -> None:
        return None

    def backward(self, index: int, handle: _Handle, kind: str) -> None:
        if handle.generation != handle.slot.generation:
            raise ContractError(
                f"slot.stale: the handle is of generation {handle.generation} of slot {handle.slot.index}, which is at "
                f"{handle.slot.generation} (microbatch {handle.slot.microbatch})", rule="slot.stale")
        self.contract.submit(index, kind, handle.microbatch)

    def refuse_launch(self, index: int, microbatch: int, frozen: str, captured: int, now: int) -> None:
        self._open()
        self.contract.refuse_launch(index, microbatch, frozen, captured, now)

    def abort(self) -> None:
        self.contract.abort()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: "_Runner", microbatch: int, first: bool, leaves_at: int, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        leaves = tensors[leaves_at:]
        ctx.runner, ctx.leaves_at = runner, leaves_at
        ctx.handle, outputs = runner.forward(microbatch, leaves, first)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ArgumentError(f"module {ctx.runner.stage.name} is differentiated with create_graph=True; what is "
                                "replayed has no derivative", remedy="leave the module out of capture")
        inputs, parameters = ctx.runner.backward(ctx.handle, gradients)
        return (None, None, None, None, *parameters[:ctx.leaves_at], *inputs)


class _Runner:
    """One stage as its callables see it."""

    def __init__(self, stage: Stage, rights: _Rights, original: Callable[..., Any], split: bool,
                 cached: bool) -> None:
        self.stage, self.rights, self.original = stage, rights, original
        self.split = split              # W is a call of its own
        self.cached = cached            # calls say whether they are the first to use this version of the weights
        self.enabled = True
        self._waiting: list[_Handle] = []  # I is done, W is not
        self._anchor = torch.zeros((), requires_grad=True)

    def call(self, microbatch: int, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Captured where it can be; what it was not captured for (evaluation, another mode) runs as it always did."""
        if not self.enabled or not torch.is_grad_enabled() or self.stage.mode_changed:
            return self.original(*arguments, **keywords)
        keywords = dict(keywords)
        first = keywords.pop("is_first_microbatch", None) if self.cached else False
        if first is None:
            raise ArgumentError(f"module {self.stage.name} caches quantized weights; say is_first_microbatch=True or "
                                "False")
        leaves, spec = tree_flatten((tuple(arguments), keywords))
        if spec != self.stage.spec:
            raise ArgumentError(f"module {self.stage.name} was captured with other arguments: {self.stage.spec}; this "
                                f"call has {spec}")
        handed = [self._anchor] if self.stage.accumulate or self.split else list(self.stage.parameters)
        outputs = _Replay.apply(
            self, microbatch, bool(first), len(handed), *handed, *leaves)
        return self.stage.unflatten(outputs)

    def _named(self, error: ContractError, microbatch: int, submitted: str) -> ContractError:
        if isinstance(error, Trap):
            return error
        own = error.violations[0].microbatch if error.violations else None
        return Trap(error, self.stage.name, microbatch if own is None else own, submitted_at() or submitted)

    def forward(self, microbatch: int, leaves: Sequence[Any],
                first: bool) -> tuple[_Handle, list["torch.Tensor"]]:
        stage, detail = self.stage, ""
        try:
            moved, change = stage.moved("B" if stage.accumulate else FORWARD), stage.rebuilt()
            if moved is not None:
                detail = f" ({moved[0]} moved)"
                self.rights.refuse_launch(stage.index, microbatch, "address", moved[1], moved[2])
            if change is not None:
                detail = f" ({change[1]})"
                self.rights.refuse_launch(stage.index, microbatch, change[0], 1, 0)
            stage.check_arguments(leaves)
            slot, generation, microbatch = self.rights.forward(stage.index, stage.slots, microbatch)
        except ContractError as error:
            raise self._named(told(error, detail) if detail else error, microbatch, "") from None
        handle = _Handle(slot, generation, microbatch, tuple(is_tensor(x) and x.is_leaf for x in leaves))
        self.rights.keep(stage.index, handle)
        return handle, stage.forward(slot, leaves, microbatch, generation,
                                     life=("1" if first else "") + ("s" if self.split else ""))

    def backward(self, handle: _Handle, gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        stage, slot = self.stage, handle.slot
        if handle.generation == slot.generation:
            stage.check_weights(slot)
        try:
            self.rights.backward(stage.index, handle, INPUT_GRAD if self.split else BACKWARD)
        except ContractError as error:
            raise self._named(error, handle.microbatch, slot.submitted) from None
        parameters: list[Any] = []
        if self.split:
            inputs = stage.input_grad(slot, gradients)
            self._waiting.append(handle)
        else:
            inputs, parameters = stage.backward(slot, gradients)
        if not stage.capture:
            return list(inputs), parameters if parameters else [None] * max(1, len(stage.parameters))
        # What a leaf takes as its .grad must not be the slot's memory; the rest is used up by this backward.
        given = [None if g is None else g.clone() if leaf else slot.handed.give(g)
                 for g, leaf in zip(inputs, handle.leaves)]
        own = [None if g is None else g.clone() for g in parameters]
        return given, own if own else [None] * max(1, len(stage.parameters))

    def backward_dw(self) -> None:
        """W of the microbatch whose I came first among those that wait."""
        stage = self.stage
        if not self._waiting:
            raise Trap(ContractError(f"slot.empty: no weight gradient of {stage.name} waits", rule="slot.empty"),
                       stage.name, None, submitted_at())
        handle = self._waiting[0]
        try:
            self.rights.backward(stage.index, handle, WEIGHT_GRAD)
        except ContractError as error:
            raise self._named(error, handle.microbatch, handle.slot.submitted) from None
        self._waiting.pop(0)
        made = stage.weight_grad(handle.slot)
        for parameter, gradient in zip(stage.parameters, made):
            if gradient is not None:
                _accumulate(parameter, gradient)


def _accumulate(parameter: Any, gradient: "torch.Tensor") -> None:
    """Into .grad, never as memory of a slot."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype, copy=True)
    else:
        parameter.grad.add_(gradient)


def _actions(order: Sequence[float], layers: Sequence[int]) -> list[Action]:
    """TE's _order: +c is a forward of chunk c (from 1), -c its backward, -c-0.5 its postponed weight gradient; the k-th
    of each is of microbatch k. A chunk's layers are stages of their own."""
    first = [sum(layers[:chunk]) for chunk in range(len(layers))]
    counts: dict[tuple[int, str], int] = {}
    split = any(entry != int(entry) for entry in order)
    found: list[Action] = []
    for entry in order:
        if entry > 0 and entry != int(entry) or entry * 2 != int(entry * 2):
            raise ArgumentError(f"_order has {entry}; expected c, -c or -c-0.5 of chunk c")
        kind = FORWARD if entry > 0 else WEIGHT_GRAD if entry != int(entry) else INPUT_GRAD if split else BACKWARD
        chunk = int(abs(entry)) - 1
        if not 0 <= chunk < len(layers):
            raise ArgumentError(f"_order names chunk {chunk + 1}; there are {len(layers)}")
        microbatch = counts.get((chunk, kind), 0)
        counts[chunk, kind] = microbatch + 1
        own = range(first[chunk], first[chunk] + layers[chunk])
        found += [Action(stage, kind, microbatch) for stage in (own if kind == FORWARD else reversed(own))]
    return found


def _capture_kind(stage_device: "torch.device", capture: Optional[str]) -> str:
    if capture is not None and (capture not in ("", "graph", "host") or (
            capture == "graph" and stage_device.type != "cuda")):
        raise ArgumentError(f"capture is {capture!r}; expected 'graph' (on a CUDA device), 'host' or ''; the modules "
                            f"are on {stage_device}")
    if capture is not None:
        return capture
    return "graph" if stage_device.type == "cuda" else "host"


def _is_call(arguments: Any) -> bool:
    return isinstance(arguments, (tuple, list)) and all(not isinstance(a, (tuple, list)) for a in arguments)


def make_graphed_callables(
        callables: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
        sample_kwargs: Any = None, *, pool: Any = None, _order: Optional[Sequence[float]] = None,
        _num_layers_per_chunk: Union[int, Sequence[int], None] = None, retain_graph_in_backward: bool = False,
        _reuse_graph_input_output_buffers: bool = False, clone_param_grads_on_return: bool = True,
        names: Optional[Sequence[str]] = None, capture: Optional[str] = None,
        streams: Optional[Streams] = None, quiet: bool = False) -> Any:
    """Captures modules so that calls of them replay graphs, as torch.cuda.make_graphed_callables and Transformer
    Engine's make_graphed_callables do, under contract.

    callables: a module or a sequence of them. sample_args: a tuple of tensors for one, a sequence of tuples for several
    (with `_order`: one per layer and microbatch, as TE has it). sample_kwargs: a dict, or a sequence of dicts.
    _order: TE's order of forwards and backwards of chunks; slots are as many as it has live microbatches.
    names: full names, for traps. capture: "graph", "host" or "" (eager, under contract); None: by the device.
    `pool` must be None: memory of graphs is QEffect's own. `retain_graph_in_backward`, `clone_param_grads_on_return`
    and `_reuse_graph_input_output_buffers` are taken and have no effect: gradients are handed over as tensors of
    their own, and memory is as large as what is live. Parameters that have `main_grad` are accumulated there in the
    graph.

    Returns what was given, changed in place (modules: their `forward`), and without `_order` in its shape; with it a
    list of callables, one per layer and microbatch: index = layers before the chunk * microbatches + microbatch *
    layers of the chunk + layer. Each has `backward_dw()`, `abort()` (give up what is in flight) and `reset()` (give
    the module back as it was).

    Raises: ArgumentError; ContractError where the order is not valid; later, at calls, Trap.
    """
    if pool is not None:
        raise ArgumentError("pool is not None; graphs of QEffect have memory of their own", remedy="leave it out")
    return build(callables, sample_args, num_warmup_iters, allow_unused_input, sample_kwargs, _order,
                 _num_layers_per_chunk, names, capture, streams, quiet, Stage, False)


def build(callables: Any, sample_args: Any, num_warmup_iters: int, allow_unused_input: bool, sample_kwargs: Any,
          _order: Optional[Sequence[float]], _num_layers_per_chunk: Union[int, Sequence[int], None],
          names: Optional[Sequence[str]], capture: Optional[str], streams: Optional[Streams], quiet: bool,
          make_stage: Callable[..., Stage], cached: bool) -> Any:
    """make_graphed_callables over stages of another kind. `cached`: calls say `is_first_microbatch`."""
    single = isinstance(callables, torch.nn.Module) or not isinstance(callables, (tuple, list))
    modules = [callables] if single else list(callables)
    for module in modules:
        _must_be_capturable(module)
    _must_fit(modules, sample_args, names)
    labels = list(names) if names is not None else [f"{type(m).__name__}[{i}]" for i, m in enumerate(modules)]
    if cached:
        must_not_share(modules, labels)
    samples = [tuple(sample_args)] if single and _order is None else [tuple(a) for a in sample_args]
    keywords = _keywords(sample_kwargs, len(samples))
    if _order is None:
        made = _make_free(modules, samples, keywords, names, capture, streams, allow_unused_input, num_warmup_iters,
                          make_stage, cached)
    else:
        made = _make_planned(modules, samples, keywords, names, capture, streams, allow_unused_input, num_warmup_iters,
                             list(_order), _num_layers_per_chunk, make_stage, cached)
    tell_commits(made[1])
    if not quiet:
        seconds = sum(stage.capture_seconds for stage in made[1])
        sets = sum(len(stage.slots) for stage in made[1])
        print(f"qeffect: captured {len(made[1])} modules, {sets} slots in {seconds:.2f} s", file=sys.stderr)
    return made[0][0] if single and _order is None else tuple(made[0]) if _order is None else made[0]


def _keywords(sample_kwargs: Any, count: int) -> list[dict[str, Any]]:
    if sample_kwargs is None:
        return [{} for _ in range(count)]
    if isinstance(sample_kwargs, dict):
        return [sample_kwargs for _ in range(count)]
    found = [dict(k) for k in sample_kwargs]
    if len(found) != count:
        raise ArgumentError(f"{len(found)} sample_kwargs for {count} sample_args")
    return found


def _must_fit(modules: Sequence[Any], sample_args: Any, names: Optional[Sequence[str]]) -> None:
    if not modules:
        raise ArgumentError("there is no module to capture")
    if len({id(module) for module in modules}) < len(modules):
        raise ArgumentError("a module is given twice; one forward cannot be of two captures",
                            remedy="give it once; with _order it may have several microbatches in flight")
    if names is not None and len(names) != len(modules):
        raise ArgumentError(f"{len(names)} names for {len(modules)} modules")
    if not isinstance(sample_args, (tuple, list)) or any(a is None for a in sample_args):
        raise ArgumentError(f"sample_args is {type(sample_args).__name__}; expected a tuple of tensors for a module, a "
                            "sequence of such tuples for several")


def _must_be_capturable(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"{type(module).__name__} is no torch.nn.Module; wrap the function in one")
    if has_hooks(module):
        raise ArgumentError(f"{type(module).__name__} has hooks, which a replay would not call; remove them first")


def _stages(modules: Sequence[Any], names: Optional[Sequence[str]], slots: Sequence[int], capture: Optional[str],
            allow_unused: bool, make_stage: Callable[..., Stage]) -> list[Stage]:
    found = []
    for i, module in enumerate(modules):
        name = names[i] if names is not None else f"{type(module).__name__}[{i}]"
        trained = [p for p in module.parameters() if p.requires_grad]
        accumulate = bool(trained) and all(getattr(p, "main_grad", None) is not None for p in trained)
        found.append(make_stage(module, name, i, slots[i], capture=_capture_kind(device_of(module), capture),
                                accumulate=accumulate, allow_unused=allow_unused))
        must_deposit(found[i:] if accumulate else [], opened=found)
    return found


def _capture_all(stages: Sequence[Stage], samples: Sequence[Sequence[Any]], keywords: Sequence[dict[str, Any]],
                 kinds: Sequence[str], warmups: int) -> None:
    side = capture_stream(stages[0].device)
    try:
        for stage, arguments, words in zip(stages, samples, keywords):
            leaves, stage.spec = tree_flatten((tuple(arguments), dict(words)))
            stage.prepare(leaves, [kinds] * len(stage.slots), side, max(1, warmups))
    except BaseException:
        for stage in stages:
            stage.close()
        raise


def _kinds(split: bool, cached: bool) -> tuple[str, ...]:
    """The actions that a slot is used for, with the lives that they are part of."""
    kinds = ("Fs", "Is", "Ws") if split else ("F", "B")
    return (*kinds, *(kind[0] + "1" + kind[1:] for kind in kinds)) if cached else kinds


def _make_free(modules: Sequence[Any], samples: Sequence[Any], keywords: Sequence[dict[str, Any]],
               names: Optional[Sequence[str]], capture: Optional[str], streams: Optional[Streams],
               allow_unused: bool, warmups: int, make_stage: Callable[..., Stage],
               cached: bool) -> tuple[list[Any], list[Stage]]:
    if len(samples) != len(modules):
        raise ArgumentError(f"{len(samples)} sample_args for {len(modules)} modules")
    stages = _stages(modules, names, [1] * len(modules), capture, allow_unused, make_stage)
    owns = [_own_forward(stage) for stage in stages]
    rights = _Free([stage.name for stage in stages], streams or streams_of(stages[0].device))
    originals = [module.forward for module in modules]
    _capture_all(stages, samples, keywords, _kinds(False, cached), warmups)
    for module, stage, original, own in zip(modules, stages, originals, owns):
        runner = _Runner(stage, rights, original, False, cached)
        module.forward = _entry(runner, 0)
        _dress(module, runner, module, own)
        stage.seal_build()  # anew: it has this forward now
    return list(modules), stages


def _own_forward(stage: Stage) -> Any:
    """The forward that a module had in place of its class's before it became a stage."""
    return None if stage.wraps_forward else stage.module.__dict__.get("forward")


def _make_planned(modules: Sequence[Any], samples: Sequence[Any], keywords: Sequence[dict[str, Any]],
                  names: Optional[Sequence[str]], capture: Optional[str], streams: Optional[Streams],
                  allow_unused: bool, warmups: int, order: list[float],
                  per_chunk: Union[int, Sequence[int], None], make_stage: Callable[..., Stage],
                  cached: bool) -> tuple[list[Any], list[Stage]]:
    if not order or not all(isinstance(e, Real) and 1 <= abs(e) < len(modules) + 1 for e in order):
        raise ArgumentError(f"_order is {order[:8]}; expected c, -c or -c-0.5 of chunks c from 1 to at most "
                            f"{len(modules)}, the number of layers")
    chunks = int(max(abs(entry) for entry in order))
    layers = _layers(per_chunk, chunks, len(modules))
    actions = _actions(order, layers)
    microbatches = 1 + max(action.microbatch for action in actions)
    if len(samples) != len(modules) * microbatches:
        raise ArgumentError(f"{len(samples)} sample_args for {len(modules)} layers and {microbatches} microbatches; "
                            f"expected {len(modules) * microbatches}")
    labels = [names[i] if names is not None else f"{type(m).__name__}[{i}]" for i, m in enumerate(modules)]
    parameters = [[n for n, p in m.named_parameters() if p.requires_grad] for m in modules]
    device = device_of(modules[0])
    contract = Contract(labels, parameters, actions, streams or streams_of(device))
    split = any(action.kind == WEIGHT_GRAD for action in actions)
    stages = _stages(modules, labels, contract.slot_counts, capture, allow_unused,
                     partial(make_stage, postpones=True) if split and make_stage is not Stage else make_stage)
    first = _first_samples(layers, microbatches)
    originals = [module.forward for module in modules]
    _capture_all(stages, [samples[i] for i in first], [keywords[i] for i in first],
                 _kinds(split, cached), warmups)
    rights = _Planned(contract)
    runners = [_Runner(stage, rights, original, split, cached) for stage, original in zip(stages, originals)]
    found: list[Any] = []
    begin = 0
    for count in layers:
        for microbatch in range(microbatches):
            for runner in runners[begin:begin + count]:
                entry = _entry(runner, microbatch)
                found.append(_dress(entry, runner, runner.stage.module))
        begin += count
    return found, stages


def _layers(per_chunk: Union[int, Sequence[int], None], chunks: int, total: int) -> list[int]:
    if per_chunk is None:
        layers = [total // chunks] * chunks
    else:
        layers = [per_chunk] * chunks if isinstance(per_chunk, int) else list(per_chunk)
    if sum(layers) != total or len(layers) != chunks or min(layers) < 1:
        raise ArgumentError(f"{total} layers do not make {chunks} chunks of {layers}")
    return layers


def _first_samples(layers: Sequence[int], microbatches: int) -> list[int]:
    """Index of each layer's sample for microbatch 0."""
    found, before = [], 0
    for count in layers:
        found += [before * microbatches + layer for layer in range(count)]
        before += count
    return found


def _entry(runner: _Runner, microbatch: int) -> Any:
    def forward(*arguments: Any, **keywords: Any) -> Any:
        return runner.call(microbatch, arguments, keywords)

    return forward


def _dress(entry: Any, runner: _Runner, module: Any, own: Any = None) -> Any:
    """`own`: a forward of the module's own that its class does not have."""

    def reset() -> None:
        runner.enabled = False
        runner.stage.close()
        if entry is module:
            for name in ("forward", *given):
                module.__dict__.pop(name, None)
            if own is not None:
                module.forward = own

    given = {"backward_dw": runner.backward_dw, "abort": runner.rights.abort, "reset": reset,
             "qeffect_stage": runner.stage}
    if entry is module:  # its own parts stay its own
        parts = (module._modules, module._parameters, module._buffers)
        given = {name: value for name, value in given.items() if not any(name in part for part in parts)}
    for name, value in given.items():
        setattr(entry, name, value)
    return entry
