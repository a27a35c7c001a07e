"""Transformer Engine's modules as pipeline stages under contract (docs/te.md).

    pipeline = qeffect.te.Pipeline([te.TransformerLayer(...), ...], schedule, loss, recipe=DelayedScaling(...), ...)

What Transformer Engine keeps in globals and flags belongs to the step here: scales fold once per step, behind its last
action and with its commit; the quantized copy of a weight is filled by the step's first microbatch and used by the
others; postponed weight gradients belong to the slot of their microbatch. Needs Transformer Engine 2.20.
"""
from __future__ import annotations

import inspect
import queue
import re
from typing import Any, Callable, Mapping, Optional, Sequence

from .errors import ArgumentError, UnsupportedError
from .torch import Pipeline as _Pipeline
from .torch._need import torch
from .torch.record import Tensors
from .torch.stage import Slot, Stage
from .torch.trap import breach

try:
    import transformer_engine
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module._common import WeightGradStore
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_fp8_te_dtype
except ImportError as error:
    raise UnsupportedError("qeffect.te needs Transformer Engine 2.20, which is not installed or does not load",
                           remedy=f"pip install 'transformer-engine[pytorch]==2.20.*' ({error})",
                           status="unsupported") from error

KNOWN = ("2", "20")  # what is used of Transformer Engine's inside was read and tried in this version

_version = re.match(r"(\d+)\.(\d+)", str(transformer_engine.__version__))
if _version is None or _version.groups() != KNOWN:
    raise UnsupportedError(f"qeffect.te was made for Transformer Engine 2.20; this is {transformer_engine.__version__}",
                           status="unsupported")

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")


class TEStage(Stage):
    """A stage with Transformer Engine's modules in it. `recipe`: how they quantize; None: not at all."""

    def __init__(self, module: "torch.nn.Module", name: str, index: int, slots: int, *, recipe: Any, postpones: bool,
                 **options: Any) -> None:
        super().__init__(module, name, index, slots, **options)
        self.recipe = recipe
        self.te_modules: list[Any] = [m for m in module.modules() if isinstance(m, TransformerEngineBaseModule)]
        self.te_names = [n for n, m in module.named_modules() if isinstance(m, TransformerEngineBaseModule)]
        self._fused = self._find_fused()
        self._queues: dict[int, list[Any]] = {}
        self._postponing = self._postpone() if postpones else []
        self._unwrap = [self._wrap(m) for m in self.te_modules]

    def _find_fused(self) -> dict[int, Any]:
        """Parameters (by index) whose gradients Transformer Engine's products accumulate in main_grad themselves."""
        found: dict[int, Any] = {}
        for m in self.te_modules:
            if not getattr(m, "fuse_wgrad_accumulation", False):
                continue
            for parameter in m.parameters(recurse=False):
                if parameter.dim() > 1 and id(parameter) in self._index_of:
                    found[self._index_of[id(parameter)]] = parameter
        if found and self.placement != "direct":
            raise ArgumentError(f"{self.name} accumulates in main_grad itself; its placement is direct")
        return found

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
        """Tells a module whether its microbatch fills the weight's cache; evaluation leaves the cache alone."""
        original = m.forward
        if "is_first_microbatch" not in inspect.signature(original).parameters:
            return lambda: None  # attention: it has no weight

        def forward(*arguments: Any, **keywords: Any) -> Any:
            if self._active is not None and keywords.get("is_first_microbatch") is None:
                keywords["is_first_microbatch"] = self._active.first
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
        leaked = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
        if leaked is not None:
            raise breach("cache.stale", "Transformer Engine's global flag to skip weight updates is set by graphs that "
                         "were made elsewhere: it would decide whether these weights are quantized; call "
                         "FP8GlobalStateManager.reset() first", self.name, None, "")
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe, _graph=True):
            FP8GlobalStateManager.is_first_fp8_module()  # whoever reads it owns the backward's fold; nobody does
            return super()._call(leaves)

    def _bind_queues(self, slot: Slot) -> None:
        queues = self._queues.setdefault(id(slot), [queue.Queue() for _ in self._postponing])
        for m, own in zip(self._postponing, queues):
            m.wgrad_store.context = own

    def _input_grad(self, slot: Slot) -> Tensors:
        self._bind_queues(slot)
        for parameter in self._fused.values():
            parameter.grad_added_to_main_grad = False
        gradients = super()._input_grad(slot)
        for i in self._fused:  # what comes back for them is a stand-in
            slot.stash.pop(i, None)
        slot.fused = [i for i, parameter in self._fused.items() if parameter.grad_added_to_main_grad]
        return gradients

    def _own_weight_grads(self, slot: Slot) -> dict[int, Any]:
        self._bind_queues(slot)
        with torch.no_grad():
            for m in reversed(self._postponing):
                m.backward_dw()
        into = self.main_grads()
        return {i: into[i] for i in slot.fused}

    # ---- hidden state ----

    def states(self) -> dict[str, Any]:
        """Scales and histories of delayed scaling, by module and direction; made by the first forward."""
        found: dict[str, Any] = {}
        if self.recipe is None or not self.recipe.delayed():
            return found
        for name, m in zip(self.te_names, self.te_modules):
            for direction in _DIRECTIONS:
                if direction in m.fp8_meta:
                    found[f"{self.name}.{name}.{direction}" if name else f"{self.name}.{direction}"] = (
                        m.fp8_meta[direction])
        return found

    def _sealed_places(self) -> list[tuple[str, dict[str, Any], str]]:
        """Scales and histories, too: their kernels write where they were."""
        found = super()._sealed_places()
        for name, state in self.states().items():
            found += [(f"{name}.{part}", vars(state), part) for part in ("scale", "amax_history")]
        return found

    def _keep_state(self) -> Callable[[], None]:
        put_back = super()._keep_state()
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


