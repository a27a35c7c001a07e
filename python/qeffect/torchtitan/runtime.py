"""A pipeline schedule of torch.distributed.pipelining whose stages run captured under contract.

    schedule = under_contract(schedule, recipe=DelayedScaling(...))       # any schedule of torch's, with its stages
    schedule.guard(optimizer)
    schedule.step(tokens, target=labels, losses=losses, return_outputs=False)
    optimizer.step()

torch's own loop goes on driving it: it sends, receives and waits; what a stage computes is a slot's work here. Forward,
I, W and B of a stage are asked of the ledger, replayed in the slot of their microbatch, and answered as torch expects.
"""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Iterator, Optional, Sequence

from ..errors import ArgumentError, UnsupportedError
from ..schedule import Schedule
from ..torch._need import torch
from ..torch.optimizer import StepGuard, vetoed_step
from ..torch.trap import breach, submitted_at
from .local import LocalPart, make_part, require_plain
from .orders import local_part, order_of, to_torch

from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


@dataclass(frozen=True)
class Settings:
    """recipe, folds, cache_weights: of qeffect.te.Pipeline; None: no module of Transformer Engine. capture, placement,
    allow_unused, quiet: of qeffect.torch.Pipeline. rounds: calls of `step` for one step of the optimizer."""

    recipe: Any = None
    folds: str = "step"
    cache_weights: bool = True
    capture: Any = None
    placement: str = "direct"
    allow_unused: bool = False
    rounds: int = 1
    quiet: bool = False

    def options(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "folds": self.folds, "cache_weights": self.cache_weights,
                "capture": self.capture, "placement": self.placement, "allow_unused": self.allow_unused,
                "quiet": self.quiet}


