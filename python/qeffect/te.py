"""Transformer Engine's modules as pipeline stages under contract (docs/te.md).

    pipeline = qeffect.te.Pipeline([te.TransformerLayer(...), ...], schedule, loss, recipe=DelayedScaling(...), ...)

What Transformer Engine keeps in globals and flags belongs to the step here: scales fold once per step, behind its last
action and with its commit (or, for parity, where Transformer Engine folds them); the quantized copy of a weight is
filled by the step's first microbatch and used by the others; postponed weight gradients and the scales that a recompute
needs belong to the slot of their microbatch. Needs Transformer Engine 2.20.
"""
from __future__ import annotations

import inspect
import queue
import re
from collections import deque
from functools import cache
from typing import Any, Callable, Mapping, Optional, Sequence

from .errors import ArgumentError, UnsupportedError
from .torch import Pipeline as _Pipeline
from .torch._need import torch
from .torch.attributes import own_names, written_anywhere
from .torch.callables import build
from .torch.contract import Contract
from .torch.record import Tensors
from .torch.seal import Seal
from .torch.stage import Slot, Stage
from .torch.trap import breach, submitted_at

try:
    import transformer_engine
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.graph import is_graph_capturing
    from transformer_engine.pytorch.module._common import WeightGradStore
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.quantization import (FP8GlobalStateManager, get_default_fp8_recipe,
                                                         get_fp8_te_dtype)
except Exception as error:  # its libraries are loaded by hand, and what they lack is told in many ways
    raise UnsupportedError("qeffect.te needs Transformer Engine 2.20, which is not installed or does not load: "
                           f"{error}", remedy="pip install 'transformer-engine[pytorch]==2.20.*'",
                           status="unsupported") from error

KNOWN = ("2", "20")  # what is used of Transformer Engine's inside was read and tried in this version

_version = re.match(r"(\d+)\.(\d+)", str(transformer_engine.__version__))
if _version is None or _version.groups() != KNOWN:
    raise UnsupportedError(f"qeffect.te was made for Transformer Engine 2.20; this is {transformer_engine.__version__}",
                           status="unsupported")

_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"
_WRAPPED = "make_graphed_callables.<locals>.wrap_autocast.<locals>.call_func"  # what its captures make of a __call__
_NOTES = frozenset({"fp8_meta", "quantizers", "_fp8_workspaces", "param_init_meta",
                    "wgrad_accumulation_and_reduce_hooks"})  # containers that its modules fill as they are called
_RECOMPUTE = "global_fp8_buffer_pos_fwd_recompute"  # where a module finds its queue of scales for recomputation


def _must_run(recipe: Any) -> None:
    """Raises: UnsupportedError without a GPU; ArgumentError for what is no recipe."""
    if not torch.cuda.is_available():
        raise UnsupportedError("qeffect.te runs Transformer Engine's kernels, which need an NVIDIA GPU; there is none",
                               status="unsupported")
    if recipe is not None and not callable(getattr(recipe, "delayed", None)):
        raise ArgumentError(f"recipe is {recipe!r}; expected one of transformer_engine.common.recipe, or None")


