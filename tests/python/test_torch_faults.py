"""Faults of pipelines that torch's users reported (torch 2.11): shown in torch itself, and right or refused here."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from qeffect import Schedule  # noqa: E402
from torch_native import Native  # noqa: E402
from torch_world import (DEVICES, MICROBATCHES, Block, BothAtOnce, Custom, adamw, batches, blocks, copies,  # noqa: E402
                         loss_of, same, state)

ORDERS = [("1f1b", 4, 1), ("interleaved", 2, 2), ("zbh1", 4, 1), ("zbv", 2, 2)]


def gradients(modules: Any) -> list[Any]:
    return [p.grad.detach().clone() for m in modules for p in m.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, ranks, chunks", ORDERS)
def test_losses_and_gradients_are_those_of_torchs_own_pipelining(name: str, ranks: int, chunks: int, device: str,
                                                                 tmp_path: Path) -> None:
    schedule = Schedule.generate(name, ranks=ranks, chunks=chunks, microbatches=MICROBATCHES)
    base, (inputs, targets) = blocks(), batches(1, device=device)[0]
    expected, found = copies(base, device), copies(base, device)
    losses = Native(expected, schedule, loss_of, inputs[0], tmp_path / "order.csv").step(inputs, targets)
    pipeline = qt.Pipeline(found, schedule, loss_of, example=(inputs[0], targets[0]), capture=True, quiet=True)
    assert torch.equal(pipeline.step(inputs, targets), losses)
    for a, b in zip(gradients(expected), gradients(found)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.torch
def test_torch_splits_a_custom_function_wrongly_or_not_at_all(tmp_path: Path) -> None:
    """pytorch#174017, #166577: both gradients in I, and again in W; or it raises. Here: once, in I."""
    schedule = Schedule.generate("zbh1", ranks=2, microbatches=MICROBATCHES)
    base, (inputs, targets) = blocks(2, Custom), batches(1)[0]
    BothAtOnce.calls = 0
    try:
        Native(copies(base, "cpu"), schedule, loss_of, inputs[0], tmp_path / "order.csv").step(inputs, targets)
        assert BothAtOnce.calls > 2 * MICROBATCHES
    except Exception as error:
        assert "grad" in str(error) or isinstance(error, (RuntimeError, KeyError, AssertionError))
    pipeline = qt.Pipeline(base, schedule, loss_of, example=(inputs[0], targets[0]), quiet=True)
    BothAtOnce.calls = 0
    pipeline.step(inputs, targets)
    assert BothAtOnce.calls == 2 * MICROBATCHES


@pytest.mark.torch
def test_torch_scales_gradients_of_an_outer_accumulation_again(tmp_path: Path) -> None:
    """torchtitan#1733. Here a step is whole: its gradients are its own, divided once."""
    schedule = Schedule.generate("interleaved", ranks=1, chunks=2, microbatches=4)
    base, data = blocks(2), batches(2, 4)
    expected, one, found = copies(base, "cpu"), copies(base, "cpu"), copies(base, "cpu")
    native = Native(expected, schedule, lambda y, t: loss_of(y, t) * 4, data[0][0][0], tmp_path / "order.csv")
    native.runtime.scale_grads = True
    first_alone = Native(one, schedule, loss_of, data[0][0][0], tmp_path / "alone.csv")
    second_alone = Native(copies(base, "cpu"), schedule, loss_of, data[0][0][0], tmp_path / "second.csv")
    first_alone.step(*data[0])
    second_alone.step(*data[1])
    for batch in data:
        native.step(*batch)
    right = [a + b for a, b in zip(gradients(one), gradients(second_alone.modules))]
    assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(gradients(expected), right))
    pipeline = qt.Pipeline(found, schedule, loss_of, example=(data[0][0][0], data[0][1][0]), quiet=True)
    total = [torch.zeros_like(p) for m in found for p in m.parameters()]
    for batch in data:
        pipeline.step(*batch)
        torch._foreach_add_(total, gradients(found))
    for a, b in zip(total, right):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capture", [False, True, [True, False, True, False]])