class ContractSchedule(_PipelineScheduleRuntime):  # type: ignore[misc]
    """Runs `order` on stages of torch's. `stages`: those of this rank; the row of this rank in `order` is what they do.
    Capture happens in the first step, when shapes and weights are there.

    `step` takes one tensor (other ranks than the first: none), tensors by name, a target, and `return_outputs=False`,
    for outputs are slots' memory. Raises: Trap; ArgumentError; then the step is given up and the next one begins anew.
    """

    pipeline_order_with_comms: dict[int, Any]  # torch's; said here for where torch is not

    def __init__(self, stages: Sequence[Any], order: Schedule, loss_fn: Any, settings: Settings = Settings(), *,
                 scale_grads: bool = False) -> None:
        order.check()
        for stage in stages:
            require_plain(stage.submod, f"stage {stage.stage_index}")
        super().__init__(list(stages), n_microbatches=order.microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self.order, self.settings = order, settings
        self._prepare_schedule_with_comms(to_torch(order))
        self.numbers = sorted(stage.stage_index for stage in stages)
        self._row = local_part(order, self.numbers, settings.rounds)
        self.part: Optional[LocalPart] = None
        self.commits = torch.zeros(1, dtype=torch.int64, device=stages[0].device)  # steps that became visible
        self._vetoed = torch.zeros(1, device=stages[0].device)
        self._round, self._gathered = 0, False
        self._targets: Any = None
        self._named: list[dict[str, Any]] = []
        self._loss_words: dict[str, Any] = {}
        self._optimizers: list[Any] = []
        self._seats = [_Seat(self, stage, self.numbers.index(stage.stage_index)) for stage in stages]

    # ---- a step ----

    def step(self, *args: Any, return_outputs: bool = True, **kwargs: Any) -> Any:
        if return_outputs and self._has_backward:
            raise ArgumentError("outputs are memory of slots that are used again; call step(return_outputs=False)")
        return super().step(*args, return_outputs=return_outputs, **kwargs)

    def _step_microbatches(self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, losses: Any = None,
                           return_outputs: bool = True, loss_kwargs: Any = None) -> None:
        words = {"loss_kwargs": loss_kwargs} if loss_kwargs is not None else {}
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._targets, self._loss_words = target_mbs, loss_kwargs or {}
        self._named = [_tensors_by_name(each) for each in kwargs]
        part = self._ready(args, kwargs, words)
        with self._training(part) if self._has_backward else self._evaluation(part):
            super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **words)

    @contextmanager
    def _training(self, part: LocalPart) -> Iterator[None]:
        if self._gathered:
            raise breach("grad.twice", "gradients of the step before were not taken; step the optimizer first",
                         "pipeline", None, submitted_at())
        try:
            if self._round == 0:
                part.begin()
            yield
            self._end_round(part)
        except BaseException:
            self.abort()
            raise

    @contextmanager
    def _evaluation(self, part: LocalPart) -> Iterator[None]:
        """Forwards alone; torch's loop stumbles over backwards of neighbours on one rank that have nothing to hand."""
        whole, undo = self.pipeline_order_with_comms, part.keep_scales()
        self.pipeline_order_with_comms = {rank: _forwards(actions) for rank, actions in whole.items()}
        try:
            yield
        finally:
            self.pipeline_order_with_comms = whole
            undo()

    def _end_round(self, part: LocalPart) -> None:
        self._round += 1
        if self._round < self.settings.rounds:
            return
        if self.scale_grads:
            torch._foreach_div_(part.gradients, self._n_microbatches)
        part.gather()
        self._round, self._gathered = 0, True

    def abort(self) -> None:
        """Gives an open step up: weights, moments, scales and histories are as before it."""
        self._round, self._gathered = 0, False
        if self.pp_group_size == 1:  # else a message may still be under way, and torch refuses to go on
            for stage in self._stages:
                _forget_boundaries(stage)
        if self.part is not None:
            self.part.abort()

    def require_closed(self) -> None:
        """Raises: Trap where a step is open: its weights, moments and scales are not those of one step."""
        if self._gathered or (self.part is not None and self.part.contract.is_open):
            raise breach("weight.version", "a step is open; state is read and written between steps", "pipeline", None,
                         submitted_at())

    def microbatch(self, index: int) -> int:
        """The number, in the optimizer's step, of a microbatch of this call of `step`."""
        return index + self._round * self._n_microbatches

    def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *words: Any) -> None:
        if not stage.has_backward:
            super()._maybe_compute_loss(stage, output, target_mbs, mb_index, *words)
        elif stage.is_last and self.part is not None:
            self._internal_losses.append(self.part.loss_of(self.microbatch(mb_index)))

    # ---- before the first step ----

    def _ready(self, args: Any, kwargs: Any, words: dict[str, Any]) -> LocalPart:
        if self.part is None:
            for stage in self._stages:
                if hasattr(stage, "_get_init_p2p_neighbors_ops"):  # until torch 2.12
                    setattr(stage, "_get_init_p2p_neighbors_ops", partial(_neighbours, stage))
            more = () if len(signature(self._initialize_stages).parameters) == 2 else (  # since torch 2.12
                None if self._targets is None else self._targets[0], words.get("loss_kwargs"))
            self._initialize_stages(args[0], kwargs[0], *more)
            self.part = self._make_part(args)
        if any(list(each) != self.part.named for each in self._named):
            raise ArgumentError(f"stages took {self.part.named} by name in the first step; now come "
                                f"{list(self._named[0])}")
        return self.part

    def _make_part(self, args: Any) -> LocalPart:
        ordered = sorted(self._stages, key=lambda stage: int(stage.stage_index))
        examples = [[args[0][0]] if stage.is_first else [_like_input(stage)] for stage in ordered]
        for example in examples:
            example += self._named[0].values()
        has_last = ordered[-1].is_last
        if has_last:
            examples[-1].append(self._targets[0])
        return make_part([stage.submod for stage in ordered], self._row, self._loss_here if has_last else None,
                         numbers=self.numbers, names=list(self._named[0]), example=examples, **self.settings.options())

    def _loss_here(self, output: Any, target: Any) -> Any:
        loss: Any = self._loss_fn
        return loss(output, target, **self._loss_words)

    # ---- the optimizer ----

    def guard(self, optimizer: Any) -> None:
        """Steps of an optimizer (or of a container with `optimizers`) commit only where no gradient or loss of any rank
        is Inf or NaN, decided on the device; scales and histories go with them. Raises: UnsupportedError."""
        self._optimizers = list(getattr(optimizer, "optimizers", [optimizer]))
        for inner in self._optimizers:
            if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
                raise UnsupportedError(f"{type(inner).__name__} cannot be vetoed on the device here",
                                       remedy="use Adam or AdamW with fused=True", status="unsupported")
            StepGuard(inner, self.commits.device)
        optimizer.register_step_pre_hook(self._before_commit)
        optimizer.register_step_post_hook(self._after_commit)

    def veto(self) -> None:
        """The next step does not commit: a guard of the caller's fired on the device."""
        self._vetoed.fill_(1.0)

    def _before_commit(self, *_: Any) -> None:
        if self.part is None:
            return
        if not self._gathered:
            raise breach("weight.version" if self.part.contract.is_open else "grad.missing",
                         "the optimizer steps without the gradients of a whole step", "pipeline", None, submitted_at())
        self._found = self._vetoed.clone()
        with torch.no_grad():
            for tensors in _by_dtype([*self.part.gradients, self.part.losses]):
                _find_not_finite(tensors, self._found)
            if self.pp_group_size > 1:
                torch.distributed.all_reduce(self._found, torch.distributed.ReduceOp.MAX, group=self._stages[0].group)
        for inner in self._optimizers:
            vetoed_step(inner)  # asked anew: load_state_dict and add_param_group change what it is
        for inner in self._optimizers:
            inner.grad_scale, inner.found_inf = None, self._found.reshape(())

    def _after_commit(self, *_: Any) -> None:
        if self.part is None or not self._gathered:
            return
        for inner in self._optimizers:
            inner.found_inf = None
        self.part.commit(self._found.reshape(()))
        self.commits.add_((1 - self._found).to(torch.int64))
        self._vetoed.zero_()
        self._gathered = False

    def close(self) -> None:
        """Gives the stages and their modules back as they were."""
        for seat in self._seats:
            seat.leave()
        if self.part is not None:
            self.part.close()


