"""What modules hold beside parameters and buffers, and what forward leaves behind: a graph has the values of its
capture built in, and does again what its work did, not what Python did around it."""
from __future__ import annotations

import copy
import enum
import functools
from typing import Any, Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from qeffect.torch.attributes import stored_by_forward, written_anywhere  # noqa: E402
from torch_world import DEVICES, HIDDEN, adamw, batches, loss_of, same, state  # noqa: E402


class Kind(enum.Enum):
    RELU, GELU = 1, 2


class Many(torch.nn.Module):
    """Attributes of every kind, all of them read by forward."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.dropout = torch.nn.Dropout(0.0)
        self.scale, self.on, self.name, self.kind = 0.5, True, "up", Kind.RELU
        self.act: Any = torch.nn.functional.relu
        self.steps = [(self.linear.forward, [functools.partial(torch.clamp, max=1.0)]), {1, 2}]
        self.inner = (1, [2.0])
        self.powers, self.words, self.dtype = [1.0, 2.0], {"shift": 0.25}, torch.float32
        self.pair, self.root, self.clip = (1, 2), np.sqrt(4.0), functools.partial(torch.clamp, max=9.0)
        self.offset = torch.ones(HIDDEN)

    def bend(self, y: Any) -> Any:
        return y

    def forward(self, x: Any) -> Any:
        y = self.dropout(self.act(self.norm(self.linear(x)))).to(self.dtype) * self.scale * self.gain
        y = y * self.powers[1] + self.words["shift"] + self.offset * self.pair[0]
        y = self.clip(y) / self.root
        return x + self.bend(y) if self.on and self.kind is Kind.RELU else x - y


def captured(modules: list[Any], device: str = "cpu", capture: Any = True) -> tuple[Any, Any, list[Any]]:
    modules = [m.to(device) for m in modules]
    for m in modules:
        if isinstance(m, Many):
            m.offset = m.offset.to(device)
    data, optimizer = batches(4, device=device), adamw(modules)
    schedule = qeffect.Schedule.generate("1f1b", ranks=len(modules), microbatches=8)
    pipeline = qt.Pipeline(modules, schedule, loss_of, example=(data[0][0][0], data[0][1][0]), optimizer=optimizer,
                           names=[f"layers.{i}" for i in range(len(modules))], capture=capture, quiet=True)
    return pipeline, optimizer, data


def pair(kind: Any = Many) -> list[Any]:
    torch.manual_seed(0)
    return [kind(), kind()]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "p of a dropout": (lambda m: setattr(m.dropout, "p", 0.5), "layers.1.dropout.p is 0.5 and was 0.0"),
    "eps of a norm": (lambda m: setattr(m.norm, "eps", 0.1), "layers.1.norm.eps is 0.1 and was 1e-05"),
    "a number": (lambda m: setattr(m, "scale", 2.0), "layers.1.scale is 2.0 and was 0.5"),
    "a number of another type": (lambda m: setattr(m.dropout, "p", 0), "layers.1.dropout.p is 0 and was 0.0"),
    "a switch": (lambda m: setattr(m, "on", False), "layers.1.on is False"),
    "a word": (lambda m: setattr(m, "name", "down"), "layers.1.name is 'down'"),
    "nothing": (lambda m: setattr(m, "name", None), "layers.1.name is None"),
    "an enum": (lambda m: setattr(m, "kind", Kind.GELU), "layers.1.kind is <Kind.GELU"),
    "a function": (lambda m: setattr(m, "act", torch.tanh), "layers.1.act is <built-in"),
    "a dtype": (lambda m: setattr(m, "dtype", torch.float64), "layers.1.dtype is torch.float64"),
    "a tuple": (lambda m: setattr(m, "pair", (3, 2)), "layers.1.pair is"),
    "a number of NumPy's": (lambda m: setattr(m, "root", np.sqrt(9.0)), "layers.1.root is"),
    "a function with arguments": (lambda m: setattr(m, "clip", functools.partial(torch.clamp, max=0.1)),
                                  "layers.1.clip is functools.partial"),
    "within a list": (lambda m: m.powers.append(3.0), "layers.1.powers is"),
    "a list within a tuple": (lambda m: m.inner[1].append(1), "layers.1.inner is (1, [2.0, 1])"),
    "deep within": (lambda m: m.steps[0][1].append(1), "layers.1.steps is"),
    "within a dictionary": (lambda m: m.words.update(shift=1.0), "layers.1.words is {'shift': 1.0}"),
    "a tensor": (lambda m: setattr(m, "offset", torch.zeros_like(m.offset)), "layers.1.offset is another tensor"),
    "a tensor that moved": (lambda m: setattr(m.offset, "data", m.offset.clone()), "layers.1.offset is another tensor"),
    "an attribute gone": (lambda m: delattr(m, "scale"), "layers.1.scale is gone"),
    "one that hides its class's": (lambda m: setattr(m, "gain", 3.0), "layers.1.gain is no longer that of its class"),
    "a method": (lambda m: setattr(m, "bend", lambda y: -y), "layers.1.bend is no longer that of its class")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", list(CHANGES))
def test_an_attribute_that_changed_after_capture_is_told_by_name(what: str, device: str) -> None:
    modules = pair()
    pipeline, optimizer, data = captured(modules, device)
    pipeline.step(*data[0])
    before, (change, told) = state(modules, optimizer), CHANGES[what]
    change(modules[1])
    for _ in range(2):
        with pytest.raises(qt.Trap) as caught:
            pipeline.step(*data[1])
        assert told in str(caught.value)
        assert (caught.value.rule, caught.value.module) == ("graph.constant", "layers.1")
        assert "test_torch_attributes.py" in caught.value.submitted
    assert same(state(modules, optimizer), before)


@pytest.mark.torch
@pytest.mark.parametrize("what", list(CHANGES))
def test_a_callable_whose_attribute_changed_is_told_by_name(what: str) -> None:
    (module, _), x = pair(), batches(1)[0][0][0]
    (call,) = qt.make_graphed_callables((module,), ((x.clone().requires_grad_(True),),), names=["layers.1"], quiet=True)
    call(x).sum().backward()
    change, told = CHANGES[what]
    change(module)
    with pytest.raises(qt.Trap) as caught:
        call(x)
    assert caught.value.rule == "graph.constant" and told in str(caught.value)


@pytest.mark.torch
@pytest.mark.parametrize("what", ["p of a dropout", "eps of a norm", "a number", "a switch", "an enum", "a function",
                                  "a tuple", "within a dictionary", "a tensor", "one that hides its class's",
                                  "a method"])
def test_where_nothing_is_captured_a_changed_attribute_takes_effect(what: str) -> None:
    modules = pair()
    pipeline, _, data = captured(modules, capture=False)
    before = pipeline.evaluate(*data[0])
    CHANGES[what][0](modules[1])
    assert not torch.equal(pipeline.evaluate(*data[0]), before)
    assert bool(pipeline.step(*data[0]).isfinite().all())


@pytest.mark.torch
def test_another_forward_of_a_class_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, _, data = captured(pair())
    pipeline.step(*data[0])
    with monkeypatch.context() as patched:
        patched.setattr(Many, "forward", lambda self, x: x)
        with pytest.raises(qt.Trap, match="Many has another forward") as caught:
            pipeline.step(*data[1])
        assert caught.value.rule == "graph.constant"
    pipeline.step(*data[1])


@pytest.mark.torch
def test_equal_values_and_what_nobody_computes_with_are_no_breach() -> None:
    modules = pair()
    pipeline, optimizer, data = captured(modules)
    twin = copy.deepcopy(modules)
    other, twins_optimizer, _ = captured(twin)
    for step, (inputs, targets) in enumerate(data):
        modules[1].scale, modules[1].powers, modules[1].pair = float("0.5"), [1.0, float("2")], tuple([1, 2])
        modules[1].note, modules[0].dropout.note = step, [object()]
        modules[1].offset.mul_(1.0)
        pipeline.step(inputs, targets)
        other.step(inputs, targets)
    assert same(state(modules, optimizer), state(twin, twins_optimizer))


class Notes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = 0, 0, 0, 0

    def note(self) -> None:
        self.second = 1
        self.__dict__["third"] = 1

    def forward(self, x: Any) -> Any:
        self.first, y = 1, [setattr(self, name, 1) for name in "ab"]
        return x, y


@pytest.mark.torch
def test_names_that_a_class_assigns_are_found_in_its_code() -> None:
    assert stored_by_forward(Notes) == {"first"} and stored_by_forward(torch.nn.ReLU) == frozenset()
    assert {"first", "second", "third"} <= written_anywhere(Notes) and "fourth" not in written_anywhere(Notes)


# ---- what forward leaves behind ----

class Running(torch.nn.Module):
    """A running mean. `how`: bound anew, or written in place."""

    how = "anew"

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("mean", torch.ones(HIDDEN))
        self.register_buffer("none", None)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        new = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        if self.how == "anew":
            self.mean = new
        else:
            self.mean.copy_(new)
        return y + self.mean


class InPlace(Running):
    how = "in place"


class Counting(torch.nn.Module):
    """A number that goes from forward to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(HIDDEN, HIDDEN), 0

    def count(self) -> None:
        self.calls += 1

    def forward(self, x: Any) -> Any:
        self.count()
        return self.linear(x) / self.calls


