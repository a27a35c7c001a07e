"""A pipeline of stages on one device, driven by a schedule: captured or eager, with the same bits, and a step that
becomes visible whole or not at all."""
from __future__ import annotations

import sys
from typing import Any, Callable, Optional, Sequence, Union

from ..errors import ArgumentError, ContractError, Error
from ..schedule import Action, Schedule, schedule_of
from ._need import torch
from .admit import admit, told
from .contract import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Contract
from .optimizer import StepGuard, tell_commits
from .stage import Slot, Stage, capture_stream, device_of, must_deposit, must_not_share
from .streams import Streams, streams_of
from .trap import Trap, breach, submitted_at

Capture = Union[None, bool, str]
Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class Pipeline:
    """Modules as pipeline stages.

        pipeline = Pipeline([first, second], Schedule.generate("zbh1", ranks=2, microbatches=8), loss_fn,
                            example=(x, target), optimizer=AdamW(parameters, fused=True))
        losses = pipeline.step(inputs, targets)

    modules: stage s is modules[s]; each takes one tensor and returns one. schedule: of as many stages; one of several
    ranks is flattened onto this device (`Schedule.flattened`), with the lifetimes of its ranks. loss(output, target) is
    a scalar, averaged over microbatches; None: the last stage is another rank's. example: (input, target) of one
    microbatch: shapes and dtypes that are captured. optimizer: stepped by `step` under a StepGuard; None: gradients are
    left in `.grad`. names: full names of the modules. capture: None: what the device can (graphs on CUDA, none on a
    CPU); True, False, "graph" or "host", or one per module. placement: "direct" accumulates gradients where they live
    (`parameter.main_grad`, fp32 unless it is there already), "copy" in scratch, moved there and back. allow_unused:
    parameters without a gradient are no breach.

    Raises: ArgumentError; ContractError where the schedule is not valid.
    """

    def __init__(self, modules: Sequence["torch.nn.Module"], schedule: Schedule, loss: Optional[Loss], *,
                 example: tuple["torch.Tensor", "torch.Tensor"],
                 optimizer: Optional["torch.optim.Optimizer"] = None, names: Optional[Sequence[str]] = None,
                 capture: Union[Capture, Sequence[Capture]] = None, placement: str = "direct",
                 allow_unused: bool = False, streams: Optional[Streams] = None, quiet: bool = False) -> None:
        if len(modules) != schedule_of(schedule).stages:
            raise ArgumentError(f"{len(modules)} modules for a schedule of {schedule.stages} stages")
        if names is not None and len(names) != len(modules):
            raise ArgumentError(f"{len(names)} names for {len(modules)} modules")
        self.schedule = schedule if schedule.ranks == 1 else schedule.flattened()
        self.actions = self.schedule.row(0)
        self.microbatches = schedule.microbatches
        self.loss, self._example, self._allow_unused = loss, example, allow_unused
        self.device = _one_device(modules, names)
        labels = [names[i] if names is not None else f"stages.{i}" for i in range(len(modules))]
        must_not_share(modules, labels)
        parameters = [[f"{labels[i]}.{n}" for n, p in m.named_parameters() if p.requires_grad]
                      for i, m in enumerate(modules)]
        self.contract = Contract(labels, parameters, self.actions, streams or streams_of(self.device))
        kinds = _kinds(capture, len(modules), self.device)
        self.stages = [self._make_stage(m, labels[i], i, capture=kinds[i], placement=placement,
                                        allow_unused=allow_unused) for i, m in enumerate(modules)]
        self.last: Optional[Stage] = None if loss is None else _with_loss(self.stages[-1], loss)
        self._kinds = kinds
        must_deposit(self.stages, opened=self.stages)
        tell_commits(self.stages)
        self.guard = None if optimizer is None else StepGuard(optimizer, self.device)
        self._boundary: dict[tuple[int, int], Any] = {}  # outputs on their way, by stage and microbatch
        self._finishing = False
        self._hook = None if optimizer is None else optimizer.register_step_pre_hook(self._before_optimizer)
        self._seed = torch.full((), 1.0 / self.microbatches, device=self.device)
        self._losses = torch.zeros(self.microbatches, device=self.device)
        self._handlers = {FORWARD: self._forward, INPUT_GRAD: self._input_grad, WEIGHT_GRAD: self._weight_grad,
                          BACKWARD: self._backward}
        try:
            self._prepare(quiet)
        except BaseException:
            self.close()
            raise
        if self.last is not None and self.last.slots[0].fixed and self.last.slots[0].fixed[0] is not None:
            self._seed = self._seed.to(self.last.slots[0].fixed[0].dtype)  # of a loss in bf16, say

    def _make_stage(self, module: "torch.nn.Module", name: str, index: int, **options: Any) -> Stage:
        return Stage(module, name, index, self.contract.slot_counts[index], **options)

    @property
    def _gradients(self) -> list["torch.Tensor"]:
        """`main_grad` of every parameter, as it is now: an eager stage takes one that was exchanged."""
        return [g for stage in self.stages for g in stage.main_grads()]

    # ---- capture ----

    def _prepare(self, quiet: bool) -> None:
        x, target = self._example
        side = capture_stream(self.device)
        for stage in self.stages:
            leaf = x.detach().requires_grad_(stage.index > 0 and x.is_floating_point())
            arguments = [leaf, target] if stage is self.last else [leaf]
            stage.prepare(arguments, self._uses(stage), side)
            x = the_output(stage, stage.sample(arguments, side), stage is self.last)
        if not quiet and any(self._kinds):
            print(f"qeffect: captured {sum(map(bool, self._kinds))} of {len(self.stages)} stages, "
                  f"{sum(len(s.slots) for s in self.stages if s.capture)} slots for {self.microbatches} microbatches "
                  f"in {self.capture_seconds:.2f} s", file=sys.stderr)

    @property
    def capture_seconds(self) -> float:
        """Wall time of capture, warm-up included."""
        return sum(stage.capture_seconds for stage in self.stages)

    def _uses(self, stage: Stage) -> list[list[str]]:
        """The actions that each slot of a stage is used for."""
        found: list[set[str]] = [set() for _ in stage.slots]
        for action in self.actions:
            if action.stage == stage.index:
                place = self.contract.places[stage.index, action.microbatch]
                found[place.slot].add(action.kind + self.contract.life(*_key(action)))
        return [sorted(kinds) for kinds in found]

    def set_capture(self, on: bool) -> None:
        """Replays from the next step on, or runs eagerly: the bits are the same. Between steps only."""
        if self.contract.is_open:
            raise ArgumentError("a step is open; capture is switched between steps")
        for stage, kind in zip(self.stages, self._kinds):
            stage.capture = kind if on else ""

    def _before_optimizer(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """A commit by hand while microbatches are in flight: their backwards would meet other weights than their
        forwards."""
        if self.contract.is_open and not self._finishing:
            raise breach("weight.version", "the optimizer steps while microbatches of a step are in flight; `finish` "
                         "steps it", "pipeline", None, submitted_at())

    def close(self) -> None:
        """Gives the modules and the optimizer back as they were."""
        if self._hook is not None:
            self._hook.remove()
        for stage in self.stages:
            stage.close()

    # ---- the step ----

    def step(self, inputs: Sequence["torch.Tensor"], targets: Sequence["torch.Tensor"]) -> "torch.Tensor":
        """One training step: every action of the schedule, then the optimizer. inputs, targets: one per microbatch.
        Returns the losses, float32 [microbatches], a tensor of its own.

        Raises: Trap; then nothing was committed: weights, moments and step counts are those of the step before.
        """
        if len(inputs) != self.microbatches or len(targets) != self.microbatches:
            raise ArgumentError(f"{len(inputs)} inputs and {len(targets)} targets for {self.microbatches} microbatches")
        submitted = submitted_at()
        self.begin()
        try:
            for action in self.actions:
                self.run(action, inputs[action.microbatch], targets[action.microbatch], submitted)
            return self.finish(submitted)
        except BaseException:
            self.abort()
            raise

    def begin(self) -> None:
        """A step by hand: begin, `run` each action, `finish` or `abort`."""
        self.contract.begin()
        try:
            for stage in self.stages:
                self._check_build(stage)
                stage.begin_step()
        except Error:
            self.abort()
            raise
        self._boundary = {}
        if self._allow_unused:
            torch._foreach_zero_(self._gradients)

    def _check_build(self, stage: Stage) -> None:
        """Raises: Trap (graph.constant, graph.mode) where a module is not what it was when it was captured."""
        change = stage.rebuilt()
        if change is None:
            return
        try:
            self.contract.refuse_launch(stage.index, 0, change[0], 1, 0)
        except ContractError as error:
            raise Trap(told(error, f" What changed: {change[1]}."), stage.name, None, submitted_at()) from None

    def run(self, action: Action, x: "torch.Tensor", target: "torch.Tensor", submitted: str = "") -> None:
        """Submits one action; only the first stage takes `x`, only the last one `target`. Any thread may call it, for
        different stages at once. Raises: Trap; nothing of the action was done."""
        if not 0 <= action.stage < len(self.stages):
            raise breach("schedule.missing", f"{action} is no action of the step's order", "pipeline",
                         action.microbatch, submitted or submitted_at())
        stage = self.stages[action.stage]
        try:
            slot = admit(self.contract, stage, action.kind, action.microbatch)
        except Trap:
            raise
        except ContractError as error:
            raise Trap(error, stage.name, action.microbatch, submitted or submitted_at()) from None
        if action.kind == FORWARD:
            slot.submitted = submitted  # of the step's line, where it is known: finding it takes microseconds
        self._handlers[action.kind](stage, slot, action, x, target)

    def _forward(self, stage: Stage, slot: Slot, action: Action, x: Any, target: Any) -> None:
        microbatch, last = action.microbatch, stage is self.last
        if stage.index > 0:
            x = self._own(stage, self.stages[stage.index - 1], self._boundary.pop((stage.index - 1, microbatch)))
            x.requires_grad_(x.is_floating_point())
        arguments = [x, target] if last else [x]
        stage.check_arguments(arguments)
        outputs = stage.forward(slot, arguments, microbatch, slot.generation + 1,
                                life=self.contract.life(*_key(action)), hand_out=False, submitted=slot.submitted)
        output = the_output(stage, outputs, last)
        if last:
            self._losses[microbatch].copy_(output)
        else:
            self._boundary[stage.index, microbatch] = output.detach()

    def _own(self, taker: Stage, giver: Stage, tensor: "torch.Tensor") -> "torch.Tensor":
        """What a stage that is not captured keeps must not be memory of another's slot, which may be used again before
        its weight gradient is computed. A captured one copies into memory of its own."""
        return tensor.clone() if giver.capture and not taker.capture else tensor

    def _gradients_of(self, stage: Stage, slot: Slot) -> list[Any]:
        if stage is self.last:
            return [self._seed]
        return list(slot.gradients)

    def _hand_down(self, stage: Stage, microbatch: int, gradients: Sequence[Any]) -> None:
        """The input's gradient goes into the slot of the stage before, which is live and its own."""
        if stage.index == 0 or not gradients or gradients[0] is None:
            return
        before = self.stages[stage.index - 1]
        slot = before.slots[self.contract.places[before.index, microbatch].slot]
        before.receive(slot, [self._own(before, stage, gradients[0])])

    def _input_grad(self, stage: Stage, slot: Slot, action: Action, x: Any, target: Any) -> None:
        self._hand_down(stage, action.microbatch, stage.input_grad(slot, self._gradients_of(stage, slot)))

    def _weight_grad(self, stage: Stage, slot: Slot, action: Action, x: Any, target: Any) -> None:
        stage.weight_grad(slot)

    def _backward(self, stage: Stage, slot: Slot, action: Action, x: Any, target: Any) -> None:
        gradients, _ = stage.backward(slot, self._gradients_of(stage, slot))
        self._hand_down(stage, action.microbatch, gradients)

    def finish(self, submitted: str = "") -> "torch.Tensor":
        """Every gradient to the optimizer, every weight to its next version. Raises: Trap (grad.missing, ...)."""
        self.gather(submitted)
        losses = self._losses.clone()
        self._finishing = True
        try:
            veto = None if self.guard is None else self.guard.step([*self._gradients, self._losses])
        finally:
            self._finishing = False
        self.commit(veto)
        return losses

    def gather(self, submitted: str = "") -> None:
        """Every gradient into `.grad`, for an optimizer that the caller steps; then `commit`. Raises: Trap."""
        try:
            self.contract.take()
        except ContractError as error:
            raise Trap(error, _named(error, self.stages), None, submitted or submitted_at()) from None
        self._bind_gradients()

    def commit(self, veto: Optional["torch.Tensor"]) -> None:
        """Every weight to its next version, and with it what else belongs to the step, unless `veto` (float32 [] on the
        device) is 1."""
        self._committed(veto)
        self.contract.commit()
        self.contract.end()

    def _committed(self, veto: Optional["torch.Tensor"]) -> None:
        """What else becomes visible with the weights, unless `veto` (float32 [] on the device) is 1."""

    def _bind_gradients(self) -> None:
        for stage in self.stages:
            for parameter, gradient in zip(stage.parameters, stage.main_grads()):
                same = parameter.dtype == gradient.dtype
                parameter.grad = gradient.detach() if same else gradient.to(parameter.dtype)

    def abort(self) -> None:
        """Gives an open step up. Weights and moments are as before it; gradients are without meaning."""
        self.contract.abort()
        self._boundary = {}
        for stage in self.stages:
            for slot in stage.slots:
                slot.forget()

    def evaluate(self, inputs: Sequence["torch.Tensor"], targets: Sequence["torch.Tensor"]) -> "torch.Tensor":
        """Losses without training, eagerly, in the mode that the modules are in. Between steps or within one."""
        found = []
        with torch.no_grad():
            for x, target in zip(inputs, targets):
                for stage in self.stages[:-1]:
                    x = stage.evaluate([x])
                found.append(self.stages[-1].evaluate([x, target]))
        return torch.stack(found)


def _one_device(modules: Sequence["torch.nn.Module"], names: Optional[Sequence[str]]) -> "torch.device":
    """Raises: ArgumentError where a parameter or a buffer is on another device than the first module."""
    device = device_of(modules[0])
    for i, module in enumerate(modules):
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device != device:
                raise ArgumentError(f"{names[i] if names is not None else f'stages.{i}'}.{path} is on {tensor.device}; "
                                    f"the pipeline is on {device}", remedy="move every module to one device")
    return device


def the_output(stage: Stage, outputs: Sequence["torch.Tensor"], is_loss: bool) -> "torch.Tensor":
    """Raises: ArgumentError where a stage returns other than one tensor, or the loss is no scalar."""
    if len(outputs) != 1:
        raise ArgumentError(f"module {stage.name} returns {len(outputs)} tensors; a stage returns one")
    if is_loss and outputs[0].dim() > 0:
        raise ArgumentError(f"the loss behind {stage.name} is of shape {tuple(outputs[0].shape)}; expected a scalar")
    return outputs[0]


def _with_loss(stage: Stage, loss: Loss) -> Stage:
    """The last stage ends in the loss."""
    inner = stage.function
    stage.function = lambda x, target: loss(inner(x), target)
    return stage


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def _kinds(capture: Union[Capture, Sequence[Capture]], count: int, device: "torch.device") -> list[str]:
    each = list(capture) if isinstance(capture, (list, tuple)) else [capture] * count
    if len(each) != count:
        raise ArgumentError(f"{len(each)} values of capture for {count} modules")
    return [_kind(one, device) for one in each]


def _kind(capture: Any, device: "torch.device") -> str:
    able = "graph" if device.type == "cuda" else "host"
    if capture is None:
        return "graph" if device.type == "cuda" else ""
    if isinstance(capture, bool):
        return able if capture else ""
    if capture not in ("", "graph", "host"):
        raise ArgumentError(f"capture is {capture!r}; expected True, False, 'graph' or 'host'")
    if capture == "graph" and device.type != "cuda":
        raise ArgumentError(f"graphs need a CUDA device; the modules are on {device}")
    return str(capture)


def _named(error: ContractError, stages: Sequence[Stage]) -> str:
    violation = error.violations[0] if error.violations else None
    return stages[violation.stage].name if violation is not None and violation.stage < len(stages) else "pipeline"