class Pipeline(_Pipeline):
    """As qeffect.torch.Pipeline, with `recipe`: DelayedScaling, Float8CurrentScaling, Float8BlockScaling, or None.

    Modules with `fuse_wgrad_accumulation=True` accumulate in `main_grad` by their own products; a schedule with W then
    postpones them (`bias=False`). Raises: also UnsupportedError for what Transformer Engine cannot do.
    """

    def __init__(self, modules: Sequence["torch.nn.Module"], schedule: Any, loss: Any, *, recipe: Any,
                 **options: Any) -> None:
        self.recipe = recipe
        super().__init__(modules, schedule, loss, **options)

    def _make_stage(self, module: "torch.nn.Module", name: str, index: int, **options: Any) -> Stage:
        postpones = any(a.kind == "W" and a.stage == index for a in self.actions)
        forwards = [a.microbatch for a in self.actions if a.stage == index and a.kind == "F"]
        if not self.contract.life(index, forwards[0]).startswith("1"):
            raise ArgumentError(f"stage {index}: the first forward is not of the microbatch whose gradient is first; "
                                "Transformer Engine's weight cache and gradients go by one flag")
        return TEStage(module, name, index, self.contract.slot_counts[index], recipe=self.recipe, postpones=postpones,
                       **options)

    def _te_stages(self) -> list[TEStage]:
        return [stage for stage in self.stages if isinstance(stage, TEStage)]

    def _committed(self, veto: Optional["torch.Tensor"]) -> None:
        states = {n: s for stage in self._te_stages() for n, s in stage.states().items()}
        if states:
            fold(states, self.recipe, veto)

    def fp8_state(self) -> dict[str, "torch.Tensor"]:
        """Scales and amax histories as plain tensors: "stage.module.scaling_fwd.scale", "...amax_history". Copies."""
        found: dict[str, "torch.Tensor"] = {}
        for stage in self._te_stages():
            for name, state in stage.states().items():
                found[f"{name}.scale"] = state.scale.detach().clone()
                found[f"{name}.amax_history"] = state.amax_history.detach().clone()
        return found

    def load_fp8_state(self, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Takes what fp8_state gave, in place. Between steps. Raises: ArgumentError for missing names and other shapes;
        then nothing has changed."""
        own = {f"{n}.{part}": getattr(s, part) for stage in self._te_stages()
               for n, s in stage.states().items() for part in ("scale", "amax_history")}
        if set(own) != set(tensors):
            raise ArgumentError(f"FP8 state differs in {sorted(set(own) ^ set(tensors))[:4]}")
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise ArgumentError(f"{name} is {tuple(tensors[name].shape)}; expected {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def evaluate(self, inputs: Sequence["torch.Tensor"], targets: Sequence["torch.Tensor"]) -> "torch.Tensor":
        """As qeffect.torch.Pipeline.evaluate; scales are used, and no amax stays behind."""
        put_back = [stage._keep_state() for stage in self._te_stages()]
        try:
            return super().evaluate(inputs, targets)
        finally:
            for undo in put_back:
                undo()


def fold(states: Mapping[str, Any], recipe: Any, veto: Optional["torch.Tensor"] = None) -> None:
    """amax -> history -> next scale, by Transformer Engine's own kernel, once for all states of both directions. Where
    `veto` (float32 [], on the device) is 1, scales and histories stay and the step's amaxes are dropped."""
    import transformer_engine_torch as tex
    with torch.no_grad():
        for forward, direction in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            own = [s for name, s in states.items() if name.endswith(direction)]
            if not own:
                continue
            histories, scales = [s.amax_history for s in own], [s.scale for s in own]
            before = [t.clone() for t in (*histories, *scales)] if veto is not None else []
            tex.fused_amax_and_scale_update_after_reduction(
                torch.cat([h[0] for h in histories]), histories, scales, recipe.amax_compute_algo,
                get_fp8_te_dtype(recipe, forward), recipe.margin)
            if veto is None:
                continue
            for h in before[:len(histories)]:
                h[0].zero_()
            for now, then in zip((*histories, *scales), before):
                now.copy_(torch.where(veto > 0, then, now))