class Remembering(torch.nn.Module):
    """A tensor that goes from forward to forward, and is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = torch.nn.Linear(HIDDEN, HIDDEN), torch.zeros(())

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        self.state = self.state.to(x.device) + y.detach().mean()
        return y + self.state


class Telling(torch.nn.Module):
    """Leaves something behind that no forward reads, and makes something when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last, self.ones, self.long = torch.nn.Linear(HIDDEN, HIDDEN), torch.zeros(()), None, 0

    def forward(self, x: Any) -> Any:
        if self.ones is None:
            self.ones = torch.ones(HIDDEN, device=x.device)
        self.last, self.long = x.detach(), id(x)
        return self.linear(x) + self.ones


BROKEN = {"a buffer bound anew": (Running, "layers.0.mean is a buffer that forward binds anew", "graph.address"),
          "a number": (Counting, "layers.0.calls goes from one forward to the next", "graph.constant"),
          "a tensor": (Remembering, "layers.0.state goes from one forward to the next", "graph.constant")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", list(BROKEN))
def test_what_no_replay_would_do_again_is_refused_and_nothing_changed(what: str, device: str) -> None:
    kind, told, rule = BROKEN[what]
    modules = pair(kind)
    before, buffers = state(modules, adamw(modules)), [b for m in modules for b in m.buffers()]
    values, attributes = [b.clone() for b in buffers], [(getattr(m, "calls", 0), sorted(m.__dict__)) for m in modules]
    with pytest.raises(qeffect.UnsupportedError, match=told) as caught:
        captured(modules, device)
    assert rule in str(caught.value) and "out of capture" in caught.value.remedy
    if device == "cpu":
        assert all(now is then for now, then in zip([b for m in modules for b in m.buffers()], buffers))
        assert same([b for m in modules for b in m.buffers()], values)
        assert "forward" not in modules[0].linear.__dict__
        assert [(getattr(m, "calls", 0), sorted(m.__dict__)) for m in modules] == attributes
    assert same([p.cpu() for p in state(modules, adamw(modules))], before)


@pytest.mark.torch
@pytest.mark.parametrize("what", list(BROKEN))
def test_callables_refuse_it_too_and_it_runs_where_it_is_not_captured(what: str) -> None:
    kind, told, _ = BROKEN[what]
    module, x = kind(), batches(1)[0][0][0]
    with pytest.raises(qeffect.UnsupportedError, match=told.removeprefix("layers.0")):
        qt.make_graphed_callables((module,), ((x,),), quiet=True)
    assert "forward" not in module.__dict__ and "forward" not in module.linear.__dict__
    pipeline, _, data = captured(pair(kind), capture=[False, False])
    assert bool(pipeline.step(*data[0]).isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [InPlace, Telling])
def test_buffers_written_in_place_and_what_no_forward_reads_are_right_captured(kind: Any, device: str) -> None:
    found = []
    for capture in (True, False):
        modules = pair(kind)
        pipeline, optimizer, data = captured(modules, device, capture)
        for inputs, targets in data:
            pipeline.step(inputs, targets)
        found.append([*state(modules, optimizer), *(b for m in modules for b in m.buffers())])
    assert same(*found)
