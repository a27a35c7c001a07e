"""Programs, traces and ledgers from Python. What rules mean is tested in C; here it is that nothing is lost."""
from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

import qeffect
from qeffect import ContractError, Ledger, Program


def test_every_trace_of_the_c_tests_has_the_verdict_that_its_header_says(traces: Path) -> None:
    checked = 0
    for path in sorted(traces.glob("*.qet")):
        expected = re.search(r"^# expect: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert expected is not None, path.name
        found = [violation.rule + (f"*{violation.count}" if violation.count > 1 else "")
                 for violation in qeffect.check_trace(path).violations]
        assert found == ([] if expected[1] == "ok" else expected[1].split()), path.name
        checked += 1
    assert checked > 100


def test_a_violation_names_both_ops_their_lines_the_object_and_the_missing_edge() -> None:
    text = ("qet 1\nstream compute compute\nstream send comm\nbuffer out bytes=64\n"
            "op forward on compute mb=3 : buffer.write out\nop send on send : buffer.read out\n")
    verdict = qeffect.check_trace(text)
    assert not verdict.ok and verdict.rule == "sync.side" and verdict.total == 1
    violation = verdict.violations[0]
    assert violation.op is not None and violation.other is not None
    assert (violation.op.label, violation.op.line, violation.op.stream) == ("send", 6, "send")
    assert (violation.other.label, violation.other.line, violation.other.microbatch) == ("forward", 5, 3)
    assert (violation.object, violation.object_kind) == ("out", "buffer")
    assert violation.missing_edge == ("compute", "send")
    with pytest.raises(ContractError, match="sync.side") as caught:
        verdict.raise_if_broken()
    assert caught.value.violations == verdict.violations


def test_a_program_that_is_built_is_the_one_that_its_text_says() -> None:
    program = Program()
    compute, caller = program.stream("compute"), program.stream("caller", "caller")
    ready = program.event()
    weight, scale = program.weight("w", counter=3), program.scale("s", due=1)
    cache, grad = program.cache("q", weight, scale), program.grad("g", weight, due=2)
    program.order(grad, [1, 0])
    out = program.buffer("out", 128)
    program.step_begin()
    program.op("fill", compute, weight.read(0), cache.fill(0, layouts=3))
    program.op("f", compute, cache.use(0, layouts=1), scale.record(0), out.write(0, 64), microbatch=0)
    program.op("w", compute, grad.deposit(set=True), microbatch=1)
    program.op("w", compute, grad.deposit(), microbatch=0)
    program.op("take", compute, grad.take())
    program.op("commit", compute, weight.commit(0))
    program.op("fold", compute, scale.fold(0))
    program.record(ready, compute)
    program.wait(ready, caller)
    program.op("read", caller, out.read(0, 64))
    program.step_end()
    assert program.judge().ok, program.judge()
    again = Program.read(program.text())
    assert again.text() == program.text() and again.judge().ok
    program.op("read", caller, out.read(64, 128))
    assert program.judge().rule == "buffer.unwritten"


@pytest.mark.parametrize("text, line, column", [("qet 1\nstream c nonsense\n", 2, 10), ("qet 2\n", 1, 5)])
def test_malformed_text_names_its_place(text: str, line: int, column: int) -> None:
    with pytest.raises(qeffect.FormatError) as caught:
        qeffect.check_trace(text)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(qeffect.FileError, match="none.qet"):
        qeffect.check_trace(tmp_path / "none.qet")


def small_world() -> tuple[Program, qeffect.Stream, qeffect.Slot, qeffect.Grad]:
    program = Program()
    stream, slot = program.stream("compute"), program.slot("x")
    weight = program.weight("w")
    grad = program.grad("g", weight, due=2)
    program.order(grad, [0, 1])
    for label in ("f", "b", "take"):
        program.label(label)
    return program, stream, slot, grad


def test_a_ledger_refuses_a_second_forward_before_the_first_backward_and_changes_nothing() -> None:
    program, stream, slot, grad = small_world()
    ledger = Ledger(program)
    with ledger.step():
        ledger.op("f", stream, slot.acquire(1), microbatch=0)
        with pytest.raises(ContractError) as caught:
            ledger.op("f", stream, slot.acquire(2), microbatch=1)
        assert caught.value.rule == "slot.live"
        first = caught.value.violations[0]
        assert first.op is not None and first.other is not None
        assert (first.op.microbatch, first.other.microbatch) == (1, 0)
        assert qeffect.check_trace(caught.value.trace).rule == "slot.live"
        assert ledger.counter(slot) == 1
        ledger.op("b", stream, slot.release(1), grad.deposit(set=True), microbatch=0)
        ledger.op("f", stream, slot.acquire(2), microbatch=1)
        ledger.op("b", stream, slot.release(2), grad.deposit(), microbatch=1)
        ledger.op("take", stream, grad.take())


def test_what_a_step_owes_is_asked_at_its_end_and_the_step_is_aborted() -> None:
    program, stream, slot, grad = small_world()
    ledger = Ledger(program)
    with pytest.raises(ContractError) as caught, ledger.step():
        ledger.op("b", stream, grad.deposit(set=True), microbatch=0)
    assert caught.value.rule == "grad.missing" and not ledger.is_open


def test_a_refusal_after_more_submissions_than_are_kept_is_still_a_refusal() -> None:
    program, stream, slot, _ = small_world()
    ledger = Ledger(program)
    ledger.step_begin()
    for generation in range(1, 200):
        ledger.op("f", stream, slot.acquire(generation), microbatch=0)
        ledger.op("b", stream, slot.release(generation), microbatch=0)
    with pytest.raises(ContractError) as caught:
        ledger.op("b", stream, slot.release(199), microbatch=0)
    assert caught.value.rule == "slot.twice" and caught.value.trace == ""


def test_a_prepared_submission_takes_new_versions() -> None:
    program, stream, slot, _ = small_world()
    ledger = Ledger(program)
    forward = ledger.prepare("f", stream, [slot.acquire(0)])
    backward = ledger.prepare("b", stream, [slot.release(0)])
    ledger.step_begin()
    for microbatch in range(3):
        for submission in (forward, backward):
            submission.set_microbatch(microbatch)
            submission.set_version(0, microbatch + 1)
            ledger.submit(submission)
    assert ledger.counter(slot) == 3
    backward.set_version(0, 1)
    with pytest.raises(ContractError):
        ledger.submit(backward)


def test_misuse_is_an_error_and_never_an_abort_of_the_process() -> None:
    program, stream, slot, _ = small_world()
    ledger = Ledger(program)
    with pytest.raises(qeffect.Error, match="no step is open"):
        ledger.op("f", stream, slot.acquire(1))
    with pytest.raises(qeffect.Error, match="not certified"):
        ledger.issue(0)
    ledger.step_begin()
    with pytest.raises(qeffect.Error, match="a step is open"):
        ledger.step_begin()
    with pytest.raises(qeffect.Error, match="a step is open"):
        ledger.touch(slot, 4)
    with pytest.raises(qeffect.ArgumentError, match="no op 'nothing'"):
        ledger.op("nothing", stream)
    with pytest.raises(qeffect.ArgumentError):
        ledger.op("f", qeffect.Stream(9, "none", "compute"))
    with pytest.raises(qeffect.ArgumentError):
        ledger.counter(qeffect.Object(99, "none"))
    with pytest.raises(qeffect.ArgumentError):
        program.stream("s", "nonsense")
    with pytest.raises(qeffect.ArgumentError, match="at most 95"):
        program.slot("x" * 96)


def test_names_of_any_length_and_script_are_taken_or_refused_whole() -> None:
    program = Program()
    name = "gewicht-\u00e4\u6f22"
    program.weight(name)
    assert Program.read(program.text()).text() == program.text()


def test_a_ledger_outlives_the_program_that_it_was_made_from() -> None:
    program, stream, slot, _ = small_world()
    ledger = Ledger(program)
    del program
    gc.collect()
    ledger.step_begin()
    ledger.op("f", stream, slot.acquire(1), microbatch=0)


def test_rules_have_the_ids_and_sentences_of_the_documentation() -> None:
    rules = qeffect.rules()
    assert rules["slot.live"].startswith("A slot is acquired only")
    document = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
    if not document.is_file():
        pytest.skip("docs/rules.md is not here")
    text = document.read_text(encoding="utf-8")
    assert [rule for rule, sentence in rules.items() if f"| `{rule}` | {sentence}" not in text] == []
