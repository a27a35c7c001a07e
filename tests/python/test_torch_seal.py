"""What is asked before every replay in one call of C: it sees what Python sees, and where it cannot, Python looks."""
from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

from qeffect import ArgumentError, Schedule  # noqa: E402
from qeffect._seal import Places, attributes  # noqa: E402
from qeffect.bench.checks import run as run_checks  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from qeffect.torch.inside import fitting, inside  # noqa: E402
from qeffect.torch.seal import Seal  # noqa: E402
from torch_world import adamw, batches, blocks, loss_of  # noqa: E402

pytestmark = pytest.mark.torch


def sealed() -> tuple[Any, dict[str, Any], Seal]:
    module = torch.nn.Linear(3, 2)
    marks: dict[str, Any] = {"training": True}
    return module, marks, Seal([(f"m.{key}", module._parameters, key) for key in ("weight", "bias")],
                               [(marks, "training"), (marks, "forward")])


def test_this_torch_is_known_inside() -> None:
    assert inside() is not None, "checks take several times as long; python/qeffect/torch/inside.py says what is asked"


def test_a_seal_that_nobody_broke_has_a_short_way() -> None:
    module, marks, seal = sealed()
    for _ in range(3):
        assert seal.quick() == -1 and seal.moved() is None
        with torch.no_grad():
            module.weight.add_(1)
        marks["other"] = 1


def exchange(module: Any) -> None:
    module.weight = torch.nn.Parameter(module.weight.detach().clone())


def move_data(module: Any) -> None:
    module.weight.data = module.weight.data.clone()


def swap(module: Any) -> None:
    torch.utils.swap_tensors(module.weight, torch.nn.Parameter(torch.zeros(2, 3)))


def set_storage(module: Any) -> None:
    with torch.no_grad():
        module.weight.set_(torch.zeros(2, 3))


def take_a_part(module: Any) -> None:
    module.weight.data = module.weight.data[:, 1:]


@pytest.mark.parametrize("move", [exchange, move_data, swap, set_storage, take_a_part])
def test_every_way_to_move_a_parameter_is_seen_and_told(move: Any) -> None:
    module, _, seal = sealed()
    then = module.weight.data_ptr()
    kept = module.weight.data  # so that its memory is nobody else's
    move(module)
    assert seal.quick() == 0
    assert seal.moved() == ("m.weight", then, module.weight.data_ptr())
    assert kept.data_ptr() == then


def test_a_parameter_that_is_gone_and_one_that_is_empty_are_told() -> None:
    module, _, seal = sealed()
    module.weight.data = torch.empty(0)
    moved = seal.moved()
    assert moved is not None and moved[2] == 0
    module.register_parameter("weight", None)
    assert seal.quick() == 0 and (seal.moved() or [""])[0] == "m.weight"
    del module._parameters["weight"]
    assert seal.quick() == 0 and (seal.moved() or [""])[0] == "m.weight"


def test_another_parameter_in_the_same_memory_takes_a_closer_look_and_is_no_breach() -> None:
    module, _, seal = sealed()
    module.weight = torch.nn.Parameter(module.weight.detach())
    assert seal.quick() == 0 and seal.moved() is None


def test_marks_are_held_by_what_they_are() -> None:
    _, marks, seal = sealed()
    marks["training"] = False
    assert seal.quick() == 2 and seal.moved() is None
    marks["training"] = True
    assert seal.quick() == -1
    marks["forward"] = len
    assert seal.quick() == 3
    del marks["forward"]
    assert seal.quick() == -1


def test_the_number_of_keys_is_held() -> None:
    hooks = torch.nn.Linear(1, 1)._forward_hooks
    places = Places((hooks,), (None,), (...,), (0,), None)
    assert places.changed() == -1
    hooks[0] = len
    assert places.changed() == 0


