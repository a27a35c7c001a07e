"""What is judged before each action of a stage: one place for all who drive stages by a contract, and for whoever
measures what it costs."""
from __future__ import annotations

from ..errors import ContractError
from .contract import FORWARD, Contract
from .stage import Slot, Stage


def admit(contract: Contract, stage: Stage, kind: str, microbatch: int) -> Slot:
    """The slot of an action that may be done: weights are those of its forward, nothing moved, the mode is the captured
    one, and the ledger takes it. Raises: Trap, ContractError; nothing has changed."""
    planned = contract.planned.get((stage.index, kind, microbatch))
    if planned is None:
        return stage.slots[contract.submit(stage.index, kind, microbatch).slot]  # which says why not
    slot = stage.slots[planned.place.slot]
    if kind != FORWARD and slot.microbatch == microbatch:
        stage.check_weights(slot)
    if stage.capture and stage.seals[kind in "WB"].quick() >= 0:
        _look_closer(contract, stage, kind, microbatch)
    contract.submit_planned(planned)
    return slot


def _look_closer(contract: Contract, stage: Stage, kind: str, microbatch: int) -> None:
    """Raises: ContractError (graph.address, graph.mode) where a launch would not do what was captured."""
    moved = stage.moved(kind)
    if moved is not None:
        try:
            contract.refuse_launch(stage.index, microbatch, "address", moved[1], moved[2])
        except ContractError as error:
            raise told(error, f" What moved: {moved[0]}.") from None
    if stage.mode_changed:
        contract.refuse_launch(stage.index, microbatch, "mode", 1, 0)


def told(error: ContractError, detail: str) -> ContractError:
    """The same breach with more of its facts in words."""
    return ContractError(error.message + detail, rule=error.rule, violations=error.violations, trace=error.trace)
