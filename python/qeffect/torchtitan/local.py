"""The stages of one rank under contract: what comes from other ranks and goes to them passes through the caller."""
from __future__ import annotations

import sys
from typing import Any, Callable, Sequence

from ..errors import ArgumentError
from ..schedule import Action, Schedule
from ..torch import Pipeline
from ..torch._need import torch
from ..torch.pipeline import the_output
from ..torch.stage import Slot, Stage, capture_stream


class LocalPart(Pipeline):
    """A pipeline some of whose neighbours are stages of other ranks. `example`: the arguments of each stage. `numbers`:
    the stages' numbers in the whole pipeline. `names`: of tensors that every stage takes beside its input, by name.
    Everything else: see qeffect.torch.Pipeline."""

    def __init__(self, modules: Sequence["torch.nn.Module"], schedule: Schedule, loss: Any, *, numbers: Sequence[int],
                 names: Sequence[str] = (), **options: Any) -> None:
        self.numbers, self.named = list(numbers), list(names)
        self._results: dict[tuple[int, str], Any] = {}
        self._plain: Callable[..., Any] = modules[-1].forward
        super().__init__(modules, schedule, loss, names=[f"stages.{number}" for number in numbers], **options)
        self._seed.fill_(1.0)  # torch's schedules take the loss as it is; a mean over microbatches is the caller's

    # ---- seams of Pipeline ----

    def _prepare(self, quiet: bool) -> None:
        for stage in self.stages:
            stage.function = self._with_names(stage)
        side = capture_stream(self.device)
        examples: Any = self._example
        for stage, arguments in zip(self.stages, examples):
            stage.prepare(arguments, self._uses(stage), side)
        if not quiet and any(self._kinds):
            print(f"qeffect: captured stages {self.numbers} with {[len(s.slots) for s in self.stages]} slots for "
                  f"{self.microbatches} microbatches in {self.capture_seconds:.2f} s", file=sys.stderr)

    def _with_names(self, stage: Stage) -> Callable[..., Any]:
        """The stage's function of its input, the tensors by name, and for a last stage the target."""
        inner, names, loss = stage.module.forward, self.named, self.loss
        if not names:
            return stage.function
        if stage is not self.last or loss is None:
            return lambda x, *more: inner(x, **dict(zip(names, more)))
        return lambda x, *more: loss(inner(x, **dict(zip(names, more))), more[-1])

    def _forward(self, stage: Stage, slot: Slot, action: Action, x: Any, target: Any) -> None:
        last = stage is self.last
        arguments = [*x, target] if last else list(x)
        stage.check_arguments(arguments)
        outputs = stage.forward(slot, arguments, action.microbatch, slot.generation + 1,
                                life=self.contract.life(action.stage, action.microbatch), hand_out=False)
        output = the_output(stage, outputs, last)
        if last:
            self._losses[action.microbatch].copy_(output)
        self._results[action.stage, "F"] = output.detach()

    def _input_grad(self, stage: Stage, slot: Slot, action: Action, x: Any, target: Any) -> None:
        self._hand_down(stage, action.microbatch, stage.input_grad(slot, self._outer(stage, x)))

    def _backward(self, stage: Stage, slot: Slot, action: Action, x: Any, target: Any) -> None:
        self._hand_down(stage, action.microbatch, stage.backward(slot, self._outer(stage, x))[0])

    def _outer(self, stage: Stage, gradient: Any) -> list[Any]:
        """Gradients of the stage's outputs."""
        return [self._seed] if stage is self.last else [gradient]

    def _hand_down(self, stage: Stage, microbatch: int, gradients: Sequence[Any]) -> None:
        """The gradient of the stage's input: into the slot of the stage before, where that is of this rank, for this
        slot may be used again before that stage is; a copy for another rank, since a send may take longer."""
        gradient = gradients[0] if gradients else None
        number = self.numbers[stage.index]
        if gradient is not None and number - 1 in self.numbers:
            before = self.stages[self.numbers.index(number - 1)]
            slot = before.slots[self.contract.places[before.index, microbatch].slot]
            before.receive(slot, [gradient])
            gradient = slot.gradients[0]
        elif gradient is not None and stage.capture:
            gradient = gradient.clone()
        self._results[stage.index, "I"] = gradient

    # ---- what a rank does ----

    def forward_action(self, index: int, microbatch: int, arguments: Any, target: Any) -> Any:
        """F of the index-th stage on its input and the tensors by name. Returns its output (of the last stage the
        loss): memory of the slot."""
        self.run(Action(index, "F", microbatch), arguments, target)
        return self._results.pop((index, "F"))

    def backward_action(self, index: int, kind: str, microbatch: int, gradient: Any) -> Any:
        """I or B. Returns the gradient of the input; None for a first stage."""
        self.run(Action(index, kind, microbatch), gradient, gradient)
        return self._results.pop((index, "I"))

    def weight_action(self, index: int, microbatch: int) -> None:
        """W."""
        nothing: Any = None
        self.run(Action(index, "W", microbatch), nothing, nothing)

    @property
    def gradients(self) -> list["torch.Tensor"]:
        """`main_grad` of every parameter."""
        return self._gradients

    @property
    def losses(self) -> "torch.Tensor":
        """float32 [microbatches], of the last step; zeros where the last stage is another rank's."""
        return self._losses

    def loss_of(self, microbatch: int) -> "torch.Tensor":
        """float32 [], a tensor of its own."""
        return self._losses[microbatch].clone()

    def output_of(self, index: int, arguments: Any) -> Any:
        """What the stage's module gives, eagerly, without a slot and without the loss."""
        stage = self.stages[index]
        kept = stage.function
        if stage is self.last:
            stage.function = lambda x, *more: self._plain(x, **dict(zip(self.named, more)))
        try:
            with torch.no_grad():
                return stage.evaluate(arguments)
        finally:
            stage.function = kept

    def keep_scales(self) -> Callable[[], None]:
        """What an evaluation must leave as it was. Returns what puts it back."""
        return lambda: None


def make_part(modules: Sequence["torch.nn.Module"], schedule: Schedule, loss: Any, *, recipe: Any,
              **options: Any) -> LocalPart:
    """A LocalPart for the modules. `recipe`: of Transformer Engine's; None where no module is of Transformer Engine."""
    if recipe is None and not any(_is_te(m) for module in modules for m in module.modules()):
        own = {name: value for name, value in options.items() if name not in ("folds", "cache_weights")}
        return LocalPart(modules, schedule, loss, **own)
    from .tepart import TEPart  # needs Transformer Engine
    return TEPart(modules, schedule, loss, recipe=recipe, **options)


def _is_te(module: Any) -> bool:
    return any(kind.__module__.startswith("transformer_engine.") for kind in type(module).__mro__)


def require_plain(module: "torch.nn.Module", name: str) -> None:
    """Raises: ArgumentError for a stage whose parameters or code somebody else moves."""
    kinds = [type(m).__name__ for m in module.modules()]
    if any("FSDP" in kind for kind in kinds) or hasattr(module, "_fsdp_state"):
        raise ArgumentError(f"{name} is sharded by FSDP: its parameters move at every use, which graph.address forbids",
                            remedy="run with data_parallel_shard_degree=1")
    if any(kind == "DistributedDataParallel" for kind in kinds):
        raise ArgumentError(f"{name} is wrapped by DistributedDataParallel, whose hooks take gradients away",
                            remedy="run with data_parallel_replicate_degree=1")
    if any(kind == "OptimizedModule" for kind in kinds):
        raise ArgumentError(f"{name} is compiled; torch.compile and explicit F, I and W exclude each other",
                            remedy="run without torch.compile")
