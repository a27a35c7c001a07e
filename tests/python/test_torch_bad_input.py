"""What a caller can get wrong, point by point: it is right all the same, or an exception names the rule. Sharded
parameters, dropped gradients, segments that expand: test_torch_faults.py; a missing framework: test_package.py.
"""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from qeffect import Schedule  # noqa: E402
from torch_world import DEVICES, adamw, batches, blocks, copies, loss_of, same, state  # noqa: E402

# ---- another version ----

FAKES = [("torch", "__init__.py", "__version__ = '2.5.1'", "qeffect.torch", "needs torch 2.11 or newer; this is 2.5.1"),
         ("transformer_engine", "__init__.py", "__version__ = '1.13.0'", "qeffect.te", "Transformer Engine 2.20"),
         ("torch", "__init__.py", "raise OSError('libcudart.so')", "qeffect.torch", "does not load"),
         ("torch", "__init__.py", "", "qeffect.torch", "this is of no version"),
         ("transformer_engine", "__init__.py", "raise RuntimeError('libcudnn')", "qeffect.te", "does not load"),
         ("torchtitan", "__init__.py", "", "qeffect.torchtitan.train", "TorchTitan 0.2.2"),
         ("torchtitan", "__init__.py", "", "qeffect.torchtitan.registry", "TorchTitan 0.3.0")]


@pytest.mark.torch
@pytest.mark.parametrize("package, file, text, module, told", FAKES)
def test_another_version_of_a_framework_is_told_where_it_is_needed(tmp_path: Path, package: str, file: str, text: str,
                                                                   module: str, told: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / file).write_text(text)
    program = (f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import qeffect\n"
               "print(qeffect.Schedule.generate('1f1b', ranks=2, microbatches=2).stages)\n"
               f"try:\n    import {module}\nexcept qeffect.UnsupportedError as error:\n    print(error)\n")
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout.startswith("2\n") and told in done.stdout


# ---- shapes, dtypes, devices ----

@pytest.mark.torch
def test_a_name_in_place_of_a_schedule_is_told_what_makes_one() -> None:
    name: Any = "zbh1"
    with pytest.raises(TypeError, match=r"schedule is 'zbh1'; .*Schedule\.generate"):
        qt.Pipeline(blocks(), name, loss_of, example=(torch.ones(3, 4, 16), torch.ones(3, 4, 16)))


def begun(device: str, capture: Any = True) -> tuple[Any, Any, Any, Any]:
    modules, data = copies(blocks(), device), batches(device=device)
    optimizer = adamw(modules)
    pipeline = qt.Pipeline(modules, Schedule.generate("zbh1", ranks=4, microbatches=8), loss_of, optimizer=optimizer,
                           example=(data[0][0][0], data[0][1][0]), capture=capture, quiet=True,
                           names=[f"model.layers.{i}" for i in range(4)])
    pipeline.step(*data[0])
    return pipeline, optimizer, modules, data


Change = Callable[[Any], Any]
OTHERS: dict[str, tuple[Change, str]] = {
    "a shape": (lambda x: x[:2], r"\(2, 4, 16\).*captured as \(3, 4, 16\)"),
    "one that would broadcast": (lambda x: x[:1, :1], r"\(1, 1, 16\).*captured as \(3, 4, 16\)"),
    "a dtype": (lambda x: x.half(), "float16.*captured as"),
    "a device": (lambda x: x.to("meta"), "on meta; captured as"),
    "no tensor": (lambda x: 1.0, "is float; it was captured as a tensor")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["input", "target"])
@pytest.mark.parametrize("what", list(OTHERS))
def test_what_was_not_captured_is_refused_and_changes_nothing(what: str, which: str, device: str) -> None:
    pipeline, optimizer, modules, data = begun(device)
    before, (change, told) = state(modules, optimizer), OTHERS[what]
    inputs, targets = [list(part) for part in data[1]]
    part = inputs if which == "input" else targets
    part[3] = change(part[3])
    with pytest.raises(qeffect.ArgumentError, match=told):
        pipeline.step(inputs, targets)
    assert same(state(modules, optimizer), before)
    pipeline.step(*data[1])


@pytest.mark.parametrize("device", DEVICES)
def test_callables_refuse_what_they_were_not_captured_with(device: str) -> None:
    (module,), ((x, *_), _) = copies(blocks(1), device), batches(1, device=device)[0]
    (call,) = qt.make_graphed_callables((module,), ((x.clone().requires_grad_(True),),), quiet=True)
    for change, told in OTHERS.values():
        with pytest.raises(qeffect.ArgumentError, match=told):
            call(change(x))
    call(x.clone().requires_grad_(True)).sum().backward()


