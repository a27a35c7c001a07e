"""Where a weight gradient goes: into main_grad by the product itself (direct), or into memory of the graph and from
there into main_grad. Four stages of one layer, 8 microbatches of 1,024 tokens: every forward and backward of a step,
its folds, and the gradients in the dtype of the weights, without the optimizer."""
from __future__ import annotations

from functools import partial
from typing import Any, Callable

from .case import Case, attempt, reset_te, sustained_ms, te_order, tell

SHAPE, STAGES, MICROBATCHES = "h2048T1k", 4, 8
AT_LEAST, SECONDS = 1.13, 0.5


def _loss(output: Any, target: Any) -> Any:
    return (output * target).sum(dtype=output.dtype).float()


def under_qeffect(case: Case, order: str, fused: bool, placement: str) -> float:
    """ms of a step. `fused`: Transformer Engine's products accumulate; else their results are added to main_grad."""
    from .. import te as qte
    from ..schedule import Schedule
    schedule = Schedule.generate(order, ranks=STAGES, microbatches=MICROBATCHES)
    layers = [case.layer(fuse_wgrad_accumulation=fused) for _ in range(STAGES)]
    inputs, targets = [[case.random() for _ in range(MICROBATCHES)] for _ in range(2)]
    pipeline = qte.Pipeline(layers, schedule, _loss, recipe=case.recipe, example=(inputs[0], targets[0]),
                            placement=placement, quiet=True)
    found = sustained_ms(lambda: (pipeline.step(inputs, targets), None)[1], seconds=SECONDS)
    pipeline.close()
    return found


class _TeStep:
    """Transformer Engine's graphs, driven in the order of a schedule. Gradients: accumulated by the products (`fused`),
    or taken over from the graph and added to main_grad on the caller's stream."""

    def __init__(self, case: Case, order: str, fused: bool) -> None:
        import transformer_engine.pytorch as te

        from ..schedule import Schedule
        self.case, self.fused = case, fused
        self.actions = Schedule.generate(order, ranks=STAGES, microbatches=MICROBATCHES).flattened().row(0)
        self.layers = [case.layer(fuse_wgrad_accumulation=fused) for _ in range(STAGES)]
        samples = [(case.random().requires_grad_(True),) for _ in range(STAGES * MICROBATCHES)]
        self.calls = te.make_graphed_callables(
            tuple(self.layers), tuple(samples), enabled=True, recipe=case.recipe, cache_quantized_params=True,
            clone_param_grads_on_return=not fused, _order=te_order(self.actions), _num_layers_per_chunk=[1] * STAGES)
        self.inputs = [case.random() for _ in range(MICROBATCHES)]
        self.parameters = [list(layer.parameters()) for layer in self.layers]

    def step(self) -> None:
        import torch
        import transformer_engine.pytorch as te
        kept: dict[tuple[int, int], Any] = {}
        gradients: dict[tuple[int, int], Any] = {}
        for action in self.actions:
            stage, m = action.stage, action.microbatch
            if action.kind == "F":
                x = (self.inputs[m] if stage == 0 else kept[stage - 1, m][1].detach()).requires_grad_(True)
                with te.autocast(enabled=True, recipe=self.case.recipe):
                    y = self.calls[stage * MICROBATCHES + m](x, is_first_microbatch=m == 0)
                kept[stage, m] = (x, y)
                continue
            x, y = kept.pop((stage, m))
            torch.autograd.backward(y, self.case.dy if stage == STAGES - 1 else gradients.pop((stage, m)))
            if stage > 0:
                gradients[stage - 1, m] = x.grad
            x.grad = None
            self._hand_over(stage)
        self.ready = [p.main_grad.to(p.dtype) for own in self.parameters for p in own]  # for an optimizer

    def _hand_over(self, stage: int) -> None:
        import torch
        with torch.no_grad():
            for parameter in self.parameters[stage]:
                if parameter.grad is not None and not (self.fused and parameter.dim() > 1):
                    parameter.main_grad.add_(parameter.grad)
                parameter.grad = None


def te_graphs(case: Case, fused: bool) -> float:
    found = sustained_ms(_TeStep(case, "1f1b", fused).step, seconds=SECONDS)
    reset_te()
    return found


def run() -> dict[str, Any]:
    case = Case(SHAPE)
    found: dict[str, Any] = {"figure": "placement", "shape": SHAPE, "stages": STAGES, "microbatches": MICROBATCHES,
                             "at_least": AT_LEAST}
    works: dict[str, Callable[[], float]] = {}
    for order in ("zbh1", "1f1b"):
        works[f"{order}_direct_ms"] = partial(under_qeffect, case, order, True, "direct")
        works[f"{order}_handed_over_ms"] = partial(under_qeffect, case, order, False, "direct")
        works[f"{order}_copied_in_and_out_ms"] = partial(under_qeffect, case, order, True, "copy")
    works["te_graphs_1f1b_handed_over_ms"] = partial(te_graphs, case, False)
    works["te_graphs_1f1b_fused_ms"] = partial(te_graphs, case, True)
    for name, work in works.items():
        found[name] = attempt(lambda: round(work(), 3))
        tell(f"{name} {found[name]}")
    for order in ("zbh1", "1f1b"):
        _ratio(found, f"{order}_direct_over_handed_over", f"{order}_handed_over_ms", f"{order}_direct_ms")
        _ratio(found, f"{order}_direct_over_copied", f"{order}_copied_in_and_out_ms", f"{order}_direct_ms")
    _ratio(found, "direct_over_te_graphs_handed_over", "te_graphs_1f1b_handed_over_ms", "1f1b_direct_ms")
    _ratio(found, "direct_over_te_graphs_fused", "te_graphs_1f1b_fused_ms", "1f1b_direct_ms")
    return found


def _ratio(found: dict[str, Any], name: str, of: str, to: str) -> None:
    if isinstance(found[of], float) and isinstance(found[to], float):
        found[name] = round(found[of] / found[to], 3)
