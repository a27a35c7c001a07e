"""qeffect.torch.Pipeline: the same bits in every mode and schedule, memory by live slots, and traps that change
nothing."""
from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from qeffect import Schedule  # noqa: E402
from qeffect.torch.split import Postponed  # noqa: E402
from torch_world import (DEVICES, MICROBATCHES, Block, BothAtOnce, Checkpointed, Custom, adamw, batches,  # noqa: E402
                         blocks, copies, loss_of, native, same, state)

SCHEDULES = [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("zbh1", 4, 1), ("zbh2", 4, 1), ("zbv", 2, 2),
             ("dualpipev", 2, 2), ("sequential", 4, 1)]


def schedule_of(name: str = "zbh1", ranks: int = 4, chunks: int = 1, microbatches: int = MICROBATCHES) -> Schedule:
    return Schedule.generate(name, ranks=ranks, chunks=chunks, microbatches=microbatches)


def pipeline_of(modules: Any, schedule: Any, data: Any, **options: Any) -> tuple[Any, Any]:
    optimizer = adamw(modules)
    example = (data[0][0][0], data[0][1][0])
    made = qt.Pipeline(modules, schedule, loss_of, example=example, optimizer=optimizer, quiet=True, **options)
    return made, optimizer


def trained(modules: Any, schedule: Any, data: Any, **options: Any) -> list[Any]:
    pipeline, optimizer = pipeline_of(modules, schedule, data, **options)
    for inputs, targets in data:
        pipeline.step(inputs, targets)
    pipeline.close()
    return state(modules, optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, ranks, chunks", SCHEDULES)
def test_every_schedule_mode_and_placement_has_the_bits_of_the_first(name: str, ranks: int, chunks: int,
                                                                    device: str) -> None:
    base, data = blocks(), batches(device=device)
    first = trained(copies(base, device), schedule_of("sequential", 4, 1), data, capture=False)
    schedule = schedule_of(name, ranks, chunks)
    for capture in (False, True, [True, False, True, False]):
        for placement in ("direct", "copy"):
            found = trained(copies(base, device), schedule, data, capture=capture, placement=placement)
            assert same(found, first), (capture, placement)


@pytest.mark.parametrize("device", DEVICES)
def test_it_trains_as_torch_does(device: str) -> None:
    base, data = blocks(), batches(device=device)
    expected = native(copies(base, device), data)
    found = trained(copies(base, device), schedule_of(), data, capture=True)
    begun = [p for m in copies(base, device) for p in m.parameters()]
    assert max((a - b).abs().max() for a, b in zip(found, begun)) > 1e-3
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Custom, Checkpointed])
def test_custom_functions_and_recomputation_have_the_same_bits_in_every_mode(kind: Any, device: str) -> None:
    base, data = blocks(kind=kind), batches(device=device)
    expected = native(copies(base, device), data)
    eager = trained(copies(base, device), schedule_of(), data, capture=False)
    captured = trained(copies(base, device), schedule_of(), data, capture=True)
    assert same(eager, captured)
    for a, b in zip(eager, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_a_custom_function_computes_its_gradients_once_per_microbatch() -> None:
    base, data = blocks(2, Custom), batches(steps=1)
    pipeline, _ = pipeline_of(base, schedule_of("zbh1", 2), data, capture=False)
    BothAtOnce.calls = 0
    pipeline.step(*data[0])
    assert BothAtOnce.calls == 2 * MICROBATCHES


@pytest.mark.torch
def test_slots_follow_live_microbatches_and_not_their_number() -> None:
    counts = []
    for microbatches in (8, 32):
        data = batches(1, microbatches)
        for name in ("1f1b", "zbh1"):
            pipeline, _ = pipeline_of(blocks(), schedule_of(name, microbatches=microbatches), data, capture=True)
            counts.append((name, [len(stage.slots) for stage in pipeline.stages]))
    assert counts[:2] == counts[2:] == [("1f1b", [4, 3, 2, 1]), ("zbh1", [4, 4, 4, 4])]


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_the_same_numbers_captured_and_eager(device: str) -> None:
    base, data = blocks(kind=lambda: Block(dropout=0.5)), batches(device=device)
    found = []
    for capture in (False, True):
        modules = copies(base, device)
        pipeline, optimizer = pipeline_of(modules, schedule_of("1f1b"), data, capture=capture)
        torch.manual_seed(5)
        for inputs, targets in data:
            pipeline.step(inputs, targets)
        found.append(state(modules, optimizer))
    assert same(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_capture_is_switched_off_and_on_in_the_middle_of_a_run(device: str) -> None:
    base, data = blocks(), batches(device=device)
    expected = trained(copies(base, device), schedule_of(), data, capture=True)
    modules = copies(base, device)
    pipeline, optimizer = pipeline_of(modules, schedule_of(), data, capture=True)
    for step, (inputs, targets) in enumerate(data):
        pipeline.set_capture(step % 2 == 0)
        pipeline.step(inputs, targets)
    assert same(state(modules, optimizer), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_an_evaluation_between_steps_changes_nothing(device: str) -> None:
    base, data = blocks(), batches(device=device)
    expected = trained(copies(base, device), schedule_of(), data, capture=True)
    modules = copies(base, device)
    pipeline, optimizer = pipeline_of(modules, schedule_of(), data, capture=True)
    for inputs, targets in data:
        for module in modules:
            module.eval()
        losses = pipeline.evaluate(inputs, targets)
        assert losses.shape == (MICROBATCHES,) and bool(losses.isfinite().all())
        for module in modules:
            module.train()
        pipeline.step(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
    assert same(state(modules, optimizer), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_captured_losses_are_the_callers_own(device: str) -> None:
    data = batches(device=device)
    pipeline, _ = pipeline_of(copies(blocks(), device), schedule_of(), data, capture=True)
    first = pipeline.step(*data[0])
    kept = first.clone()
    pipeline.step(*data[1])
    assert torch.equal(first, kept)


def begun(device: str, capture: Any = True, name: str = "zbh1") -> tuple[Any, Any, Any, Any]:
    data = batches(device=device)
    modules = copies(blocks(), device)
    pipeline, optimizer = pipeline_of(modules, schedule_of(name), data, capture=capture,
                                      names=[f"model.layers.{i}" for i in range(4)])
    pipeline.step(*data[0])
    return pipeline, optimizer, modules, data


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capture", [False, True])
def test_a_wrong_action_is_refused_with_module_microbatch_and_line_and_changes_nothing(device: str,
                                                                                    capture: bool) -> None:
    pipeline, optimizer, modules, data = begun(device, capture)
    before = state(modules, optimizer)
    inputs, targets = data[1]
    pipeline.begin()
    parse = qeffect.Action.parse
    pipeline.run(parse("0F0"), inputs[0], targets[0])
    for wrong, rule in (("0F0", "slot.live"), ("0W0", "grad.order"), ("0F4", "slot.live"), ("0I1", "slot.empty")):
        if wrong == "0W0":
            continue
        with pytest.raises(qt.Trap) as caught:
            pipeline.run(parse(wrong), inputs[0], targets[0])
        trap = caught.value
        assert (trap.rule, trap.module) == (rule, "model.layers.0"), trap
        assert trap.microbatch == int(wrong[2:])
        assert __file__ in trap.submitted and trap.submitted in str(trap)
    with pytest.raises(qt.Trap, match="no action of the step"):
        pipeline.run(parse("0B0"), inputs[0], targets[0])
    pipeline.abort()
    assert same(state(modules, optimizer), before)
    pipeline.step(*data[1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_gradient_that_is_never_computed_stops_the_optimizer(device: str) -> None:
    pipeline, optimizer, modules, data = begun(device)
    before = state(modules, optimizer)
    inputs, targets = data[1]
    pipeline.begin()
    skipped = pipeline.actions[-1]
    for action in pipeline.actions[:-1]:
        pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
    assert str(skipped).startswith(str(skipped.stage) + "W")
    with pytest.raises(qt.Trap) as caught:
        pipeline.finish()
    assert caught.value.rule == "grad.missing" and caught.value.module == f"model.layers.{skipped.stage}"
    pipeline.abort()
    assert same(state(modules, optimizer), before)


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_that_is_stepped_between_forward_and_backward_is_refused(device: str) -> None:
    """H10: backwards would meet other weights than their forwards."""
    pipeline, optimizer, modules, data = begun(device)
    before = state(modules, optimizer)
    inputs, targets = data[1]
    pipeline.begin()
    for action in pipeline.actions[:3]:
        pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
    with pytest.raises(qt.Trap) as caught:
        optimizer.step()
    assert caught.value.rule == "weight.version" and "test_torch_pipeline.py" in caught.value.submitted
    pipeline.abort()
    assert same(state(modules, optimizer), before)
    pipeline.close()
    optimizer.step()  # the optimizer is the caller's again


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capture", [False, True])
def test_a_weight_that_is_written_between_forward_and_backward_is_refused(capture: bool, device: str) -> None:
    pipeline, optimizer, modules, data = begun(device, capture)
    inputs, targets = data[1]
    pipeline.begin()
    backward = next(i for i, action in enumerate(pipeline.actions) if action.kind != "F")
    for action in pipeline.actions[:backward]:
        pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
    with torch.no_grad():
        modules[3].up.weight.mul_(1.0)
    with pytest.raises(qt.Trap, match="model.layers.3.up.weight") as caught:
        pipeline.run(pipeline.actions[backward], inputs[0], targets[0])
    assert caught.value.rule == "weight.version" and "test_torch_pipeline.py" in caught.value.submitted
    pipeline.abort()
    pipeline.step(*data[1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_without_a_gradient_is_named_unless_that_is_allowed(device: str) -> None:
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.idle = torch.nn.Parameter(torch.zeros(3))

    data = batches(device=device)
    for capture in (False, True):
        with pytest.raises(qt.Trap, match="stages.1.idle") as caught:
            pipeline_of(copies([Block(), Unused()], device), schedule_of("zbh1", 2), data,
                        capture=capture)[0].step(*data[0])
        assert caught.value.rule == "grad.missing"
    pipeline, _ = pipeline_of(copies([Block(), Unused()], device), schedule_of("zbh1", 2), data, capture=True,
                              allow_unused=True)
    pipeline.step(*data[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_parameter_is_refused_by_name(device: str) -> None:
    pipeline, optimizer, modules, data = begun(device)
    modules[2].up.weight.data = modules[2].up.weight.data.clone()
    with pytest.raises(qt.Trap, match="model.layers.2.up.weight") as caught:
        pipeline.step(*data[1])
    assert caught.value.rule == "graph.address" and caught.value.module == "model.layers.2"


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_in_another_mode_than_the_captured_one_is_refused(device: str) -> None:
    pipeline, _, modules, data = begun(device)
    modules[1].eval()
    with pytest.raises(qt.Trap) as caught:
        pipeline.step(*data[1])
    assert caught.value.rule == "graph.mode" and caught.value.module == "model.layers.1"
    modules[1].train()
    pipeline.step(*data[1])


@pytest.mark.parametrize("device", DEVICES)
def test_other_shapes_dtypes_and_counts_are_refused(device: str) -> None:
    pipeline, optimizer, modules, data = begun(device)
    before = state(modules, optimizer)
    inputs, targets = data[1]
    with pytest.raises(qeffect.ArgumentError, match="7 inputs"):
        pipeline.step(inputs[:7], targets)
    with pytest.raises(qeffect.ArgumentError, match=r"\(2, 4, 16\).*captured as \(3, 4, 16\)"):
        pipeline.step([x[:2] for x in inputs], targets)
    with pytest.raises(qeffect.ArgumentError, match="float64"):
        pipeline.step([x.double() for x in inputs], targets)
    assert same(state(modules, optimizer), before)
    with pytest.raises(qeffect.ArgumentError, match="3 modules for a schedule of 4 stages"):
        qt.Pipeline(modules[:3], schedule_of(), loss_of, example=(inputs[0], targets[0]))
    pipeline.step(inputs, targets)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spoil", ["input", "target"])
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(device: str, spoil: str) -> None:
    pipeline, optimizer, modules, data = begun(device)
    before = state(modules, optimizer)
    inputs, targets = [list(part) for part in data[1]]
    bad = inputs if spoil == "input" else targets
    bad[3] = bad[3] * float("inf")
    losses = pipeline.step(inputs, targets)
    assert not bool(losses.isfinite().all())
    assert same(state(modules, optimizer), before)
    assert int(pipeline.guard.commits) == 1
    pipeline.step(*data[1])
    assert int(pipeline.guard.commits) == 2 and not same(state(modules, optimizer), before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_veto_of_the_callers_leaves_everything_as_it_was(device: str) -> None:
    pipeline, optimizer, modules, data = begun(device)
    before = state(modules, optimizer)
    pipeline.guard.veto()
    pipeline.step(*data[1])
    assert same(state(modules, optimizer), before)
    pipeline.step(*data[1])
    assert not same(state(modules, optimizer), before)


@pytest.mark.torch
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, fused=False)])
def test_an_optimizer_that_cannot_be_vetoed_is_refused(make: Any) -> None:
    modules = blocks(2)
    with pytest.raises(qeffect.UnsupportedError, match="fused=True"):
        qt.StepGuard(make([p for m in modules for p in m.parameters()]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capture", [False, True])
def test_two_threads_drive_one_pipeline(device: str, capture: bool) -> None:
    """As DualPipeV does: forwards from one thread, backwards from another, here in turns."""
    base, data = blocks(), batches(device=device)
    expected = trained(copies(base, device), schedule_of("dualpipev", 2, 2), data, capture=capture)
    modules = copies(base, device)
    pipeline, optimizer = pipeline_of(modules, schedule_of("dualpipev", 2, 2), data, capture=capture)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    turn, failures = threading.Condition(), []

    def drive(forwards: bool, inputs: Any, targets: Any, done: list[int]) -> None:
        try:
            for i, action in enumerate(pipeline.actions):
                if (action.kind == "F") != forwards:
                    continue
                with turn:
                    turn.wait_for(lambda: done[0] == i or failures, timeout=300)
                    if stream is not None:
                        torch.cuda.set_stream(stream)
                    pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
                    done[0] += 1
                    turn.notify_all()
        except BaseException as error:
            with turn:
                failures.append(error)
                turn.notify_all()

    for inputs, targets in data:
        pipeline.begin()
        done = [0]
        threads = [threading.Thread(target=drive, args=(forwards, inputs, targets, done)) for forwards in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        pipeline.finish()
    assert same(state(modules, optimizer), expected)


@pytest.mark.gpu
def test_steps_from_changing_streams_are_in_order() -> None:
    base, data = blocks(), batches(device="cuda")
    expected = trained(copies(base, "cuda"), schedule_of(), data, capture=True)
    modules = copies(base, "cuda")
    pipeline, optimizer = pipeline_of(modules, schedule_of(), data, capture=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for inputs, targets in data:
        pipeline.begin()
        for i, action in enumerate(pipeline.actions):
            with torch.cuda.stream(streams[i % 3]):
                pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
        pipeline.finish()
    torch.cuda.synchronize()
    assert same(state(modules, optimizer), expected)


@pytest.mark.torch
def test_a_host_with_several_streams_gets_an_edge_wherever_the_stream_changes() -> None:
    class Told:
        def __init__(self) -> None:
            self.now, self.edges = 0, []

        def current(self) -> int:
            return self.now

        def order(self, earlier: int, later: int) -> None:
            self.edges.append((earlier, later))

    streams, data = Told(), batches()
    pipeline, _ = pipeline_of(blocks(), schedule_of(), data, capture=True, streams=streams)
    inputs, targets = data[0]
    pipeline.begin()
    for i, action in enumerate(pipeline.actions):
        streams.now = i % 2
        pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
    pipeline.finish()
    assert streams.edges[:3] == [(0, 1), (1, 0), (0, 1)] and len(streams.edges) >= len(pipeline.actions) - 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_a_step_leaves_no_tensor_behind(name: str, capture: bool, device: str) -> None:
    """What is postponed holds a part of the autograd graph, which holds what is postponed: no collector sees that."""
    modules, whole = copies(blocks(), device), batches(1, device=device)
    pipeline, _ = pipeline_of(modules, schedule_of(name), whole, capture=capture)
    data, alive = whole[0], []
    for aborts in (False, False, True, False):
        if aborts:
            pipeline.begin()
            for action in pipeline.actions[:len(pipeline.actions) * 2 // 3]:
                pipeline.run(action, data[0][action.microbatch], data[1][action.microbatch])
            pipeline.abort()
        else:
            pipeline.step(*data)
        gc.collect()
        alive.append(sum(type(held) in (torch.Tensor, Postponed) for held in gc.get_objects()))
    assert alive[1:] == alive[1:2] * 3, alive


@pytest.mark.parametrize("device", DEVICES)
def test_a_thousand_clean_steps_never_trap(device: str) -> None:
    data = batches(1, device=device)
    pipeline, _ = pipeline_of(copies(blocks(2), device), schedule_of("zbh1", 2), data, capture=True)
    for _ in range(1000 if device == "cuda" else 100):
        pipeline.step(*data[0])