@pytest.mark.torch
def test_modules_of_two_devices_are_refused() -> None:
    first, second = blocks(2)
    x = batches(1)[0][0][0]
    with pytest.raises(qeffect.ArgumentError, match="stages.1.norm.weight is on meta.*cpu"):
        qt.Pipeline([first, second.to("meta")], Schedule.generate("1f1b", ranks=2, microbatches=2), loss_of,
                    example=(x, x), quiet=True)


# ---- a module that was changed after capture ----

def _replace(block: Any) -> None:
    block.up = torch.nn.Linear(16, 32, device=block.up.weight.device)


def _add_parameter(block: Any) -> None:
    block.gain = torch.nn.Parameter(torch.ones(16, device=block.up.weight.device))


CHANGES: dict[str, tuple[Change, str, str]] = {
    "a module exchanged": (_replace, "graph.constant", "layers.1.up is another module"),
    "a module added": (lambda b: b.add_module("more", torch.nn.Identity()), "graph.constant", "has 5 modules"),
    "a parameter added": (_add_parameter, "graph.constant", "1 parameters"),
    "a parameter frozen": (lambda b: b.up.weight.requires_grad_(False), "graph.constant",
                           "requires_grad of .*up.weight"),
    "a table of parameters exchanged": (lambda b: setattr(b.up, "_parameters", dict(b.up._parameters)),
                                        "graph.constant", "layers.1.up has another table of parameters"),
    "a hook": (lambda b: b.up.register_forward_hook(lambda *_: None), "graph.constant", "layers.1.up has 1 hooks"),
    "another forward": (lambda b: setattr(b.norm, "forward", lambda x: x), "graph.constant",
                        "norm has another forward"),
    "a part that evaluates": (lambda b: b.dropout.eval(), "graph.mode", "dropout.training is False"),
    "the whole that evaluates": (lambda b: b.eval(), "graph.mode", "layers.1.training is False"),
    "another dtype": (lambda b: b.double(), "graph.address", "layers.1"),
    "a parameter exchanged": (lambda b: setattr(b.up, "weight", torch.nn.Parameter(b.up.weight.detach().clone())),
                              "graph.address", "up.weight")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", list(CHANGES))
def test_a_module_that_was_changed_after_capture_is_refused_by_name(what: str, device: str) -> None:
    pipeline, optimizer, modules, data = begun(device)
    change, rule, told = CHANGES[what]
    before = state([modules[0], *modules[2:]], optimizer)
    change(modules[1])
    for _ in range(2):
        with pytest.raises(qt.Trap, match=told) as caught:
            pipeline.step(*data[1])
        assert (caught.value.rule, caught.value.module) == (rule, "model.layers.1")
        assert "test_torch_bad_input.py" in caught.value.submitted
    assert same(state([modules[0], *modules[2:]], optimizer), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", [what for what in CHANGES if not what.endswith("evaluates")])
def test_a_callable_that_was_changed_after_capture_is_refused_by_name(what: str, device: str) -> None:
    (module,), ((x, *_), _) = copies(blocks(1), device), batches(1, device=device)[0]
    (call,) = qt.make_graphed_callables((module,), ((x.clone().requires_grad_(True),),), names=["layers.1"], quiet=True)
    call(x).sum().backward()
    change, rule, told = CHANGES[what]
    change(module)
    with pytest.raises(qt.Trap, match=told) as caught:
        call(x)
    assert (caught.value.rule, caught.value.module) == (rule, "layers.1")


@pytest.mark.torch
def test_a_parameter_that_comes_later_is_refused_where_nothing_is_captured_too() -> None:
    """Nobody would give it its gradient."""
    pipeline, _, modules, data = begun("cpu", capture=False)
    _add_parameter(modules[1])
    with pytest.raises(qt.Trap, match="layers.1.gain is a parameter that came later"):
        pipeline.step(*data[1])


# ---- an evaluation between steps ----

@pytest.mark.parametrize("device", DEVICES)
def test_an_evaluation_in_its_own_mode_between_steps_changes_nothing(device: str) -> None:
    found = []
    for evaluates in (False, True):
        pipeline, optimizer, modules, data = begun(device)
        if evaluates:
            for module in modules:
                module.eval()
            pipeline.evaluate(*data[2])
            for module in modules:
                module.train()
        pipeline.step(*data[1])
        found.append(state(modules, optimizer))
    assert same(*found)
