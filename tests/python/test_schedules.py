"""Schedules, certificates, simulation, search and plans from Python."""
from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qeffect
from qeffect import Plan, Schedule


@pytest.mark.parametrize("name", Schedule.names())
def test_every_named_schedule_is_generated_written_read_and_proved(name: str) -> None:
    schedule = Schedule.generate(name, ranks=4, microbatches=8)
    schedule.check()
    if name != "dualpipe":  # it runs both ways, which a file cannot say
        again = Schedule.read_csv(schedule.csv())
        assert again.rows == schedule.rows and again.stage_rank == schedule.stage_rank


def test_an_action_is_read_and_written_in_pytorchs_words() -> None:
    assert str(qeffect.Action.parse("2F10")) == "2F10"
    assert qeffect.Action.parse("0W3") == qeffect.Action(0, "W", 3)
    with pytest.raises(qeffect.ArgumentError, match="'2X0' is no action"):
        qeffect.Action.parse("2X0")
    rows = Schedule.generate("dualpipev", ranks=2, microbatches=4).rows
    assert any(action.paired for row in rows for action in row)


@pytest.mark.parametrize("name", ["1f1b\0", "\ud800", None, b"1f1b", 7])
def test_a_name_that_c_cannot_take_whole_is_refused(name: object) -> None:
    with pytest.raises(qeffect.ArgumentError, match="NUL|UTF-8|no text"):
        Schedule.generate(name, ranks=2, microbatches=4)  # type: ignore[arg-type]


