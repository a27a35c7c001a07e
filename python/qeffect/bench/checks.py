"""What checking costs the host: every check of a step is timed alone, where it stands, between two replays, and whole
steps under contract are held against the same replays without one, in turns."""
from __future__ import annotations

import statistics
import time
from typing import Any, Optional, Sequence

from ..schedule import Action
from ..torch.admit import admit
from ..torch.contract import Contract
from ..torch.stage import Slot, Stage
from ..torch.streams import streams_of

MICROBATCHES = 32
AT_MOST_CHECK_US = 5.0
WARMUPS, ROUNDS = 3, 30  # steps, of 2 * MICROBATCHES replays each; a neighbour on the host disturbs some of them
_clock = time.perf_counter_ns


def contract_of(stage_module: Any, device: Any) -> Contract:
    """Of a module as the only stage of a step."""
    actions = [Action(0, kind, m) for m in range(MICROBATCHES) for kind in "FB"]
    return Contract(["layer"], [[n for n, _ in stage_module.named_parameters()]], actions, streams_of(device))


class Driven:
    """A captured stage as the only one of a pipeline, driven as a pipeline drives its stages. `leaves`, `gradient`: of
    a microbatch, which a replay copies into its slot unless they lie there."""

    def __init__(self, contract: Contract, stage: Stage, leaves: Sequence[Any], gradient: Any) -> None:
        self.contract, self.stage = contract, stage
        self.leaves, self.gradient = leaves, gradient

    def begin(self) -> None:
        """As Pipeline.begin has it."""
        self.contract.begin()
        if self.stage.rebuilt() is not None:
            raise RuntimeError("the layer was changed while it was timed")
        self.stage.begin_step()

    def check(self, kind: str, microbatch: int) -> Slot:
        """All that is asked before a replay, as Pipeline.run has it."""
        if kind == "F":
            self.stage.check_arguments(self.leaves)
        return admit(self.contract, self.stage, kind, microbatch)

    def replay(self, slot: Slot, kind: str, microbatch: int, leaves: Any, gradient: Any) -> None:
        if kind == "F":
            self.stage.forward(slot, leaves, microbatch, slot.generation + 1, life=self.contract.life(0, microbatch),
                               hand_out=False, submitted="bench")
        else:
            self.stage.backward(slot, [gradient])

    def close_step(self) -> None:
        """What the device does behind the last replay of a step, under contract or not."""

    def commit(self) -> None:
        self.contract.take()
        self.close_step()
        self.contract.commit()
        self.contract.end()

    # ---- a step in three ways ----

    def step(self, leaves: Any, gradient: Any) -> None:
        self.begin()
        for microbatch in range(MICROBATCHES):
            for kind in "FB":
                self.replay(self.check(kind, microbatch), kind, microbatch, leaves, gradient)
        self.commit()

    def bare_step(self, leaves: Any, gradient: Any) -> None:
        """The same replays without a contract."""
        slot = self.stage.slots[0]
        for microbatch in range(MICROBATCHES):
            for kind in "FB":
                self.replay(slot, kind, microbatch, leaves, gradient)
        self.close_step()

    def timed_step(self, spent: dict[str, list[int]]) -> None:
        """A step under contract. `spent`: takes ns of its beginning and of each check, the clock's own included."""
        began = _clock()
        self.begin()
        spent["begin"].append(_clock() - began)
        for microbatch in range(MICROBATCHES):
            for kind in "FB":
                began = _clock()
                slot = self.check(kind, microbatch)
                spent[kind].append(_clock() - began)
                self.replay(slot, kind, microbatch, self.leaves, self.gradient)
        self.commit()

    def checks_alone(self, *_: Any) -> None:
        """Nothing but the checks of a step, so that all they touch stays in the caches."""
        self.begin()
        for microbatch in range(MICROBATCHES):
            for kind in "FB":
                self.check(kind, microbatch)
        self.contract.abort()


def _settle(driven: Driven) -> None:
    """No replay is under way, so none makes the host wait for room to submit another."""
    import torch
    if driven.stage.device.type == "cuda":
        torch.cuda.synchronize(driven.stage.device)


