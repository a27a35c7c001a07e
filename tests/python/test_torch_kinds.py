"""Kinds of modules, optimizers and surroundings that a pipeline or a callable meets beside plain layers: each gives
torch's own gradients, or an exception that says why not. Without these checks the numbers were wrong in silence.
"""
from __future__ import annotations

import copy
import warnings
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from qeffect import Schedule  # noqa: E402
from torch_world import HIDDEN, Block, adamw, batches, blocks, loss_of, same, state  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


def piped(modules: Any, capture: Any = "host", loss: Any = loss_of, optimizer: Any = None, data: Any = None,
          **options: Any) -> Any:
    x, target = (part[0] for part in (data or batches(1)[0]))
    return qt.Pipeline(modules, Schedule.generate("zbh1", ranks=len(modules), microbatches=8), loss, capture=capture,
                       example=(x, target), optimizer=optimizer, quiet=True, **options)


def torchs(modules: Any, data: Any, loss: Any = loss_of) -> list[Any]:
    """Gradients by torch's own loop."""
    for x, target in zip(*data):
        for module in modules:
            x = module(x)
        (loss(x, target) / len(data[0])).backward()
    return [p.grad for m in modules for p in m.parameters()]


# ---- modules that split badly ----

class Energy(nn.Module):
    """What it returns is a gradient of its own layers, as of force fields. `further`: which is differentiated again."""

    def __init__(self, further: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.further = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), further

    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            at = x if x.requires_grad and self.further else x.detach().requires_grad_(True)
            energy = torch.tanh(self.second(torch.tanh(self.first(at)))).sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=self.further)
        return x + force if self.further else x + self.second(self.first(force))


class Recomputed(nn.Module):
    """An energy whose forward runs again within backward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def forward(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint
        return checkpoint(self.energy, x, use_reentrant=False, preserve_rng_state=False)


class Borrowed(nn.Module):
    """A linear that computes with a weight that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        weights = {"weight": self.linear.weight * 2, "bias": self.linear.bias}
        return x + torch.func.functional_call(self.linear, weights, (x,))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.linear = nn.utils.weight_norm(nn.Linear(HIDDEN, HIDDEN))  # a plain attribute, made by a hook

    def forward(self, x: Any) -> Any:
        return x + self.linear(x)


@pytest.mark.parametrize("capture", ["host", False])
@pytest.mark.parametrize("kind", [Energy, lambda: Energy(False), Recomputed, Borrowed, Normed],
                         ids=["energy", "energy_cut", "recomputed", "borrowed", "normed"])
def test_linears_that_are_differentiated_or_lent_within_a_forward_have_torchs_gradients(kind: Any,
                                                                                       capture: Any) -> None:
    data = batches(1)[0]
    modules, others = blocks(3, kind), blocks(3, kind)
    pipeline = piped(modules, capture)
    for _ in range(2):
        pipeline.step(*data)
    expected, found = torchs(others, data), [p.grad for m in modules for p in m.parameters()]
    assert max(g.abs().max() for g in expected) > 1e-3
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def tied() -> list[Any]:
    modules = blocks()
    modules[3].up.weight = modules[0].up.weight
    return modules


@pytest.mark.parametrize("make", [tied, lambda: blocks(2) * 2], ids=["a parameter", "a module"])
def test_what_two_stages_share_is_refused_by_both_names(make: Callable[[], list[Any]]) -> None:
    """Both would set its gradient. What one stage shares within itself is summed up."""
    modules = make()
    with pytest.raises(qeffect.UnsupportedError, match=r"stages\.\d\.\S+ is stages\.0\.\S+, too.*grad\.set"):
        piped(modules, False)
    piped(blocks(), False)


@pytest.mark.parametrize("add", [lambda p: p.register_hook(lambda g: g * 0),
                                 lambda p: p.register_post_accumulate_grad_hook(lambda p: None)])