class TEStage(Stage):
    """A stage with Transformer Engine's modules in it. `recipe`: how they quantize; None: not at all. `postpones`: its
    weight gradients are computed in W. `folds`: "step", or "te" for a fold behind each forward and each input gradient,
    where Transformer Engine has them. `cache_weights`: quantized once per step, else by every microbatch."""

    def __init__(self, module: "torch.nn.Module", name: str, index: int, slots: int, *, recipe: Any,
                 postpones: bool = False, folds: str = "step", cache_weights: bool = True, **options: Any) -> None:
        if folds not in ("step", "te"):
            raise ArgumentError(f"folds is {folds!r}; expected step or te")
        super().__init__(module, name, index, slots, **options)
        self.recipe, self.folds, self.cache_weights = recipe, folds, cache_weights
        self._recomputes: dict[int, list[Any]] = {}
        self._hidden = Seal()
        self.te_modules: list[Any] = [m for m in module.modules() if isinstance(m, TransformerEngineBaseModule)]
        self._classes = sorted({type(m) for m in module.modules()}, key=lambda kind: kind.__name__)
        self.te_names = [n for n, m in module.named_modules() if isinstance(m, TransformerEngineBaseModule)]
        self._fused = self._find_fused()
        self._queues: dict[int, list[Any]] = {}
        self._postponing = self._postpone() if postpones else []
        self._unwrap = [self._wrap(m) for m in self.te_modules]
        if self.function is not module:
            self.function = module.forward  # a module of Transformer Engine that is itself the stage is wrapped now

    def _find_fused(self) -> dict[int, Any]:
        """Parameters (by index) whose gradients Transformer Engine's products accumulate in main_grad themselves."""
        found: dict[int, Any] = {}
        for m in self.te_modules:
            if not getattr(m, "fuse_wgrad_accumulation", False):
                continue
            for parameter in m.parameters(recurse=False):
                if parameter.dim() > 1 and id(parameter) in self._index_of:
                    found[self._index_of[id(parameter)]] = parameter
        return found

    @property
    def fuses(self) -> bool:
        """Some products accumulate in main_grad themselves."""
        return bool(self._fused)

    @property
    def fused_grads(self) -> list[Any]:
        """`main_grad` of the parameters that Transformer Engine accumulates itself."""
        into = self.main_grads()
        return [into[i] for i in self._fused]

    def _postpone(self) -> list[Any]:
        """Modules that leave their weight gradients to W."""
        found = [m for m in self.te_modules if getattr(m, "fuse_wgrad_accumulation", False)]
        for m in found:
            if getattr(m, "use_bias", False):
                raise UnsupportedError(f"{self.name}: Transformer Engine assigns a postponed bias gradient instead of "
                                       "adding it", remedy="use bias=False, or a schedule without W",
                                       status="unsupported")
            m.wgrad_store = WeightGradStore(True)
        return found

    def _wrap(self, m: Any) -> Callable[[], None]:
        """Tells a module whether its microbatch fills the weight's cache. A call that is no action of the stage leaves
        the cache alone, whatever flag it comes with: graphs hold its addresses."""
        original = m.forward
        if "is_first_microbatch" not in inspect.signature(original).parameters:
            return lambda: None  # attention: it has no weight

        def forward(*arguments: Any, **keywords: Any) -> Any:
            cached = self._active is not None and self.cache_weights
            keywords["is_first_microbatch"] = self._active.first if self._active is not None and cached else None
            return original(*arguments, **keywords)

        m.forward = forward
        return lambda: m.__dict__.pop("forward", None)

    def close(self) -> None:
        for undo in self._unwrap:
            undo()
        for m in self._postponing:
            m.wgrad_store = WeightGradStore(False)
        super().close()

    # ---- what an action computes ----

    def _call(self, leaves: Sequence[Any]) -> Any:
        """`_graph=True` keeps Transformer Engine's global buffers out of it: no module registers, none folds."""
        self._refuse_what_a_capture_left()
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe, _graph=True):
            FP8GlobalStateManager.is_first_fp8_module()  # whoever reads it owns the backward's fold; nobody does
            return super()._call(leaves)

    def _refuse_what_a_capture_left(self) -> None:
        """A capture of Transformer Engine's leaves a global flag; one that fails leaves its own mark, and the classes
        of its modules wrapped in an autocast that is off for every other module. Raises: Trap (cache.stale)."""
        if FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor is not None:
            raise breach("cache.stale", "Transformer Engine's global flag to skip weight updates is set by graphs that "
                         "were made elsewhere: it would decide whether these weights are quantized; call "
                         "FP8GlobalStateManager.reset() first", self.name, None, submitted_at())
        wrapped = [k.__name__ for k in self._classes if getattr(k.__call__, "__qualname__", "") == _WRAPPED]
        if wrapped or is_graph_capturing():
            what = f"calls of {', '.join(wrapped)} run" if wrapped else "folds are"
            raise breach("cache.stale", f"a capture of Transformer Engine's failed and left its state behind: {what} "
                         "as if it still went on, so that nothing is quantized, or no scale folds; start the process "
                         "anew, or delete __call__ of these classes and call transformer_engine.pytorch.graph."
                         "set_capture_end()", self.name, None, submitted_at())

    def _bind_queues(self, slot: Slot) -> None:
        """What Transformer Engine keeps in one queue per module, slot by slot: postponed products, and the scales that
        a recompute goes back to."""
        queues = self._queues.setdefault(id(slot), [queue.Queue() for _ in self._postponing])
        for m, own in zip(self._postponing, queues):
            m.wgrad_store.context = own
        if self.recipe is None or not self.recipe.delayed():
            return
        kept = self._recomputes.setdefault(id(slot), [deque() for _ in self.te_modules])
        shared = FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer
        for m, own in zip(self.te_modules, kept):
            at = m.fp8_meta.setdefault(_RECOMPUTE, len(shared))
            shared += [deque() for _ in range(at + 1 - len(shared))]  # FP8GlobalStateManager.reset() emptied it
            shared[at] = own

    def drop(self) -> None:
        """What was postponed or kept for microbatches that are given up."""
        self._queues.clear()
        self._recomputes.clear()

    def _forward(self, slot: Slot) -> Tensors:
        self._bind_queues(slot)
        made = super()._forward(slot)
        self._fold_here(_FORWARD)
        return made

    def _input_grad(self, slot: Slot) -> Tensors:
        self._bind_queues(slot)
        for parameter in self._fused.values():
            parameter.grad_added_to_main_grad = False
        into = self._to_scratch(fill=not self._postponing)
        try:
            gradients = super()._input_grad(slot)
        finally:
            self._from_scratch(into, empty=not self._postponing)
        for i in self._fused:  # what comes back for them is a stand-in
            slot.stash.pop(i, None)
        slot.fused = [i for i, parameter in self._fused.items() if parameter.grad_added_to_main_grad]
        self._fold_here(_BACKWARD)
        return gradients

    def _own_weight_grads(self, slot: Slot) -> dict[int, Any]:
        self._bind_queues(slot)
        if self._postponing:
            into = self._to_scratch(fill=True)
            try:
                with torch.no_grad():
                    for m in reversed(self._postponing):
                        m.backward_dw()
            finally:
                self._from_scratch(into, empty=True)
        found = self.main_grads()
        return {i: found[i] for i in slot.fused}

    def _to_scratch(self, fill: bool) -> dict[int, Any]:
        """placement="copy": products accumulate in scratch, which `fill` gives what was accumulated so far."""
        if self.placement == "direct":
            return {}
        into = {i: parameter.main_grad for i, parameter in self._fused.items()}
        for i, parameter in self._fused.items():
            parameter.main_grad = self._scratch.setdefault(i, torch.empty_like(into[i]))
            if fill:
                parameter.main_grad.copy_(into[i])
        return into

    def _from_scratch(self, into: Mapping[int, Any], empty: bool) -> None:
        for i, there in into.items():
            if empty:
                there.copy_(self._scratch[i])
            self._fused[i].main_grad = there

    def _fold_here(self, direction: str) -> None:
        if self.folds == "te":
            _fold([s for name, s in self.states().items() if name.endswith(direction)], self.recipe, direction)

    def keeps(self, kind: type) -> frozenset[str]:
        return written_anywhere(kind) | own_names(kind) | _NOTES if _is_te(kind) else super().keeps(kind)

    def knows(self, kind: type) -> bool:
        return _is_te(kind)

    # ---- hidden state ----

    def states(self) -> dict[str, Any]:
        """Scales and histories of delayed scaling, by module and direction; made by the first forward."""
        found: dict[str, Any] = {}
        if self.recipe is None or not self.recipe.delayed():
            return found
        for name, m in zip(self.te_names, self.te_modules):
            for direction in (_FORWARD, _BACKWARD):
                if direction in m.fp8_meta:
                    found[f"{self.name}.{name}.{direction}" if name else f"{self.name}.{direction}"] = (
                        m.fp8_meta[direction])
        return found

    def prepare(self, *arguments: Any) -> None:
        super().prepare(*arguments)
        self._hidden = Seal([(f"{name}.{part}", state.__dict__, part)
                             for name, state in self.states().items() for part in ("scale", "amax_history")])

    def hidden_moved(self) -> Optional[tuple[str, int, int]]:
        """As `moved`, of scales and histories: graphs write where they were. Only Transformer Engine exchanges them,
        for another length of history, so it is asked once per step."""
        return self._hidden.moved() if self.capture else None

    def keep_hidden(self) -> Callable[[], None]:
        put_back = super().keep_hidden()
        before = {n: (s.scale.clone(), s.amax_history.clone()) for n, s in self.states().items()}

        def put_all_back() -> None:
            put_back()
            with torch.no_grad():
                for name, state in self.states().items():
                    if name in before:
                        state.scale.copy_(before[name][0])
                        state.amax_history.copy_(before[name][1])
                    else:
                        state.scale.fill_(1.0)
                        state.amax_history.zero_()

        return put_all_back