def _us_of_replay(work: Any, driven: Driven) -> float:
    _settle(driven)
    began = _clock()
    work(driven.leaves, driven.gradient)
    return (_clock() - began) / (2 * MICROBATCHES) / 1e3


def measure(driven: Driven, rounds: int = ROUNDS) -> dict[str, Any]:
    """us of the host for each replay. check_us_per_replay: the median check of a forward and of a backward, their mean,
    and the part of a replay in what is asked once per step; a tenth of all checks took less than check_p10_us, a tenth
    more than check_p90_us. check_alone_us_per_replay: without replays between checks. contract_us_per_replay: by how
    much a step under contract is longer than its replays alone, medians of turns, the ledger's end of the step
    included."""
    spent: dict[str, list[int]] = {"begin": [], "F": [], "B": []}
    alone, under, bare = _lists()
    for turn in range(WARMUPS + rounds):
        if turn == WARMUPS:
            spent, (alone, under, bare) = {kind: [] for kind in spent}, _lists()
        _settle(driven)
        driven.timed_step(spent)
        alone.append(_us_of_replay(driven.checks_alone, driven))
        bare.append(_us_of_replay(driven.bare_step, driven))
        under.append(_us_of_replay(driven.step, driven))
    _settle(driven)
    return {"check_us_per_replay": _per_replay(spent, 50), "check_p10_us": _per_replay(spent, 10),
            "check_p90_us": _per_replay(spent, 90),
            "check_us_of": {kind: round(_percentile(ns, 50) / 1e3, 3) for kind, ns in spent.items()},
            "check_alone_us_per_replay": round(statistics.median(alone), 3),
            "contract_us_per_replay": round(statistics.median(a - b for a, b in zip(under, bare)), 3),
            "replays_checked": len(spent["F"]) + len(spent["B"])}


def _lists() -> tuple[list[float], list[float], list[float]]:
    return [], [], []


def _percentile(values: Sequence[int], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _per_replay(spent: dict[str, list[int]], percent: int) -> float:
    begin, forward, backward = (_percentile(spent[kind], percent) for kind in ("begin", "F", "B"))
    return round((forward + backward) / 2e3 + begin / (2 * MICROBATCHES) / 1e3, 3)


def plain_layer(hidden: int = 64) -> Any:
    """Torch's modules with as many parameters as Transformer Engine's layer has: six, so twelve sealed addresses."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm2 = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
            self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden, False), torch.nn.Linear(hidden, hidden, False)
            self.up, self.down = torch.nn.Linear(hidden, 4 * hidden, False), torch.nn.Linear(4 * hidden, hidden, False)

        def forward(self, x: Any, rotary: Any) -> Any:
            q, k, v = self.qkv(self.norm(x) + rotary).chunk(3, dim=-1)
            x = x + self.proj(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
            return x + self.down(torch.nn.functional.silu(self.up(self.norm2(x))))

    return Layer()


def run(rounds: int = ROUNDS, device: Optional[str] = None) -> dict[str, Any]:
    """Needs no Transformer Engine, and no GPU: there a replay is the work, done again into the same memory, which
    leaves nothing of the checks in the caches."""
    import torch
    from torch.utils._pytree import tree_flatten

    from ..torch.stage import capture_stream
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)  # the tensors are small
    module = plain_layer().to(on)
    stage = Stage(module, "layer", 0, 1, capture="graph" if on.type == "cuda" else "host")
    x, rotary = (torch.randn(1, 8, 64, device=on, requires_grad=taken) for taken in (True, False))
    leaves, stage.spec = tree_flatten(((x, rotary), {}))
    stage.prepare(leaves, [["F1", "B1", "F", "B"]], capture_stream(on))
    driven = Driven(contract_of(module, on), stage, leaves, torch.randn(1, 8, 64, device=on))
    return {"figure": "checks", "microbatches": MICROBATCHES, "sealed_addresses": len(stage.seals[1].places),
            **measure(driven, rounds), "device": on.type, "torch": torch.__version__}