@pytest.mark.parametrize("capture", ["host", False])
def test_a_hook_on_a_parameters_gradient_is_refused_before_and_after_capture(add: Any, capture: Any) -> None:
    modules, data = blocks(), batches(1)[0]
    handle = add(modules[1].up.weight)
    with pytest.raises(qeffect.UnsupportedError, match=r"stages\.1\.up\.weight has a hook on its gradient"):
        piped(modules, capture)
    assert "forward" not in modules[1].up.__dict__
    handle.remove()
    pipeline = piped(modules, capture)
    pipeline.step(*data)
    handle = add(modules[1].up.weight)
    with pytest.raises(qeffect.UnsupportedError, match="grad.missing"):
        pipeline.step(*data)
    handle.remove()
    pipeline.step(*data)


def test_data_parallel_wrappers_are_refused(tmp_path: Any) -> None:
    made = not torch.distributed.is_initialized()  # another test's may still be there
    if made:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        modules = [nn.parallel.DistributedDataParallel(m) for m in blocks()]
        with pytest.raises(qeffect.UnsupportedError, match="stages.0 is DistributedDataParallel.*grad.missing"):
            piped(modules)
        with pytest.raises(qeffect.UnsupportedError, match="DistributedDataParallel"):
            qt.make_graphed_callables(modules[0], (torch.zeros(3, HIDDEN),), quiet=True)
    finally:
        if made:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("capture", ["host", False])
@pytest.mark.parametrize("give, told", [(lambda x: (x, x), "2 tensors"), (lambda x: {"a": x, "b": x}, "2 tensors")])
def test_other_than_one_output_is_refused(give: Any, told: str, capture: Any) -> None:
    class Many(Block):
        def forward(self, x: Any) -> Any:
            return give(super().forward(x))

    with pytest.raises(qeffect.ArgumentError, match=f"module stages.0 returns {told}; a stage returns one"):
        piped([Many(), *blocks(3)], capture).step(*batches(1)[0])


