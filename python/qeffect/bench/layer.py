"""One layer, forward and backward: Transformer Engine's own graphs, its kernels in one graph, eager, and captured under
QEffect, in one process, in turns, so that none has the cooler device."""
from __future__ import annotations

import random
import statistics
import time
from typing import Any, Callable, Sequence

from .case import Case, Meter, attempt, tell

MICROBATCHES = 32
TURNS, TURN_SECONDS = 7, 0.2  # short, in another order each: at the limit of power a work's place in a row shows
AT_MOST_MS = {"h1024T1k": 0.45, "h2048T2k": 1.37, "h4096T2k": 3.36, "h4096T8k": 14.7}
AT_MOST_CHECK_US = 5.0
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


class Under:
    """The layer as the only stage of a pipeline of MICROBATCHES, captured under contract."""

    def __init__(self, case: Case) -> None:
        import torch
        from torch.utils._pytree import tree_flatten

        from .. import te as qte
        from ..schedule import Action
        from ..torch.contract import Contract
        from ..torch.stage import capture_stream, device_of
        from ..torch.streams import streams_of
        layer = case.layer()
        self.case = case
        actions = [Action(0, kind, m) for m in range(MICROBATCHES) for kind in "FB"]
        names = [n for n, _ in layer.named_parameters()]
        self.contract = Contract(["layer"], [names], actions, streams_of(device_of(layer)))
        self.stage = qte.TEStage(layer, "layer", 0, 1, recipe=case.recipe, capture="graph")
        self.stage.main_grads()
        leaves, self.stage.spec = tree_flatten(((case.x,), {"rotary_pos_emb": case.rope}))
        self.leaves = leaves
        self.stage.prepare(leaves, [["F1", "B1", "F", "B"]], capture_stream(case.x.device))
        self.states = self.stage.states()
        self.fold = lambda: qte.fold(self.states, case.recipe)
        slot = self.stage.slots[0]
        # Input and gradient already lie in the slot, as for the peer of one graph; else they are copied there.
        dy: Any = slot.fixed[0]
        with torch.no_grad():
            dy.copy_(case.dy)
        self.in_place = (slot.inputs, dy)

    def step(self, copied: bool = False) -> None:
        """All microbatches of a step. `copied`: input and gradient come from elsewhere."""
        leaves, dy = (self.leaves, self.case.dy) if copied else self.in_place
        contract, stage, slot = self.contract, self.stage, self.stage.slots[0]
        self._begin()
        for microbatch in range(MICROBATCHES):
            self._check("F", microbatch)
            stage.forward(slot, leaves, microbatch, slot.generation + 1, life=contract.life(0, microbatch),
                          hand_out=False, submitted="bench")
            self._check("B", microbatch)
            stage.backward(slot, [dy])
        contract.take()
        self.fold()
        contract.commit()
        contract.end()

    def _begin(self) -> None:
        """As Pipeline.begin has it."""
        self.contract.begin()
        if self.stage.rebuilt() is not None:
            raise RuntimeError("the layer was changed while it was timed")
        self.stage.begin_step()

    def _check(self, kind: str, microbatch: int) -> None:
        """All that is checked before a replay, as Pipeline.run has it."""
        stage, slot = self.stage, self.stage.slots[0]
        if kind == "F":
            stage.check_arguments(self.leaves)
        else:
            stage.check_weights(slot)
        if stage.moved(kind) is not None or stage.mode_changed:
            raise RuntimeError("a parameter moved while it was timed")
        self.contract.submit(0, kind, microbatch)

    def check_us(self, rounds: int = 200) -> float:
        """Host time of the checks of one replay, and of its part of those of a step, without the replay: the median of
        steps."""
        contract, spent = self.contract, []
        for _ in range(rounds):
            began = time.perf_counter()
            self._begin()
            for microbatch in range(MICROBATCHES):
                self._check("F", microbatch)
                self._check("B", microbatch)
            spent.append(time.perf_counter() - began)
            contract.abort()
        return statistics.median(spent) / (2 * MICROBATCHES) * 1e6


PEERS: dict[str, Callable[[Case], Work]] = {"te_one_graph": te_one_graph, "te_graphs": te_graphs, "te_eager": te_eager}


def run(shape: str, turns: int = TURNS, peers: Sequence[str] = tuple(PEERS)) -> dict[str, Any]:
    case = Case(shape)
    found: dict[str, Any] = {"figure": "layer", "shape": shape, "microbatches": MICROBATCHES, "turns": turns,
                             "turn_seconds": TURN_SECONDS}
    under = Under(case)  # first: it refuses to capture while graphs of others have left their flag behind
    under.step()
    checks = [under.check_us()]
    works: dict[str, Any] = {"qeffect_ms": under.step, "qeffect_copied_ms": lambda: under.step(True)}
    for name in peers:
        works[f"{name}_ms"] = attempt(lambda: PEERS[name](case))
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
    checks.append(under.check_us())
    found["check_us_per_replay"] = [round(us, 3) for us in checks]  # before and behind the turns
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