class _Seat:
    """In place of what a stage of torch's computes. `index`: its place among the stages of this rank."""

    _TAKEN = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad")

    def __init__(self, schedule: ContractSchedule, stage: Any, index: int) -> None:
        self._schedule, self._stage, self._index = schedule, stage, index
        stage.forward_one_chunk, stage.backward_one_chunk = self.forward, self.backward
        stage.backward_weight_one_chunk, stage.perform_reduce_grad = self.weights, self.reduce

    def leave(self) -> None:
        for name in self._TAKEN:
            self._stage.__dict__.pop(name, None)

    def _part(self) -> LocalPart:
        assert self._schedule.part is not None
        return self._schedule.part

    def forward(self, chunk: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        stage, schedule = self._stage, self._schedule
        x = args[0] if stage.is_first else stage._retrieve_recv_activations(chunk)[0]
        arguments = [x, *schedule._named[chunk].values()]
        if not stage.has_backward:
            output = self._part().output_of(self._index, arguments)
            if stage.is_last and save_forward_output:
                stage.output_chunks.append(output)
        else:
            target = schedule._targets[chunk] if stage.is_last else None
            output = self._part().forward_action(self._index, schedule.microbatch(chunk), arguments, target)
        _put_outputs(stage, chunk, output)
        return output

    def backward(self, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        stage = self._stage
        _drop_outputs(stage, chunk)
        gradient = None if stage.is_last else stage._retrieve_recv_grads(chunk)[0]
        made = self._part().backward_action(self._index, "B" if full_backward else "I",
                                            self._schedule.microbatch(chunk), gradient)
        if not stage.is_first:
            stage.bwd_cache[chunk] = (made,)

    def weights(self, chunk: int, last_backward: bool = False) -> None:
        self._part().weight_action(self._index, self._schedule.microbatch(chunk))

    def reduce(self, grad_scale_factor: int) -> None:
        """Gradients are handed over when all stages have theirs."""


def stages_of(schedule: Any) -> list[Any]:
    """Those of a schedule of torch's."""
    return list(getattr(schedule, "_stages", [])) or [schedule._stage]


def under_contract(schedule: Any, settings: Settings = Settings(), *, order: Optional[Schedule] = None,
                   **options: Any) -> ContractSchedule:
    """A schedule of torch's, with its stages, microbatches and loss, under contract. `order`: another one than its own;
    `options`: of Settings. Raises: ArgumentError, ContractError, UnsupportedError."""
    if options:
        settings = Settings(**options)
    return ContractSchedule(stages_of(schedule), order or order_of(schedule), schedule._loss_fn, settings,
                            scale_grads=schedule.scale_grads)


def _neighbours(stage: Any) -> list[Any]:
    """First messages to stages of other ranks; a rank needs none to itself, and gloo cannot send them."""
    own = torch.distributed.get_rank()
    return [op for op in type(stage)._get_init_p2p_neighbors_ops(stage) if op.peer != own]


def _forget_boundaries(stage: Any) -> None:
    """Since torch 2.13 a boundary that was handed over and not taken stops the next step."""
    for table in (stage.args_recv_info, stage.grad_recv_info):
        for info in (info for infos in table.values() for info in infos if hasattr(info, "take_buffer")):
            info.buffer = None


def _forwards(actions: Sequence[Any]) -> list[Any]:
    """What of a rank's row an evaluation needs; the second half of an overlapped pair is a backward."""
    single = [part for action in actions for part in (action.sub_actions or (action,))]
    return [a for a in single if a.computation_type.value in ("F", "SEND_F", "RECV_F", "WAIT_SEND_F")]


def _tensors_by_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a stage takes beside its input; None is no argument. Raises: ArgumentError."""
    other = [name for name, value in kwargs.items() if value is not None and not isinstance(value, torch.Tensor)]
    if other:
        raise ArgumentError(f"{', '.join(sorted(other))}: a stage takes tensors; masks of flex attention are none",
                            remedy="use the attention of torch's scaled_dot_product_attention")
    return {name: kwargs[name] for name in sorted(kwargs) if kwargs[name] is not None}


def _like_input(stage: Any) -> Any:
    """A tensor as the stage will receive."""
    made = getattr(stage, "inputs_meta", None)
    if made is None:  # since torch 2.12
        made = stage._stage_meta.inputs
    if len(made) != 1:
        raise ArgumentError(f"stage {stage.stage_index} takes {len(made)} tensors; under contract it takes one")
    x = torch.zeros(tuple(made[0].shape), dtype=made[0].dtype, device=stage.device)
    return x.requires_grad_(x.is_floating_point())


def _put_outputs(stage: Any, chunk: int, output: Any) -> None:
    """Where torch's sends look for them. They have no autograd history: backward is the slot's."""
    if hasattr(stage, "_forward_chunk_states"):  # since torch 2.13
        stage._forward_chunk_states[chunk] = stage._make_forward_chunk_state((output,), [])
    else:
        stage.fwd_cache[chunk] = ((output,), [])


def _drop_outputs(stage: Any, chunk: int) -> None:
    (stage._forward_chunk_states if hasattr(stage, "_forward_chunk_states") else stage.fwd_cache).pop(chunk, None)


def _find_not_finite(tensors: list[Any], found: "torch.Tensor") -> None:
    """Sets `found` (float32 [1]) to 1 where an element is Inf or NaN."""
    if tensors[0].dtype == torch.float32:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.ones_like(found))
        return
    largest = torch.stack(torch._foreach_norm(tensors, float("inf")))
    found.copy_(torch.maximum(found, (~largest.isfinite()).any().to(found.dtype)))


def _by_dtype(tensors: Sequence[Any]) -> list[list[Any]]:
    found: dict[Any, list[Any]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())