def test_what_the_caller_gives_is_never_written_and_what_it_gets_is_its_own(capture: Any, device: str) -> None:
    """A wrapper that keeps the caller's first tensors as its static ones writes them with every later call."""
    base, data = blocks(), batches(3, device=device)
    schedule = Schedule.generate("zbh1", ranks=4, microbatches=MICROBATCHES)
    modules = copies(base, device)
    pipeline = qt.Pipeline(modules, schedule, loss_of, example=(data[0][0][0], data[0][1][0]),
                           optimizer=adamw(modules), capture=capture, quiet=True)
    kept = [[t.clone() for t in (*inputs, *targets)] for inputs, targets in data]
    losses = [pipeline.step(*batch) for batch in data]
    again = [loss.clone() for loss in losses]
    pipeline.step(*data[0])
    assert all(same([*inputs, *targets], before) for (inputs, targets), before in zip(data, kept))
    assert same(losses, again)


@pytest.mark.torch
def test_sharded_parameters_are_refused_by_name() -> None:
    """FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch_native import _world_of_one
    _world_of_one()
    module = fully_shard(Block(), mesh=init_device_mesh("cpu", (1,)))
    x = batches(1)[0][0][0]
    with pytest.raises(qeffect.UnsupportedError, match=r"stages.0.norm.weight is sharded.*graph.address"):
        qt.Pipeline([module], Schedule.generate("1f1b", ranks=1, microbatches=2), loss_of, example=(x, x))
    with pytest.raises(qeffect.Error, match="hooks"):  # its own, which gather
        qt.make_graphed_callables(module, (x,))


SCRIPT = """
import hashlib, torch, qeffect.torch as qt
from qeffect import Schedule
from torch_world import adamw, batches, blocks, copies, loss_of, state
modules, data = copies(blocks(), "cuda"), batches(device="cuda")
optimizer = adamw(modules)
pipeline = qt.Pipeline(modules, Schedule.generate("zbh1", ranks=4, microbatches=8), loss_of, capture=True, quiet=True,
                       example=(data[0][0][0], data[0][1][0]), optimizer=optimizer)
for batch in data:
    pipeline.step(*batch)