@pytest.mark.parametrize("capture", ["host", False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_loss_of_another_type_than_float32_and_one_that_is_no_scalar(dtype: Any, capture: Any) -> None:
    data = [[t.to(dtype) for t in part] for part in batches(1)[0]]
    modules = [m.to(dtype) for m in blocks()]
    others = copy.deepcopy(modules)
    piped(modules, capture, data=data).step(*data)
    for a, b in zip([p.grad for m in modules for p in m.parameters()], torchs(others, data)):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
    with pytest.raises(qeffect.ArgumentError, match=r"the loss behind stages.3 is of shape \(3, 4, 16\)"):
        piped(blocks(), capture, lambda output, target: (output - target) ** 2).step(*batches(1)[0])


@pytest.mark.parametrize("action", [qeffect.Action(9, "F", 0), qeffect.Action(-1, "F", 0), qeffect.Action(0, "W", 77)])
def test_an_action_of_no_stage_or_microbatch_is_refused(action: Any) -> None:
    pipeline, data = piped(blocks()), batches(1)[0]
    pipeline.begin()
    with pytest.raises(qt.Trap) as caught:
        pipeline.run(action, data[0][0], data[1][0])
    assert caught.value.rule == "schedule.missing"
    pipeline.abort()
    pipeline.step(*data)


# ---- gradients and optimizers ----

class Spoils(torch.autograd.Function):
    """The loss stays finite; the gradient does not."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * float("nan")


def test_a_main_grad_that_was_exchanged_is_the_one_that_is_judged() -> None:
    class Spoilt(Block):
        spoils = False

        def forward(self, x: Any) -> Any:
            return super().forward(Spoils.apply(x) if self.spoils else x)

    modules, data = blocks(4, Spoilt), batches(2)
    optimizer = adamw(modules)
    pipeline = piped(modules, False, optimizer=optimizer)
    pipeline.step(*data[0])
    before = state(modules, optimizer)
    for parameter in (p for m in modules for p in m.parameters()):
        parameter.main_grad = torch.zeros_like(parameter)
    modules[2].spoils = True
    pipeline.step(*data[1])
    assert same(state(modules, optimizer), before) and int(pipeline.guard.commits) == 1


@pytest.mark.parametrize("wrong", [torch.zeros(1, HIDDEN), torch.zeros(2 * HIDDEN, HIDDEN, dtype=torch.int32),
                                   torch.zeros(2 * HIDDEN, HIDDEN, device="meta")])
@pytest.mark.parametrize("capture", ["host", False])
def test_a_main_grad_unlike_its_parameter_is_refused(wrong: Any, capture: Any) -> None:
    modules, data = blocks(), batches(1)[0]
    pipeline = piped(modules, capture)
    pipeline.step(*data)
    modules[0].up.weight.main_grad = wrong
    with pytest.raises(qeffect.Error, match=r"main_grad of stages.0.up.weight[\s\S]*graph.address|graph.address"):
        pipeline.step(*data)
    with pytest.raises(qeffect.ArgumentError, match="main_grad of stages.0.up.weight"):
        piped(modules, capture)


@pytest.mark.parametrize("cut", [slice(0, 2 * HIDDEN), slice(HIDDEN, 3 * HIDDEN)])
def test_main_grads_in_the_same_memory_are_refused(cut: slice) -> None:
    modules = blocks()
    flat = torch.zeros(3 * HIDDEN, HIDDEN)
    modules[0].up.weight.main_grad = flat[:2 * HIDDEN]
    modules[1].up.weight.main_grad = flat[cut]
    with pytest.raises(qeffect.ArgumentError, match="same memory"):
        piped(modules, "host")


def test_main_grads_side_by_side_in_one_buffer_are_taken() -> None:
    modules, data = blocks(), batches(1)[0]
    flat = torch.zeros(4 * HIDDEN, HIDDEN)
    modules[0].up.weight.main_grad, modules[1].up.weight.main_grad = flat[:2 * HIDDEN], flat[2 * HIDDEN:]
    piped(modules, "host").step(*data)
    assert bool(flat[:2 * HIDDEN].any()) and bool(flat[2 * HIDDEN:].any())


@pytest.mark.parametrize("capture", ["host", False])
def test_a_fused_optimizer_that_is_not_the_pipelines_is_seen_between_forward_and_backward(capture: Any) -> None:
    """A fused step raises no version of its parameters."""
    modules, data = blocks(), batches(1)[0]
    optimizer, pipeline = adamw(modules), piped(modules, capture)
    pipeline.step(*data)
    optimizer.step()
    pipeline.begin()
    pipeline.run(pipeline.actions[0], data[0][0], data[1][0])
    optimizer.step()
    with pytest.raises(qt.Trap) as caught:
        for action in pipeline.actions[1:]:
            pipeline.run(action, data[0][action.microbatch], data[1][action.microbatch])
    assert caught.value.rule == "weight.version"
    pipeline.abort()
    pipeline.step(*data)


def test_an_optimizer_that_can_no_longer_be_vetoed_is_refused_whole() -> None:
    """load_state_dict brings the options of the optimizer that was saved, add_param_group those it is given. torch
    steps the first group and then stumbles over the second."""
    modules, data = blocks(), batches(1)[0]
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], fused=True)
    pipeline = piped(modules, optimizer=optimizer)
    pipeline.step(*data)
    before = state(modules, optimizer)
    optimizer.param_groups[1]["fused"] = False
    with pytest.raises(qeffect.UnsupportedError, match="without fused=True"):
        pipeline.step(*data)
    assert same(state(modules, optimizer), before)
    optimizer.param_groups[1]["fused"] = True
    pipeline.step(*data)


def test_an_adam_that_steps_in_its_own_way_is_refused_and_one_that_does_not_is_taken() -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Plain(torch.optim.AdamW):
        pass

    parameters = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(qeffect.UnsupportedError, match="Own steps in its own way"):
        qt.StepGuard(Own(parameters, fused=True))
    for kind in (Plain, torch.optim.Adam, torch.optim.AdamW, Plain):
        qt.StepGuard(kind(parameters, fused=True))


# ---- autocast ----

@pytest.mark.parametrize("first", [True, False])
def test_a_step_under_another_autocast_than_the_captured_one_is_refused(first: bool) -> None:
    """A graph computes as it was captured, whatever is said around its replay."""
    modules, data = blocks(), batches(1)[0]
    with torch.autocast("cpu", torch.bfloat16, enabled=first):
        pipeline = piped(modules)
        pipeline.step(*data)
    with torch.autocast("cpu", torch.bfloat16, enabled=not first):
        with pytest.raises(qt.Trap, match="autocast is") as caught:
            pipeline.step(*data)
    assert caught.value.rule == "graph.mode"
    with torch.autocast("cpu", torch.bfloat16, enabled=first):
        pipeline.step(*data)


@pytest.mark.parametrize("capture", ["host", False])
def test_autocasts_copies_of_weights_do_not_outlive_a_step(capture: Any) -> None:
    """One autocast around the whole run: its cache is emptied at its end alone."""
    found = []
    for around in (True, False):
        modules, data = blocks(), batches(3)
        optimizer = adamw(modules)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            with torch.autocast("cpu", torch.bfloat16):
                pipeline = piped(modules, capture, optimizer=optimizer)
            for step in data:
                with torch.autocast("cpu", torch.bfloat16):
                    pipeline.step(*step)
        found.append(state(modules, optimizer))
    assert same(*found)


# ---- callables ----

ORDERS: list[tuple[Any, str]] = [([], "_order is"), ([0, 1, -1], "_order is"), ([float("nan"), -1], "_order is"),
                                 ([float("inf"), -1], "_order is"), (["1", -1], "_order is"), ([1.5, -1], "1.5"),
                                 ([1, -1.25], "-1.25"), ([10 ** 9, -10 ** 9], "_order is")]


@pytest.mark.parametrize("order, told", ORDERS)
def test_an_order_that_names_nothing_is_refused(order: Any, told: str) -> None:
    with pytest.raises(qeffect.ArgumentError, match=told):
        qt.make_graphed_callables((nn.Linear(4, 4),), ((torch.zeros(2, 4),),), _order=order, quiet=True)


WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    ((), (), {}, "no module"), (nn.Linear(4, 4), torch.zeros(2, 4), {}, "sample_args is Tensor"),
    (nn.Linear(4, 4), None, {}, "sample_args is NoneType"),
    ((nn.Linear(4, 4),), ((torch.zeros(2, 4),),), {"names": ["a", "b"]}, "2 names for 1 modules"),
    ((nn.Linear(4, 4),), ((torch.zeros(2, 4),),), {"capture": "grpah"}, "capture is 'grpah'"),
    ((nn.Linear(4, 4),), ((torch.zeros(2, 4),),), {"capture": "graph"}, "on a CUDA device.*are on cpu")]


@pytest.mark.parametrize("modules, samples, options, told", WRONG)
def test_impossible_arguments_of_callables_are_told(modules: Any, samples: Any, options: Any, told: str) -> None:
    with pytest.raises(qeffect.ArgumentError, match=told):
        qt.make_graphed_callables(modules, samples, quiet=True, **options)


def test_a_module_given_twice_is_refused() -> None:
    module, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with pytest.raises(qeffect.ArgumentError, match="given twice"):
        qt.make_graphed_callables((module, module), ((x,), (x,)), quiet=True)


def test_a_second_derivative_through_a_callable_is_refused_and_not_zero() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    call = qt.make_graphed_callables(module, (torch.zeros(2, 4, requires_grad=True),), quiet=True)
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(qeffect.ArgumentError, match="create_graph=True"):
        torch.autograd.grad(call(x).sum(), x, create_graph=True)


def test_reset_gives_back_a_forward_of_the_modules_own_and_parts_keep_their_names() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reset = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.reset(x)

    x = torch.ones(2, 4, requires_grad=True)
    module = nn.Linear(4, 4)
    module.forward = lambda given: nn.functional.linear(given, module.weight, module.bias) + 7
    expected = module(x)
    call = qt.make_graphed_callables(module, (x,), quiet=True)
    assert torch.equal(call(x), expected)
    call.reset()
    assert torch.equal(module(x), expected)
    gated = Gated()
    expected = gated(x)
    assert torch.equal(qt.make_graphed_callables(gated, (x,), quiet=True)(x), expected)
    assert isinstance(gated.reset, nn.Linear)
