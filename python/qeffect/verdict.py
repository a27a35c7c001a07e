"""What a judgement says: facts of each breach, as plain objects."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from ._api import ffi, lib
from .errors import ContractError, text_of

_TEXT_BYTES = 4096
_NONE: int = lib.QE_NONE


@dataclass(frozen=True)
class Place:
    """One submission: what it is, on which stream, for which stage and microbatch (None: none), where it stands.

    `line` is the 1-based line of the trace (0: not from a trace); `item` its index in the program.
    """

    item: int
    kind: str
    label: str
    stream: str
    stage: int
    microbatch: Optional[int]
    line: int


@dataclass(frozen=True)
class Violation:
    """One breach. `expected` and `found` are versions, generations or counts, as the rule's sentence names them.

    `op` is the offending submission (None at the end of a step, or where it is not part of the program), `other` the
    one it conflicts with or that made the state. `missing_edge` is (earlier stream, later stream) where an event
    recorded on the first and awaited on the second is missing. `text` is the paragraph that the command line prints.
    """

    rule: str
    sentence: str
    text: str
    op: Optional[Place]
    other: Optional[Place]
    object: Optional[str]
    object_kind: Optional[str]
    stream: Optional[str]
    stage: int
    microbatch: Optional[int]
    expected: int
    found: int
    count: int
    missing_edge: Optional[tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """`violations` holds at most 16 records, in program order; `total` counts all."""

    violations: tuple[Violation, ...]
    total: int

    @property
    def ok(self) -> bool:
        """Every rule is kept."""
        return self.total == 0

    @property
    def rule(self) -> Optional[str]:
        """The id of the first breach in program order; None: every rule is kept."""
        return self.violations[0].rule if self.violations else None

    def raise_if_broken(self) -> None:
        """Raises ContractError unless every rule is kept."""
        if not self.ok:
            raise ContractError.of(self)


_ITEM_KINDS = {
    lib.QE_ITEM_OP: "op", lib.QE_ITEM_RECORD: "record", lib.QE_ITEM_WAIT: "wait", lib.QE_ITEM_SYNC_EVENT: "sync event",
    lib.QE_ITEM_SYNC_STREAM: "sync stream", lib.QE_ITEM_SYNC_DEVICE: "sync device",
    lib.QE_ITEM_STEP_BEGIN: "step begin", lib.QE_ITEM_STEP_END: "step end", lib.QE_ITEM_DESTROY: "destroy",
}
_WITH_STREAM = (lib.QE_ITEM_OP, lib.QE_ITEM_RECORD, lib.QE_ITEM_WAIT, lib.QE_ITEM_SYNC_STREAM)


def _microbatch(value: int) -> Optional[int]:
    return None if value == _NONE else int(value)


def _stream(program: Any, index: int) -> Optional[str]:
    return text_of(program.streams[index].name) if index < program.stream_count else None


def _place(program: Any, index: int) -> Optional[Place]:
    if index >= program.item_count:
        return None
    item = program.items[index]
    label = text_of(program.labels[item.label].text) if item.kind == lib.QE_ITEM_OP else ""
    stream = _stream(program, item.stream) if item.kind in _WITH_STREAM else None
    return Place(int(index), _ITEM_KINDS[item.kind], label, stream or "", int(item.stage), _microbatch(item.microbatch),
                 int(item.line))


def _missing_edge(rule: str, stream: Optional[str], other: Optional[Place]) -> Optional[tuple[str, str]]:
    if rule not in ("sync.enter", "sync.exit", "sync.side", "sync.host", "sync.reuse") or stream is None:
        return None
    return (other.stream if other is not None else "", stream)


def violation_of(program: Any, record: Any) -> Violation:
    """`program`: qe_program * that was judged; `record`: qe_violation *."""
    text = ffi.new("char[]", _TEXT_BYTES)
    lib.qe_violation_text(record, program, text, _TEXT_BYTES)
    rule = text_of(lib.qe_rule_id(record.rule))
    op, other = _place(program, record.item), _place(program, record.other_item)
    known = program.objects[record.object] if record.object < program.object_count else None
    stream = _stream(program, record.stream)
    return Violation(
        rule=rule, sentence=text_of(lib.qe_rule_sentence(record.rule)), text=text_of(text), op=op, other=other,
        object=text_of(known.name) if known is not None else None,
        object_kind=text_of(lib.qe_object_kind_name(known.kind)) if known is not None else None,
        stream=stream, stage=int(record.stage), microbatch=_microbatch(record.microbatch),
        expected=int(record.expected), found=int(record.found), count=int(record.count),
        missing_edge=_missing_edge(rule, stream, other))


def verdict_of(program: Any, violations: Any) -> Verdict:
    """`violations`: qe_violations *."""
    records = tuple(violation_of(program, ffi.addressof(violations.record, i)) for i in range(violations.count))
    return Verdict(records, int(violations.total))


def rules() -> dict[str, str]:
    """Every rule's id with its sentence, in the order of docs/rules.md."""
    return {text_of(lib.qe_rule_id(rule)): text_of(lib.qe_rule_sentence(rule)) for rule in range(1, lib.QE_RULE_COUNT)}
