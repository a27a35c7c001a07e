"""One layer, forward and backward: Transformer Engine's own graphs, its kernels in one graph, eager, and captured under
QEffect, in one process, in turns, so that none has the cooler device."""
from __future__ import annotations

import random
import statistics
from typing import Any, Callable, Sequence

from ..torch.stage import Slot
from .case import AT_MOST_MS, PEERS, TURNS, Case, Meter, attempt, tell
from .checks import AT_MOST_CHECK_US, MICROBATCHES, Driven, contract_of, measure

TURN_SECONDS = 0.2  # short, in another order each: at the limit of power a work's place in a row shows
PUBLISHED_EAGER_RATIO = (1.82, 2.79)  # eager over captured, as published for other stacks
Work = Callable[[], None]


def te_graphs(case: Case) -> Work:
    """Transformer Engine's own graphs, cached weights, no clones."""
    import transformer_engine.pytorch as te
    layer = case.layer()
    graphed = te.make_graphed_callables(
        layer, (case.x.detach().clone().requires_grad_(True),), num_warmup_iters=3,
        sample_kwargs={"rotary_pos_emb": case.rope}, enabled=True, recipe=case.recipe, cache_quantized_params=True,
        clone_param_grads_on_return=False)

    def once(first: bool = False) -> None:
        with te.autocast(enabled=True, recipe=case.recipe):
            y = graphed(case.x, rotary_pos_emb=case.rope, is_first_microbatch=first)
        y.backward(case.dy)
        _forget(case, layer)

    once(True)
    return once


def te_one_graph(case: Case) -> Work:
    """Forward and backward as one graph: the kernels without a host, without copies of the input and the gradient."""
    import torch
    import transformer_engine.pytorch as te
    layer, side = case.layer(), torch.cuda.Stream()

    def once(first: bool) -> None:
        with te.autocast(enabled=True, recipe=case.recipe):
            y = layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=first)
        y.backward(case.dy)
        _forget(case, layer)

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for first in (True, True, False):
            once(first)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with te.autocast(enabled=True, recipe=case.recipe):
            y = layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=False)
        y.backward(case.dy)
    _forget(case, layer)
    case.kept.append((layer, y))
    return graph.replay


def te_eager(case: Case) -> Work:
    """Transformer Engine without graphs, cached weights."""
    import transformer_engine.pytorch as te
    layer = case.layer()

    def once() -> None:
        with te.autocast(enabled=True, recipe=case.recipe):
            y = layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=False)
        y.backward(case.dy)
        _forget(case, layer)

    with te.autocast(enabled=True, recipe=case.recipe):
        layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=True)
    return once


def _forget(case: Case, layer: Any) -> None:
    case.x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


class Under(Driven):
    """The layer as the only stage of a pipeline of MICROBATCHES, captured under contract."""

    def __init__(self, case: Case) -> None:
        import torch
        from torch.utils._pytree import tree_flatten

        from .. import te as qte
        from ..torch.stage import capture_stream, device_of
        layer = case.layer()
        stage = qte.TEStage(layer, "layer", 0, 1, recipe=case.recipe, capture="graph")
        stage.main_grads()
        leaves, stage.spec = tree_flatten(((case.x,), {"rotary_pos_emb": case.rope}))
        super().__init__(contract_of(layer, device_of(layer)), stage, leaves, case.dy)
        stage.prepare(leaves, [["F1", "B1", "F", "B"]], capture_stream(case.x.device))
        self.te_stage, self.workspace = stage, qte.workspace_of(case.x.device)
        states = stage.states()
        self._fold = lambda: qte.fold(states, case.recipe)
        slot = stage.slots[0]
        # Input and gradient already lie in the slot, as for the peer of one graph; else they are copied there.
        dy: Any = slot.fixed[0]
        with torch.no_grad():
            dy.copy_(case.dy)
        self.in_place: tuple[Any, Any] = (slot.inputs, dy)

    def run_step(self, copied: bool = False) -> None:
        """All microbatches of a step. `copied`: input and gradient come from elsewhere."""
        self.step(*((self.leaves, self.gradient) if copied else self.in_place))

    def begin(self) -> None:
        super().begin()
        if self.te_stage.hidden_moved() is not None:
            raise RuntimeError("a scale moved while it was timed")

    def check(self, kind: str, microbatch: int) -> Slot:
        self.workspace.enter(self.contract)
        return super().check(kind, microbatch)

    def close_step(self) -> None:
        self._fold()


_WORKS: dict[str, Callable[[Case], Work]] = dict(zip(PEERS, (te_one_graph, te_graphs, te_eager)))


def run(shape: str, turns: int = TURNS, peers: Sequence[str] = PEERS) -> dict[str, Any]:
    case = Case(shape)
    found: dict[str, Any] = {"figure": "layer", "shape": shape, "microbatches": MICROBATCHES, "turns": turns,
                             "turn_seconds": TURN_SECONDS}
    under = Under(case)  # first: it refuses to capture while graphs of others have left their flag behind
    under.run_step()
    checks = [measure(under)]
    works: dict[str, Any] = {"qeffect_ms": under.run_step, "qeffect_copied_ms": lambda: under.run_step(True)}
    for name in peers:
        works[f"{name}_ms"] = attempt(lambda: _WORKS[name](case))
        tell(f"{name} is ready")
    times: dict[str, list[float]] = {name: [] for name in works}
    meters = [(name, Meter(work, MICROBATCHES if name.startswith("qeffect") else 1, TURN_SECONDS))
              for name, work in works.items() if callable(work)]
    numbers = random.Random(0)
    for turn in range(turns):
        numbers.shuffle(meters)
        for name, meter in meters:
            times[name].append(meter.ms())
    for name, work in works.items():
        found[name] = round(statistics.median(times[name]), 4) if callable(work) else work
        found[name.replace("_ms", "_all_ms")] = [round(ms, 4) for ms in times[name]]
    checks.append(measure(under))
    found |= {name: [told[name] for told in checks] for name in checks[0]}  # before and behind the turns
    found["sealed_addresses"] = len(under.stage.seals[1].places)
    found["capture_seconds"] = round(under.stage.capture_seconds, 3)
    return _judged(found, shape, peers)


def _judged(found: dict[str, Any], shape: str, peers: Sequence[str]) -> dict[str, Any]:
    found["qeffect_at_most_ms"], found["check_us_at_most"] = AT_MOST_MS[shape], AT_MOST_CHECK_US
    for peer in peers:
        if isinstance(found[f"{peer}_ms"], float):
            found[f"{peer}_over_qeffect"] = round(found[f"{peer}_ms"] / found["qeffect_ms"], 3)
    found["published_eager_ratio"] = PUBLISHED_EAGER_RATIO
    return found
