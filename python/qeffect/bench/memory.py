"""Memory of graphs for 8 and for 32 microbatches: four stages of one layer, under QEffect and as Transformer Engine's
own graphs in the same order."""
from __future__ import annotations

from typing import Any

from .case import Case, attempt, memory_mib, reset_te, te_order, tell

SHAPE, STAGES = "h1024T1k", 4
MICROBATCHES = (8, 32)
ORDERS = ("1f1b", "zbh1")


def _loss(output: Any, target: Any) -> Any:
    return (output.float() * target).mean()


def _grown(before: dict[str, float]) -> dict[str, Any]:
    """MiB since `before`, and `graphs`: memory that graphs hold and tensors that they read and write."""
    now = memory_mib()
    found = {name: round(now[name] - before[name], 2) for name in now}
    return {"graphs_mib": round(found["pools_mib"] + found["allocated_mib"], 2), **found}


def qeffect_memory(case: Case, order: str, microbatches: int) -> dict[str, Any]:
    from .. import te as qte
    from ..schedule import Schedule
    schedule = Schedule.generate(order, ranks=STAGES, microbatches=microbatches)
    layers = [case.layer() for _ in range(STAGES)]
    before = memory_mib()
    pipeline = qte.Pipeline(layers, schedule, _loss, recipe=case.recipe, example=(case.random(), case.random()),
                            quiet=True)
    found = _grown(before)
    found["sets"] = [len(stage.slots) for stage in pipeline.stages]
    pipeline.close()
    return found


def te_memory(case: Case, order: str, microbatches: int, reuse: bool) -> dict[str, Any]:
    """`reuse`: `_reuse_graph_input_output_buffers`."""
    import transformer_engine.pytorch as te

    from ..schedule import Schedule
    schedule = Schedule.generate(order, ranks=STAGES, microbatches=microbatches).flattened()
    split = any(action.kind == "W" for action in schedule.row(0))
    layers = [case.layer(postpones=split) for _ in range(STAGES)]
    before = memory_mib()
    samples = [(case.random().requires_grad_(True),) for _ in range(STAGES * microbatches)]
    graphed = te.make_graphed_callables(
        tuple(layers), tuple(samples), enabled=True, recipe=case.recipe, cache_quantized_params=True,
        clone_param_grads_on_return=False, _order=te_order(schedule.row(0)), _num_layers_per_chunk=[1] * STAGES,
        _reuse_graph_input_output_buffers=reuse)
    del samples
    found = _grown(before)
    found["sets"] = [microbatches] * STAGES
    for one in graphed:
        one.reset()
    reset_te()
    return found


def run() -> dict[str, Any]:
    case = Case(SHAPE)
    found: dict[str, Any] = {"figure": "memory", "shape": SHAPE, "stages": STAGES}
    qeffect_memory(case, "1f1b", MICROBATCHES[0])  # workspaces and compiled kernels come with the first layer
    for order in ORDERS:
        for count in MICROBATCHES:
            rows = {"qeffect": attempt(lambda: qeffect_memory(case, order, count)),
                    "te": attempt(lambda: te_memory(case, order, count, False)),
                    "te_reusing_buffers": attempt(lambda: te_memory(case, order, count, True))}
            found[f"{order}, {count} microbatches"] = rows
            reset_te()
            tell(f"{order} {count} {rows}")
    return found
