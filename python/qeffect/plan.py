"""Plans: a schedule lowered for a model, every op on a stream, bound to slots, edges and deposits, and certified."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence, Union

from ._api import ffi, lib
from .errors import ArgumentError, ContractError, check, new_error, text_of
from .ledger import Ledger
from .program import NONE, Program, _recipe
from .schedule import Schedule, _new_counterexample, _refuse, schedule_of
from .verdict import verdict_of

_SLOT_KINDS = ("I", "X", "Y", "in_f", "out_f", "in_b", "out_b")
_UNIT_KINDS = ("load", "fill", "F", "I", "W", "send_f", "recv_f", "send_b", "recv_b", "grad_in", "grad_out", "take",
               "commit", "fold", "read")


class Decoder:
    """The built-in model: a Llama-style decoder. Sizes are counts of elements; `sequences` make a microbatch."""

    def __init__(self, *, layers: int, hidden: int, heads: int, ffn: int, vocab: int, sequence: int,
                 kv_heads: int = 0, sequences: int = 1, recipe: str = "delayed", history_length: int = 16,
                 margin: int = 0, rope_theta: float = 10000.0, norm_epsilon: float = 1e-5) -> None:
        config = ffi.new("qe_model_config *")
        config.layers, config.hidden, config.heads, config.kv_heads = layers, hidden, heads, kv_heads or heads
        config.ffn, config.vocab, config.sequence, config.sequences = ffn, vocab, sequence, sequences
        config.rope_theta, config.norm_epsilon = rope_theta, norm_epsilon
        kind = ffi.new("qe_recipe *", (_recipe(recipe), history_length, margin, lib.QE_AMAX_MAX))
        handle, error = ffi.new("qe_model **"), new_error()
        check(lib.qe_model_create(config, kind, handle, error), error)
        self._c: Any = ffi.gc(handle[0], lib.qe_model_destroy)
        self._table = lib.qe_model_table()

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its Hugging Face name."""
        found: dict[str, tuple[int, ...]] = {}
        for i in range(lib.qe_model_parameter_count(self._c)):
            p = lib.qe_model_parameter(self._c, i)
            found[text_of(p.name)] = (int(p.columns),) if p.vector else (int(p.rows), int(p.columns))
        return found


class Stages:
    """Stages of which only the number is known: each has one weight, a slot of every kind, and one op per action."""

    def __init__(self, stages: int, microbatches: int) -> None:
        if stages < 1 or microbatches < 1:
            raise ArgumentError(f"{stages} stages and {microbatches} microbatches; both must be at least 1")
        self.stages, self.microbatches = stages, microbatches
        handle, error = ffi.new("qe_timed_model **"), new_error()
        times = ffi.new("qe_timed_stage[]", stages)
        check(lib.qe_timed_model_create(times, stages, microbatches, handle, error), error)
        self._c: Any = ffi.gc(handle[0], lib.qe_timed_model_destroy)
        self._table = lib.qe_timed_model_table()


@dataclass(frozen=True)
class Pool:
    """Slots of one (stage, kind) on a rank: as many as are live at once. `slot_bytes` each, its witness included."""

    stage: int
    kind: str
    count: int
    slot_bytes: int


@dataclass(frozen=True)
class Unit:
    """One call of the model's lowering, or one op of the plan's own. `slots` maps a slot's kind to (index in its pool,
    generation counted from the step's beginning). `first`: its deposits are the first of the step."""

    kind: str
    stage: int
    microbatch: Union[int, None]
    first: bool
    slots: dict[str, tuple[int, int]]


class Plan:
    """Raises: ContractError where the schedule, or the program of a rank, breaks a rule; ArgumentError."""

    def __init__(self, schedule: Schedule, model: Union[Decoder, Stages], *, forward_only: bool = False,
                 cache_weights: bool = True, reuse_slots: bool = True, placement: str = "direct") -> None:
        placements = {"direct": lib.QE_GRADIENT_DIRECT, "copy": lib.QE_GRADIENT_COPY}
        schedule = schedule_of(schedule)
        if not isinstance(model, (Decoder, Stages)):
            raise TypeError(f"model is {model!r}; expected a Decoder or Stages")
        if placement not in placements:
            raise ArgumentError(f"placement is {placement!r}; expected direct or copy")
        if isinstance(model, Stages) and (model.stages, model.microbatches) != (schedule.stages, schedule.microbatches):
            raise ArgumentError(f"{model.stages} stages and {model.microbatches} microbatches for a schedule of "
                                f"{schedule.stages} and {schedule.microbatches}")
        self.schedule, self._model = schedule, model
        options = ffi.new("qe_plan_options *", (bool(forward_only), bool(cache_weights), bool(reuse_slots),
                                                placements[placement]))
        handle, violations, error = ffi.new("qe_plan **"), ffi.new("qe_violations *"), new_error()
        counterexample = _new_counterexample()
        status = lib.qe_plan_create(schedule._c, model._table, model._c, options, handle, violations, counterexample,
                                    error)
        if status == lib.QE_CONTRACT and violations.count > 0:
            raise ContractError.of(verdict_of(ffi.new("qe_program *"), violations))
        _refuse(status, counterexample, error)
        self._c: Any = ffi.gc(handle[0], lib.qe_plan_destroy)

    def _rank(self, rank: int) -> Any:
        if not 0 <= rank < self._c.ranks:
            raise ArgumentError(f"rank {rank} of a plan of {self._c.ranks} ranks")
        return self._c.rank[rank]

    def pools(self, rank: int) -> tuple[Pool, ...]:
        """The slot pools of a rank."""
        plan = self._rank(rank)
        pools = (plan.pools[i] for i in range(plan.pool_count))
        return tuple(Pool(int(p.stage), _SLOT_KINDS[p.kind], int(p.count), int(p.slot_bytes)) for p in pools)

    def slot_bytes(self, rank: int) -> int:
        """Bytes of all pools of a rank: its activation memory."""
        return int(self._rank(rank).slot_bytes)

    def units(self, rank: int) -> tuple[Unit, ...]:
        """The units of work of a rank, in the order in which they are submitted."""
        plan = self._rank(rank)
        return tuple(self._unit(plan.units[i]) for i in range(plan.unit_count))

    @staticmethod
    def _unit(unit: Any) -> Unit:
        slots = {_SLOT_KINDS[kind]: (int(unit.slot[kind]), int(unit.generation[kind]))
                 for kind in range(lib.QE_SLOT_KINDS) if unit.slot[kind] != NONE}
        microbatch = None if unit.microbatch == NONE else int(unit.microbatch)
        return Unit(_UNIT_KINDS[unit.kind], int(unit.stage), microbatch, bool(unit.set), slots)

    def program(self, rank: int) -> Program:
        """A copy of the certified program of a rank; `Ledger(program)` may certify and issue it."""
        program, error = Program(), new_error()
        plan = self._rank(rank)
        check(lib.qe_program_copy(ffi.addressof(plan, "program"), program._c, error), error)
        return program

    def ledger(self, rank: int) -> Ledger:
        """A certified ledger of a rank's program."""
        ledger = Ledger(self.program(rank))
        ledger.certify()
        return ledger


def slot_counts(plan: Plan, kinds: Sequence[str] = ("X",)) -> dict[int, int]:
    """Live microbatches per stage: the size of its pools of these kinds, largest first."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {plan!r}; expected a Plan, as Plan(schedule, model) makes one")
    found: dict[int, int] = {}
    for rank in range(plan.schedule.ranks):
        for pool in plan.pools(rank):
            if pool.kind in kinds:
                found[pool.stage] = max(found.get(pool.stage, 0), pool.count)
    return found
