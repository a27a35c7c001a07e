"""Schedules of torch.distributed.pipelining, and TorchTitan's own trainer, under contract on a CPU: the same bits as
torch's own runtime, and clear words where something is wrong."""
from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")
pytest.importorskip("torch.distributed.pipelining.schedules", reason="this torch has no pipelining")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402
from torch.distributed.pipelining import PipelineStage, schedules as torchs  # noqa: E402

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
import qeffect.torchtitan as titan  # noqa: E402
from qeffect.torchtitan.runtime import _neighbours  # noqa: E402
from titan_world import assets, differing, train, words  # noqa: E402
from torch_world import HIDDEN, Block, adamw, same, state  # noqa: E402

pytestmark = pytest.mark.torch
MICROBATCHES, STEPS = 8, 3
ORDERS = {"1F1B": (4, 1), "GPipe": (2, 1), "Interleaved1F1B": (2, 2), "LoopedBFS": (2, 2),
          "InterleavedZeroBubble": (2, 2), "ZBVZeroBubble": (2, 2), "DualPipeV": (2, 2)}
CSV = "0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1\n1F0,1F1,3F0,3F1,3I0,3W0,3I1,3W1,1I0,1W0,1I1,1W1\n"


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_of(output: Any, target: Any) -> Any:
    return torch.nn.functional.mse_loss(output, target, reduction="sum")


def data(steps: int = STEPS, rows: int = 2 * MICROBATCHES) -> list[Any]:
    return list(torch.randn(steps, 2, rows, 4, HIDDEN, generator=torch.Generator().manual_seed(1)))


def stages_of(count: int, seed: int = 0) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(seed)
    modules = [Block() for _ in range(count)]
    return modules, [PipelineStage(m, i, count, torch.device("cpu")) for i, m in enumerate(modules)]


def native(order: Any, stages: list[Any]) -> Any:
    made = torchs._PipelineScheduleRuntime(stages, n_microbatches=order.microbatches, loss_fn=loss_of,
                                           scale_grads=False)
    made._prepare_schedule_with_comms(titan.to_torch(order))
    for stage in stages:
        setattr(stage, "_get_init_p2p_neighbors_ops", partial(_neighbours, stage))
    return made


def contract(order: Any, stages: list[Any], **options: Any) -> Any:
    return titan.ContractSchedule(stages, order, loss_of, titan.Settings(quiet=True, **options))