def _is_te(kind: type) -> bool:
    return kind.__module__.startswith("transformer_engine.")


class Workspace:
    """Transformer Engine has one GEMM workspace per device, whatever stream a product runs on: work of any pipeline
    that goes to another stream than the last one comes behind it."""

    def __init__(self) -> None:
        self._last: Any = None

    def enter(self, contract: Contract) -> None:
        """Ahead of an action of the contract's."""
        if contract.peek() == self._last:
            return
        current = contract.streams.current()
        if self._last is not None:
            contract.streams.order(self._last, current)
        self._last = current


@cache
def workspace_of(device: "torch.device") -> Workspace:
    return Workspace()


class Pipeline(_Pipeline):
    """As qeffect.torch.Pipeline, with `recipe`: DelayedScaling, Float8CurrentScaling, Float8BlockScaling, or None.

    Modules with `fuse_wgrad_accumulation=True` accumulate in `main_grad` by their own products; a schedule with W then
    postpones them (`bias=False`). folds: "step": one fold per step and scale, behind its last action; "te": behind each
    forward and each backward, as Transformer Engine's own loop has them. cache_weights: each weight is quantized by the
    step's first microbatch; False: by every one. Raises: also UnsupportedError for what Transformer Engine cannot do.
    """

    def __init__(self, modules: Sequence["torch.nn.Module"], schedule: Any, loss: Any, *, recipe: Any,
                 folds: str = "step", cache_weights: bool = True, **options: Any) -> None:
        _must_run(recipe)
        self.recipe, self.folds, self.cache_weights = recipe, folds, cache_weights
        self._hidden: list[Any] = []  # scales and histories as the step finds them, and what they were then
        self._before: list[Any] = []
        super().__init__(modules, schedule, loss, **options)
        self._workspace = workspace_of(self.device)

    def _make_stage(self, module: "torch.nn.Module", name: str, index: int, **options: Any) -> Stage:
        postpones = any(a.kind == "W" and a.stage == index for a in self.actions)
        forwards = [a.microbatch for a in self.actions if a.stage == index and a.kind == "F"]
        if not self.contract.life(index, forwards[0]).startswith("1"):
            raise ArgumentError(f"stage {index}: the first forward is not of the microbatch whose gradient is first; "
                                "Transformer Engine's weight cache and gradients go by one flag")
        return TEStage(module, name, index, self.contract.slot_counts[index], recipe=self.recipe, postpones=postpones,
                       folds=self.folds, cache_weights=self.cache_weights, **options)

    def run(self, action: Any, x: "torch.Tensor", target: "torch.Tensor", submitted: str = "") -> None:
        self._workspace.enter(self.contract)
        super().run(action, x, target, submitted)

    def _te_stages(self) -> list[TEStage]:
        return [stage for stage in self.stages if isinstance(stage, TEStage)]

    def _states(self) -> dict[str, Any]:
        return {n: s for stage in self._te_stages() for n, s in stage.states().items()}

    def begin(self) -> None:
        super().begin()
        for stage in self._te_stages():
            moved = stage.hidden_moved()
            if moved is not None:
                super().abort()
                raise breach("graph.address", f"{moved[0]} was at {moved[1]:#x} when graphs were captured and is at "
                             f"{moved[2]:#x}", stage.name, None, submitted_at())
        states = list(self._states().values())
        with torch.no_grad():
            if states:
                # What an evaluation that nobody announced left in the running row is no amax of this step.
                torch._foreach_zero_([s.amax_history[0] for s in states])
                self._hidden = [s.scale for s in states] + [s.amax_history for s in states]
                if [t.shape for t in self._before] != [t.shape for t in self._hidden]:
                    self._before = [torch.empty_like(t) for t in self._hidden]
                torch._foreach_copy_(self._before, self._hidden)
            fused = [g for stage in self._te_stages() for g in stage.fused_grads]
            if fused and not self.cache_weights:  # its products then always add
                torch._foreach_zero_(fused)

    def _committed(self, veto: Optional["torch.Tensor"]) -> None:
        states = self._states()
        if not states:
            return
        if self.folds == "step":
            fold(states, self.recipe)
        if veto is not None:
            with torch.no_grad():
                for now, then in zip(self._hidden, self._before):
                    now.copy_(torch.where(veto > 0, then, now))

    def abort(self) -> None:
        """As qeffect.torch.Pipeline.abort; scales and histories, too, are as before the step."""
        was_open = self.contract.is_open
        super().abort()
        for stage in self._te_stages():
            stage.drop()
        if was_open and self._hidden:
            with torch.no_grad():
                torch._foreach_copy_(self._hidden, self._before)

    def fp8_state(self) -> dict[str, "torch.Tensor"]:
        """Scales and amax histories as plain tensors: "stage.module.scaling_fwd.scale", "...amax_history". Copies."""
        found: dict[str, "torch.Tensor"] = {}
        for name, state in self._states().items():
            found[f"{name}.scale"] = state.scale.detach().clone()
            found[f"{name}.amax_history"] = state.amax_history.detach().clone()
        return found

    def load_fp8_state(self, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Takes what fp8_state gave, in place. Raises: ArgumentError while a step is open, for missing names, other
        shapes, and scales that are not above zero and finite; then nothing has changed."""
        if self.contract.is_open:
            raise ArgumentError("a step is open; FP8 state is taken between steps")
        own = {f"{n}.{part}": getattr(s, part) for n, s in self._states().items() for part in ("scale", "amax_history")}
        if set(own) != set(tensors):
            raise ArgumentError(f"FP8 state differs in {sorted(set(own) ^ set(tensors))[:4]}")
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise ArgumentError(f"{name} is {tuple(tensors[name].shape)}; expected {tuple(tensor.shape)}")
            given = tensors[name]
            if name.endswith(".scale") and not bool((torch.isfinite(given) & (given > 0)).all()):
                raise ArgumentError(f"{name} holds what is no scale: {given.flatten()[:4].tolist()}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def evaluate(self, inputs: Sequence["torch.Tensor"], targets: Sequence["torch.Tensor"]) -> "torch.Tensor":
        """As qeffect.torch.Pipeline.evaluate; scales are used, and no amax stays behind."""
        put_back = [stage.keep_hidden() for stage in self._te_stages()]
        try:
            return super().evaluate(inputs, targets)
        finally:
            for undo in put_back:
                undo()


def make_graphed_callables(
        modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
        sample_kwargs: Any = None, *, enabled: bool = False, calibrating: bool = False, recipe: Any = None,
        amax_reduction_group: Any = None, cache_quantized_params: bool = False,
        _order: Optional[Sequence[float]] = None, _num_layers_per_chunk: Any = None, pool: Any = None,
        retain_graph_in_backward: bool = False, _reuse_graph_input_output_buffers: bool = False,
        clone_param_grads_on_return: bool = True, names: Optional[Sequence[str]] = None,
        capture: Optional[str] = None, quiet: bool = False) -> Any:
    """As qeffect.torch.make_graphed_callables, in the call shape of Transformer Engine's: with `enabled`, `recipe`, and
    `cache_quantized_params`, which makes calls say `is_first_microbatch`. Scales fold behind each forward and each
    backward of a module, in its graphs; an autocast around calls has no part in it. Modules with
    `fuse_wgrad_accumulation=True` need `main_grad` on every parameter; with cached weights the first microbatch sets
    it, else the caller zeroes it. Raises: also UnsupportedError for calibration and groups."""
    if calibrating or amax_reduction_group is not None:
        raise UnsupportedError("calibration and the reduction of amaxes over a group are not built",
                               status="unsupported")
    if pool is not None:
        raise ArgumentError("pool is not None; graphs of QEffect have memory of their own", remedy="leave it out")
    _must_run(recipe)
    own = recipe if recipe is not None else get_default_fp8_recipe() if enabled else None

    def make_stage(module: Any, name: str, index: int, slots: int, *, accumulate: bool, **options: Any) -> TEStage:
        made = TEStage(module, name, index, slots, recipe=own if enabled else None, folds="te",
                       cache_weights=cache_quantized_params, accumulate=accumulate, **options)
        if made.fuses and not accumulate:
            made.close()
            raise ArgumentError(f"{name} accumulates in main_grad, which not every parameter of it has")
        return made

    return build(modules, sample_args, num_warmup_iters, allow_unused_input, sample_kwargs, _order,
                 _num_layers_per_chunk, names, capture, None, quiet, make_stage, cache_quantized_params)


def fold(states: Mapping[str, Any], recipe: Any) -> None:
    """amax -> history -> next scale, by Transformer Engine's own kernel, once for all states of both directions."""
    for direction in (_FORWARD, _BACKWARD):
        _fold([s for name, s in states.items() if name.endswith(direction)], recipe, direction)


def _fold(states: Sequence[Any], recipe: Any, direction: str) -> None:
    import transformer_engine_torch as tex
    if not states:
        return
    with torch.no_grad():
        histories, scales = [s.amax_history for s in states], [s.scale for s in states]
        tex.fused_amax_and_scale_update_after_reduction(
            torch.cat([h[0] for h in histories]), histories, scales, recipe.amax_compute_algo,
            get_fp8_te_dtype(recipe, direction == _FORWARD), recipe.margin)