print(hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in state(modules, optimizer))).hexdigest())
"""


@pytest.mark.gpu
def test_expandable_segments_of_the_allocator_give_the_same_bits() -> None:
    found = []
    for setting in ("expandable_segments:False", "expandable_segments:True"):
        settings = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting,
                    "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
        done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, check=True, text=True,
                              timeout=120, env=settings)
        found.append(done.stdout.split()[-1])
    assert found[0] == found[1] and len(found[0]) == 64


@pytest.mark.torch
def test_hooks_of_a_module_run_or_are_refused() -> None:
    """A replay would not call them."""
    (x, *_), _ = batches(1)[0]
    module, seen = Block(), []
    module.register_forward_hook(lambda *_: seen.append(1))
    schedule = Schedule.generate("1f1b", ranks=1, microbatches=2)
    with pytest.raises(qeffect.ArgumentError, match="stages.0 has hooks"):
        qt.Pipeline([module], schedule, loss_of, example=(x, x), capture=True)
    pipeline = qt.Pipeline([module], schedule, loss_of, example=(x, x), capture=False)
    seen.clear()
    pipeline.step([x, x], [x, x])
    assert len(seen) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_dropped_between_steps_are_right(device: str) -> None:
    """zero_grad(set_to_none=True), zero_grad(set_to_none=False), or none at all."""
    base, data = blocks(), batches(device=device)
    found = []
    for drop in (None, True, False):
        modules = copies(base, device)
        optimizer = adamw(modules)
        pipeline = qt.Pipeline(modules, Schedule.generate("1f1b", ranks=4, microbatches=MICROBATCHES), loss_of,
                               example=(data[0][0][0], data[0][1][0]), optimizer=optimizer, capture=True, quiet=True)
        for batch in data:
            pipeline.step(*batch)
            if drop is not None:
                optimizer.zero_grad(set_to_none=drop)
        found.append(state(modules, optimizer))
    assert same(found[0], found[1]) and same(found[0], found[2])


# ---- memory of graphs that leaves them ----

def graphed_by_torch() -> tuple[Any, Any, list[Any]]:
    """(module, its graphed call, inputs of two microbatches)"""
    (module,) = copies(blocks(1), "cuda")
    (inputs, _) = batches(1, device="cuda")[0]
    (call,) = torch.cuda.make_graphed_callables((module,), ((inputs[0].clone().requires_grad_(True),),))
    return module, call, [x.clone().requires_grad_(True) for x in inputs[:2]]


def gradient_of(x: Any) -> Any:
    """Of the first linear, by torch without graphs."""
    (module,) = copies(blocks(1), "cuda")
    loss_of(module(x.detach()), x.detach()).backward()
    return module.up.weight.grad


@pytest.mark.gpu
def test_torch_hands_gradients_over_as_memory_that_the_next_replay_writes() -> None:
    """pytorch#181723: two microbatches give g2 + g2. pytorch#96693: a gradient that was taken away changes. Here:
    test_torch_callables.py, a_gradient_is_never_memory_of_a_graph."""
    module, call, xs = graphed_by_torch()
    for x in xs:
        loss_of(call(x), x.detach()).backward()
    first, second = map(gradient_of, xs)
    torch.testing.assert_close(module.up.weight.grad, second + second, rtol=1e-3, atol=1e-5)
    assert (module.up.weight.grad - (first + second)).norm() > 0.1 * (first + second).norm()
    module, call, xs = graphed_by_torch()
    loss_of(call(xs[0]), xs[0].detach()).backward()
    taken, module.up.weight.grad = module.up.weight.grad, None
    loss_of(call(xs[1]), xs[1].detach()).backward()
    torch.testing.assert_close(taken, second, rtol=1e-3, atol=1e-5)  # it was the first one's


@pytest.mark.gpu
def test_a_send_of_torchs_that_is_late_sends_the_next_microbatch() -> None:
    """pytorch#193903: the next replay does not wait for whoever still reads the output. `copy_` stands for the send."""
    _, call, xs = graphed_by_torch()
    side, sent = torch.cuda.Stream(), torch.empty_like(xs[0])
    torch.cuda.synchronize()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    output = call(xs[0]).detach()
    right = output.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sent.copy_(output)
    call(xs[1])
    torch.cuda.synchronize()
    assert (sent - right).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_what_goes_to_another_rank_outlives_the_slot_it_was_made_in(device: str) -> None:
    """An output's slot is live until its gradient comes back, and a gradient that leaves is no memory of a slot."""
    from qeffect.torchtitan.local import make_part
    (module,), (inputs, gradients) = copies(blocks(1), device), batches(1, device=device)[0]
    row = ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    part = make_part([module], Schedule.of([row]), None, recipe=None, numbers=[1], quiet=True, capture=True,
                     example=[[inputs[0].clone().requires_grad_(True)]])
    kept: dict[tuple[str, int], Any] = {}
    part.begin()
    for cell in row:
        kind, microbatch = cell[1], int(cell[2])
        if kind == "F":
            sent = part.forward_action(0, microbatch, [inputs[microbatch]], None)
            kept["F", microbatch] = sent, sent.clone()
        else:
            sent, right = kept.pop(("F", microbatch))
            assert torch.equal(sent, right)  # nothing has written it while it may have been under way
            gone = part.backward_action(0, "B", microbatch, gradients[microbatch])
            kept["B", microbatch] = gone, gone.clone()
    assert [key for key in kept] == [("B", 0), ("B", 1), ("B", 2)]
    assert all(torch.equal(gone, right) for gone, right in kept.values())
    part.abort()