def test_a_schedule_that_stops_is_refused_with_a_shortest_cycle() -> None:
    schedule = Schedule.of([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    with pytest.raises(qeffect.ContractError) as caught:
        schedule.check()
    assert caught.value.rule == "schedule.cycle"
    assert "1F1" in caught.value.counterexample


def test_a_memory_limit_is_proved_or_refused() -> None:
    schedule = Schedule.generate("1f1b", ranks=4, microbatches=8)
    certificate = schedule.certify(memory_limit=4, find_capacity=True)
    assert certificate.peak_activation == 4 and certificate.ascending
    assert [peak.live for peak in certificate.peaks] == [4, 3, 2, 1]
    assert certificate.peaks == schedule.peaks()
    with pytest.raises(qeffect.ContractError) as caught:
        schedule.certify(memory_limit=3)
    assert caught.value.rule == "schedule.memory"
    for limit in (-1, math.nan):
        with pytest.raises(qeffect.ArgumentError, match="memory limit is negative or not a number"):
            schedule.certify(memory_limit=limit)


def test_malformed_csv_names_row_and_cell() -> None:
    with pytest.raises(qeffect.FormatError) as caught:
        Schedule.read_csv("0F0,0B0\n1F0,oops\n")
    assert (caught.value.line, caught.value.column) == (2, 2)
    with pytest.raises(qeffect.ArgumentError, match="ranks"):
        Schedule.generate("1f1b", ranks=0, microbatches=8)
    with pytest.raises(qeffect.FormatError):
        Schedule.read_csv("\n")


def test_a_file_is_read_as_its_text_is(tmp_path: Path) -> None:
    schedule = Schedule.generate("zbv", ranks=2, microbatches=4)
    path = tmp_path / "orders.csv"
    path.write_text(schedule.csv(communication=True))
    assert Schedule.read_csv(path).rows == schedule.rows


def test_a_name_in_place_of_a_schedule_is_told_what_makes_one() -> None:
    name: Any = "zbh1"
    for use in (lambda: qeffect.simulate(name, times=(1, 1, 1)), lambda: qeffect.Plan(name, qeffect.Stages(4, 8))):
        with pytest.raises(TypeError, match=r"schedule is 'zbh1'; .*Schedule\.generate.*Schedule\.read_csv"):
            use()


def test_a_name_in_place_of_a_plan_a_model_or_a_program_is_told_what_makes_one() -> None:
    name: Any = "zbh1"
    schedule = Schedule.generate("zbh1", ranks=2, microbatches=4)
    with pytest.raises(TypeError, match=r"plan is 'zbh1'; .*Plan\(schedule, model\)"):
        qeffect.slot_counts(name)
    with pytest.raises(TypeError, match="model is 'zbh1'; .*Decoder or Stages"):
        qeffect.Plan(schedule, name)
    with pytest.raises(TypeError, match=r"program is 'zbh1'; .*Program\.read.*plan\.program\(rank\)"):
        qeffect.Ledger(name)


def test_simulated_times_are_views_that_keep_their_simulation() -> None:
    schedule = Schedule.generate("1f1b", ranks=2, microbatches=4)
    start = qeffect.simulate(schedule, times=(1, 1, 1)).start
    gc.collect()
    assert start.dtype == np.float64 and start.shape == (16,)
    assert start.min() == 0 and np.isfinite(start).all()


@pytest.mark.parametrize("unit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeline_in_impossible_units_is_an_error_and_never_an_abort_of_the_process(unit: float) -> None:
    simulation = qeffect.simulate(Schedule.generate("1f1b", ranks=2, microbatches=2), times=(1, 1, 1))
    with pytest.raises(qeffect.ArgumentError, match="unit_us"):
        simulation.timeline(unit_us=unit)


def test_a_simulation_tells_what_the_papers_tell() -> None:
    schedule = Schedule.generate("1f1b", ranks=4, microbatches=8)
    simulation = qeffect.simulate(schedule, times=(1, 1, 1))
    assert simulation.work == 24 and simulation.makespan == 33  # (8 + 3) * (F + B)
    assert simulation.makespan_bubble == 9
    costs = [qeffect.StageCost(1, 1, 1)] * 4
    assert qeffect.simulate(schedule, costs=costs).makespan == 33
    with pytest.raises(qeffect.ArgumentError, match="3 costs"):
        qeffect.simulate(schedule, costs=costs[:3])
    with pytest.raises(qeffect.ArgumentError):
        qeffect.simulate(schedule, times=(1, float("nan"), 1))
    assert simulation.svg("title").lstrip().startswith("<")
    assert json.loads(simulation.timeline())
    assert "F0" in simulation.chart(80)


def test_a_search_is_no_worse_than_the_best_named_order() -> None:
    found = qeffect.search(ranks=2, chunks=2, microbatches=4, times=(1, 1.2, 0.7), latency=0.1, memory_limit=2)
    found.schedule.certify(memory_limit=2)
    assert found.bound <= found.value <= found.named_value
    with pytest.raises(qeffect.ArgumentError):
        qeffect.search(ranks=2, chunks=1, microbatches=4, times=(1, 1, 1), memory_limit=0.1)


def test_a_flattened_schedule_keeps_the_live_microbatches_of_its_ranks() -> None:
    schedule = Schedule.generate("zbh1", ranks=4, microbatches=16)
    flat = schedule.flattened()
    assert flat.ranks == 1 and flat.stages == 4
    plan = Plan(flat, qeffect.Stages(4, 16))
    counts = qeffect.slot_counts(plan)
    assert counts == qeffect.slot_counts(Plan(schedule, qeffect.Stages(4, 16)))
    longer = Schedule.generate("zbh1", ranks=4, microbatches=64).flattened()
    assert qeffect.slot_counts(Plan(longer, qeffect.Stages(4, 64))) == counts


def test_a_plan_tells_units_with_their_slots_and_its_program_is_certified() -> None:
    schedule = Schedule.generate("1f1b", ranks=2, microbatches=4)
    model = qeffect.Decoder(layers=2, hidden=64, heads=2, ffn=128, vocab=256, sequence=32)
    assert model.parameters["model.norm.weight"] == (64,)
    plan = Plan(schedule, model)
    del model
    gc.collect()
    forwards = [unit for unit in plan.units(0) if unit.kind == "F"]
    assert [unit.microbatch for unit in forwards] == [0, 1, 2, 3]
    assert [unit.slots["X"] for unit in forwards] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert plan.slot_bytes(0) == sum(pool.count * pool.slot_bytes for pool in plan.pools(0))
    program = plan.program(0)
    assert program.judge().ok
    ledger = plan.ledger(0)
    with ledger.step():
        for item in range(program.item_count):
            ledger.issue(item)
    ledger.step_begin()
    for item in (-1, program.item_count, 1 << 32, 1 << 64):
        with pytest.raises(qeffect.ArgumentError, match=f"of a program of {program.item_count} items"):
            ledger.issue(item)
    for wrong in ([0], ("0",), 0):
        with pytest.raises(TypeError):
            ledger.issue_all(wrong)  # type: ignore[arg-type]
    with pytest.raises(qeffect.ContractError):
        ledger.issue(program.item_count - 1)
    ledger.issue_all(tuple(range(program.item_count)))
    ledger.step_end()
    with pytest.raises(qeffect.ArgumentError):
        plan.pools(2)
    with pytest.raises(qeffect.ArgumentError, match="more layers|model of 2 layers"):
        Plan(Schedule.generate("1f1b", ranks=4, microbatches=4),
             qeffect.Decoder(layers=2, hidden=64, heads=2, ffn=128, vocab=256, sequence=32))


def test_a_plan_for_evaluation_of_a_schedule_that_trains_is_an_error_and_never_an_abort() -> None:
    for training in (True, False):
        schedule = Schedule.generate("1f1b", ranks=2, microbatches=4, forward_only=not training)
        if training:
            with pytest.raises(qeffect.ArgumentError, match="keeps nothing for backwards"):
                Plan(schedule, qeffect.Stages(2, 4), forward_only=True)
        else:
            assert {unit.kind for unit in Plan(schedule, qeffect.Stages(2, 4), forward_only=True).units(0)} >= {"F"}


@pytest.mark.parametrize("stages, microbatches", [(3, 4), (1, 4), (2, 5), (2, 3)])
def test_stages_of_another_number_than_the_schedules_are_an_error_and_never_an_abort(stages: int,
                                                                                     microbatches: int) -> None:
    schedule = Schedule.generate("1f1b", ranks=2, microbatches=4)
    with pytest.raises(qeffect.ArgumentError, match=f"{stages} stages and {microbatches} microbatches"):
        Plan(schedule, qeffect.Stages(stages, microbatches))


def test_views_share_memory_and_spans_tell_where_it_is() -> None:
    memory = np.arange(12, dtype=np.float32)
    span = qeffect.span(memory)
    assert (span.bytes, span.device) == (48, "cpu")
    view = qeffect.view(span.address, (3, 4), np.float32, owner=memory)
    view[2, 3] = 7
    assert memory[11] == 7
    assert np.from_dlpack(view)[2, 3] == 7
    assert qeffect.span(memory.reshape(3, 4)[:, 1]) == qeffect.Span(span.address + 4, 36, "cpu")
    assert qeffect.span(memory[:0]).bytes == 0
    with pytest.raises(qeffect.ArgumentError):
        qeffect.span(memory[::-1])
    with pytest.raises(qeffect.ArgumentError):
        qeffect.span(object())
    with pytest.raises(qeffect.ArgumentError):
        qeffect.view(0, (1,), np.float32)
    assert not qeffect.view(span.address, (2,), np.float32, owner=memory, writable=False).flags.writeable