def one_step(schedule: Any, optimizer: Any, x: Any, target: Any) -> Any:
    losses: list[Any] = []
    schedule.step(x, target=target, losses=losses, return_outputs=False)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def trained(order: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Losses; parameters, moments and step counts. `native`: by torch's own runtime."""
    modules, stages = stages_of(order.stages)
    by_torch = options.pop("native", False)
    schedule = native(order, stages) if by_torch else contract(order, stages, **options)
    optimizer = adamw(modules)
    if not by_torch:
        schedule.guard(optimizer)
    losses = [one_step(schedule, optimizer, *batch) for batch in data()]
    return losses, state(modules, optimizer)


def flat(name: str) -> Any:
    ranks, chunks = ORDERS[name]
    return titan.order_named(name, ranks, chunks, MICROBATCHES).flattened()


@pytest.mark.parametrize("name", list(ORDERS))
def test_torchs_schedules_flattened_have_the_bits_of_torchs_own_runtime(name: str) -> None:
    order = flat(name)
    losses, left = trained(order, native=True)
    for capture in (False, True):
        for placement in ("direct", "copy"):
            found_losses, found = trained(order, capture=capture, placement=placement)
            assert same(found_losses, losses) and same(found, left), (capture, placement)


def test_a_custom_csv_that_torch_has_loaded_is_taken_with_its_stages(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(CSV.splitlines()[0].replace("2", "1") + "\n")
    _, stages = stages_of(2)
    schedule = torchs._PipelineScheduleRuntime(stages, n_microbatches=2, loss_fn=loss_of, scale_grads=False)
    schedule._load_csv(str(tmp_path / "order.csv"))
    made = titan.under_contract(schedule, quiet=True, capture=True)
    assert [str(a) for a in made.order.row(0)][:5] == ["0F0", "0F1", "1F0", "1F1", "1I0"]
    x, target = data(1, rows=4)[0]
    made.step(x, target=target, losses=[], return_outputs=False)
    assert [len(stage.slots) for stage in made.part.stages] == [2, 2]


def test_slots_follow_live_microbatches_and_not_their_number() -> None:
    slots = []
    for microbatches in (4, 16):
        order = titan.order_named("1F1B", 4, 1, microbatches).flattened()
        _, stages = stages_of(4)
        schedule = contract(order, stages, capture=True)
        x, target = data(1, rows=microbatches)[0]
        schedule.step(x, target=target, losses=[], return_outputs=False)
        slots.append([len(stage.slots) for stage in schedule.part.stages])
    assert slots == [[4, 3, 2, 1]] * 2


@pytest.mark.parametrize("capture", [False, True])
def test_several_rounds_before_the_optimizer_are_one_step(capture: bool) -> None:
    x, target = data(1)[0]
    left = []
    for rounds in (1, 2):
        order = titan.order_named("Interleaved1F1B", 2, 2, MICROBATCHES // rounds).flattened()
        modules, stages = stages_of(4)
        schedule, optimizer = contract(order, stages, capture=capture, rounds=rounds), adamw(modules)
        schedule.guard(optimizer)
        for part in range(rounds):
            rows = slice(part * len(x) // rounds, (part + 1) * len(x) // rounds)
            schedule.step(x[rows], target=target[rows], losses=[], return_outputs=False)
        optimizer.step()
        left.append(state(modules, optimizer))
    assert same(*left)


def test_gradients_are_scaled_where_torch_would_scale_them() -> None:
    order, found = flat("Interleaved1F1B"), []
    x, target = data(1)[0]
    for ours in (False, True):
        modules, stages = stages_of(4)
        made = torchs._PipelineScheduleRuntime(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of, scale_grads=True)
        made._prepare_schedule_with_comms(titan.to_torch(order))
        if ours:
            made = titan.under_contract(made, capture=True, quiet=True)
        for stage in stages:
            setattr(stage, "_get_init_p2p_neighbors_ops", partial(_neighbours, stage))
        made.step(x, target=target, losses=[], return_outputs=False)
        found.append([p.grad.clone() for m in modules for p in m.parameters()])
    assert same(*found)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    modules, stages = stages_of(4)
    schedule, optimizer = contract(flat("ZBVZeroBubble"), stages, capture=True), adamw(modules)
    schedule.guard(optimizer)
    (x, target), (bad, _), _ = data()
    one_step(schedule, optimizer, x, target)
    before = state(modules, optimizer)
    bad[3] = float("inf")
    one_step(schedule, optimizer, bad, target)
    assert same(state(modules, optimizer), before) and int(schedule.commits) == 1
    schedule.veto()
    one_step(schedule, optimizer, x, target)
    assert same(state(modules, optimizer), before) and int(schedule.commits) == 1
    one_step(schedule, optimizer, x, target)
    assert not same(state(modules, optimizer), before) and int(schedule.commits) == 2


def test_an_evaluation_between_steps_gives_outputs_and_changes_nothing() -> None:
    left = []
    for evaluates in (False, True):
        modules, stages = stages_of(4)
        schedule, optimizer = contract(flat("DualPipeV"), stages, capture=True), adamw(modules)
        schedule.guard(optimizer)
        for x, target in data():
            if evaluates:
                losses: list[Any] = []
                output = schedule.eval(x, target=target, losses=losses)
                expected = x
                for module in modules:
                    expected = module(expected)
                torch.testing.assert_close(output, expected.detach())
                assert len(losses) == MICROBATCHES
            one_step(schedule, optimizer, x, target)
        left.append(state(modules, optimizer))
    assert same(*left)


# ---- what is wrong is told ----

def ready(capture: bool = True) -> tuple[list[Any], Any, Any]:
    modules, stages = stages_of(4)
    schedule, optimizer = contract(flat("InterleavedZeroBubble"), stages, capture=capture), adamw(modules)
    schedule.guard(optimizer)
    return modules, schedule, optimizer


def test_a_moved_parameter_is_refused_by_name_and_the_step_given_up() -> None:
    modules, schedule, optimizer = ready()
    x, target = data(1)[0]
    one_step(schedule, optimizer, x, target)
    kept = modules[2].up.weight.data
    modules[2].up.weight.data = kept.clone()
    with pytest.raises(qt.Trap, match="stages.2.up.weight") as caught:
        schedule.step(x, target=target, losses=[], return_outputs=False)
    assert caught.value.rule == "graph.address" and caught.value.microbatch == 0
    modules[2].up.weight.data = kept
    one_step(schedule, optimizer, x, target)
    assert int(schedule.commits) == 2


def test_a_microbatch_run_twice_is_refused() -> None:
    _, schedule, optimizer = ready()
    x, target = data(1)[0]
    one_step(schedule, optimizer, x, target)
    row = schedule.pipeline_order_with_comms[0]
    first = next(i for i, action in enumerate(row) if str(action) == "0F0")
    row.insert(first + 1, row[first])
    with pytest.raises(qt.Trap) as caught:
        schedule.step(x, target=target, losses=[], return_outputs=False)
    assert caught.value.rule == "slot.live" and caught.value.module == "stages.0"


def test_a_weight_gradient_that_is_left_out_stops_the_optimizer() -> None:
    _, schedule, optimizer = ready()
    x, target = data(1)[0]
    row = schedule.pipeline_order_with_comms[0]
    row.remove(next(action for action in row if str(action) == "3W7"))
    with pytest.raises(qt.Trap) as caught:
        schedule.step(x, target=target, losses=[], return_outputs=False)
    assert caught.value.rule == "grad.missing" and caught.value.module == "stages.3"


def test_an_optimizer_without_a_whole_step_is_refused() -> None:
    _, schedule, optimizer = ready()
    x, target = data(1)[0]
    one_step(schedule, optimizer, x, target)
    with pytest.raises(qt.Trap) as caught:
        optimizer.step()
    assert caught.value.rule == "grad.missing"


def test_a_second_step_before_the_optimizer_is_refused() -> None:
    _, schedule, _ = ready()
    x, target = data(1)[0]
    schedule.step(x, target=target, losses=[], return_outputs=False)
    with pytest.raises(qt.Trap) as caught:
        schedule.step(x, target=target, losses=[], return_outputs=False)
    assert caught.value.rule == "grad.twice"
    assert caught.value.submitted.startswith(f"{__file__}:")  # not the context manager that the step is


def test_what_cannot_be_kept_is_refused_with_a_reason() -> None:
    modules, schedule, _ = ready()
    x, target = data(1)[0]
    with pytest.raises(qeffect.ArgumentError, match="return_outputs=False"):
        schedule.step(x, target=target)
    with pytest.raises(qeffect.ArgumentError, match="mask: a stage takes tensors"):
        schedule.step(x, target=target, losses=[], return_outputs=False, mask="causal")
    with pytest.raises(qeffect.UnsupportedError, match="SGD cannot be vetoed"):
        schedule.guard(torch.optim.SGD(modules[0].parameters(), lr=0.1))
    with pytest.raises(qeffect.UnsupportedError, match="fused=True"):
        schedule.guard(torch.optim.AdamW(modules[0].parameters()))
    with pytest.raises(qeffect.ArgumentError, match="this rank has the stages"):
        contract(flat("1F1B"), stages_of(4)[1][:3])
    with pytest.raises(qeffect.ArgumentError, match="Unknown schedule"):
        titan.order_named("2F2B", 2, 1, 4)


def test_a_sharded_stage_is_refused_by_its_rule() -> None:
    from torch.distributed.fsdp import fully_shard
    modules, stages = stages_of(4)
    fully_shard(modules[1], mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    with pytest.raises(qeffect.ArgumentError, match="graph.address"):
        contract(flat("1F1B"), stages)


def test_state_in_the_middle_of_a_step_is_refused() -> None:
    _, schedule, optimizer = ready()
    held = titan.ContractState(schedule)
    x, target = data(1)[0]
    one_step(schedule, optimizer, x, target)
    assert int(held.state_dict()["commits"]) == 1
    schedule.step(x, target=target, losses=[], return_outputs=False)
    with pytest.raises(qt.Trap) as caught:
        held.state_dict()
    assert caught.value.rule == "weight.version"


def test_state_of_another_recipe_is_refused_and_changes_nothing() -> None:
    _, schedule, _ = ready()
    held = titan.ContractState(schedule)
    other = held.state_dict()
    other["recipe"], other["commits"] = other["recipe"] + 1, other["commits"] + 7
    with pytest.raises(qeffect.ArgumentError, match="another recipe"):
        held.load_state_dict(other)
    with pytest.raises(qeffect.ArgumentError, match="differs"):
        held.load_state_dict({})
    assert int(schedule.commits) == 0


def test_without_torchtitan_the_schedules_work_and_the_trainer_says_what_it_needs(monkeypatch: Any) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "qeffect.torchtitan.train", raising=False)
    with pytest.raises(qeffect.UnsupportedError, match="TorchTitan 0.2.2"):
        titan.Trainer
    with pytest.raises(AttributeError):
        titan.nothing


# ---- several ranks ----

def a_rank(rank: int, folder: str, name: str, bad: bool) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/meet", 2), rank=rank, world_size=2)
    torch.save({by: a_ranks_training(rank, name, by, bad) for by in ("torch", "ours")}, f"{folder}/left{rank}")
    dist.destroy_process_group()


def a_ranks_training(rank: int, name: str, by: str, bad: bool) -> list[Any]:
    """[steps that became visible, parameters, moments, step counts]"""
    modules = stages_of(4)[0]
    mine = [rank, 3 - rank] if name == "ZBVZeroBubble" else [rank, 2 + rank]
    stages = [PipelineStage(modules[i], i, 4, torch.device("cpu")) for i in mine]
    schedule = torchs.get_schedule_class(name)(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    for stage in stages:
        setattr(stage, "_get_init_p2p_neighbors_ops", partial(_neighbours, stage))
    optimizer = adamw([modules[i] for i in mine])
    if by == "ours":
        schedule = titan.under_contract(schedule, capture=True, quiet=True)
        schedule.guard(optimizer)
    first, last = 0 in mine, 3 in mine
    for i, (x, target) in enumerate(data()):
        if bad and i == 1:
            target[0] = float("nan")
        schedule.step(*([x] if first else []), target=target if last else None, losses=[] if last else None,
                      return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    commits = schedule.commits.clone() if by == "ours" else torch.tensor([STEPS])
    return [commits, *state([modules[i] for i in mine], optimizer)]


def two_ranks(folder: Path, name: str, bad: bool = False) -> list[dict[str, list[Any]]]:
    processes.spawn(a_rank, (str(folder), name, bad), nprocs=2)
    return [torch.load(folder / f"left{rank}") for rank in range(2)]


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_two_ranks_have_the_bits_of_torchs_own_runtime(tmp_path: Path, name: str) -> None:
    for left in two_ranks(tmp_path, name):
        assert same(left["ours"], left["torch"])


def test_a_loss_that_is_not_finite_on_one_rank_vetoes_the_step_on_both(tmp_path: Path) -> None:
    left = two_ranks(tmp_path, "Interleaved1F1B", bad=True)
    assert [int(one["ours"][0]) for one in left] == [STEPS - 1] * 2
    assert all(bool(tensor.isfinite().all()) for one in left for tensor in one["ours"])


# ---- TorchTitan's own trainer ----

@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Path:
    pytest.importorskip("tokenizers")
    made = Path(tmp_path_factory.mktemp("titan"))
    assets(made)
    return made


@pytest.mark.titan
def test_torchtitans_trainer_flattened_has_the_bits_of_torchs_own_runtime(corpus: Path) -> None:
    (expected,) = train(corpus, "native", words(corpus))
    (found,) = train(corpus, "contract", words(corpus, qeffect__capture="host"))
    assert found["schedule"] == "ContractSchedule" and found["slots"] == [4, 3, 2, 1] and found["commits"] == 4
    assert differing(found, expected) == []


@pytest.mark.titan
def test_torchtitans_trainer_on_two_ranks_has_the_bits_of_torchs_own_runtime(corpus: Path) -> None:
    both = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}
    expected = train(corpus, "native", words(corpus, **both), ranks=2)
    found = train(corpus, "contract", words(corpus, **both, qeffect__capture="host"), ranks=2)
    assert [differing(a, b) for a, b in zip(found, expected)] == [[], []]


@pytest.mark.titan
def test_a_csv_and_gradient_accumulation_run_in_torchtitans_trainer(corpus: Path) -> None:
    (corpus / "order.csv").write_text(CSV)
    more = {"parallelism__pipeline_parallel_schedule_csv": corpus / "order.csv", "training__local_batch_size": 2,
            "training__global_batch_size": 4, "training__steps": 2, "qeffect__capture": "host"}
    (found,) = train(corpus, "contract", words(corpus, **more))
    assert found["commits"] == 2 and len(found["losses"]) == 4 and len(found["slots"]) == 4
    assert found["actions"][:2] == ["0F0", "0F1"] and "3W3" in found["actions"]


@pytest.mark.titan
def test_torchtitans_checkpoints_carry_the_state_and_go_on_with_the_same_bits(corpus: Path) -> None:
    more = {"checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__last_save_model_only": False}
    (straight,) = train(corpus, "contract", words(corpus, **more, job__dump_folder=corpus / "straight"))
    (corpus / "resumed" / "checkpoint").mkdir(parents=True)
    shutil.copytree(corpus / "straight" / "checkpoint" / "step-2", corpus / "resumed" / "checkpoint" / "step-2")
    (resumed,) = train(corpus, "contract", words(corpus, **more, job__dump_folder=corpus / "resumed",
                                                 parallelism__pipeline_parallel_schedule="ZBVZeroBubble"))
    assert len(resumed["losses"]) == 2 and resumed["commits"] == 4
    straight["losses"] = straight["losses"][2:]
    assert differing(straight, resumed) == []


@pytest.mark.titan
@pytest.mark.parametrize("more, told", [
    ({"activation_checkpoint__mode": "full", "qeffect__capture": "graph"}, "preserve_rng_state = false"),
    ({"compile__enable": True}, "exclude each other"),
    ({"qeffect__recipe": "delayed"}, "Transformer Engine"),
    ({"training__local_batch_size": 7, "parallelism__pipeline_parallel_microbatch_size": 2}, "no multiple"),
    ({"optimizer__implementation": "for-loop"}, "fused=True"),
])
def test_settings_that_cannot_be_under_contract_are_told(corpus: Path, more: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        train(corpus, "contract", words(corpus, **more))