def test_what_is_no_place_is_refused() -> None:
    for arguments in (([],), (({},), ("a",), (1,), (None,)), (({},), (), (), (), None),
                      ((1,), ("a",), (1,), (0,), None),
                      (({},), ("a",), (1,), ("x",), None), (({},), ("a",), (1,), (0,), None)):
        with pytest.raises((TypeError, IndexError)):
            Places(*arguments)
    with pytest.raises(TypeError):
        attributes([], "x")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        attributes((1,), "_version")


def test_places_in_a_cycle_are_collected() -> None:
    class Held:
        pass

    held = Held()
    owner: dict[str, Any] = {"held": held}
    held.__dict__["places"] = Places((owner,), ("held",), (held,), (None,), None)
    gone = weakref.ref(held)
    del held, owner
    gc.collect()
    assert gone() is None


LOOKS = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3, 1), torch.zeros(2, 3, dtype=torch.float64),
         torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, device="meta"), torch.zeros(6), torch.zeros(())]


@pytest.mark.parametrize("i", range(len(LOOKS)))
def test_arguments_fit_only_where_shape_dtype_and_device_do(i: int) -> None:
    fit = fitting([LOOKS[i], LOOKS[0]])
    assert fit([torch.empty_like(LOOKS[i]), torch.ones(2, 3)]) and fit((LOOKS[i].clone(), LOOKS[0]))
    assert fit([torch.nn.Parameter(LOOKS[i]) if LOOKS[i].is_floating_point() else LOOKS[i], LOOKS[0]])
    assert [fit([other, LOOKS[0]]) for other in LOOKS] == [k == i for k in range(len(LOOKS))]
    assert not any(fit(given) for given in ([], [LOOKS[i]], [LOOKS[i], LOOKS[0], LOOKS[0]], [LOOKS[i], None], [3, 4]))


def test_strides_do_not_matter_and_what_cannot_be_told_takes_a_closer_look() -> None:
    assert fitting([torch.zeros(2, 3)])([torch.zeros(3, 2).t()])
    assert not fitting([torch.zeros(2), 3])([torch.zeros(2), 3])
    deep = torch.zeros([1] * 17)
    assert not fitting([deep])([deep])


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("unknown", [True, False])
def test_traps_are_the_same_where_there_is_no_short_way(unknown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch inside, or a parameter of another kind."""
    if unknown:
        monkeypatch.setattr("qeffect.torch.inside.inside", lambda: None)
        monkeypatch.setattr("qeffect.torch.seal.inside", lambda: None)
    modules, data = blocks(2), batches(3)
    if not unknown:
        modules[1].register_buffer("names", torch.zeros(2).as_subclass(Named))
    pipeline = qt.Pipeline(modules, Schedule.generate("1f1b", ranks=2, microbatches=8), loss_of,
                           example=(data[0][0][0], data[0][1][0]), optimizer=adamw(modules), capture=True, quiet=True)
    assert pipeline.stages[1].seals[1].quick() == 0
    pipeline.step(*data[0])
    with pytest.raises(ArgumentError, match="captured as"):
        pipeline.step([x[:, :2] for x in data[1][0]], data[1][1])
    modules[1].eval()
    with pytest.raises(qt.Trap) as caught:
        pipeline.step(*data[1])
    assert caught.value.rule == "graph.mode"
    modules[1].train()
    pipeline.step(*data[1])
    modules[1].up.weight.data = modules[1].up.weight.data.clone()
    with pytest.raises(qt.Trap, match="up.weight") as caught:
        pipeline.step(*data[2])
    assert caught.value.rule == "graph.address"


def test_the_bench_times_every_check_between_replays_and_alone() -> None:
    found = run_checks(rounds=2, device="cpu")
    assert found["sealed_addresses"] == 12 and found["replays_checked"] == 2 * 2 * found["microbatches"]
    assert 0 < found["check_p10_us"] <= found["check_us_per_replay"] <= found["check_p90_us"]
    assert 0 < found["check_alone_us_per_replay"] < found["check_p90_us"]
    assert set(found["check_us_of"]) == {"begin", "F", "B"}
