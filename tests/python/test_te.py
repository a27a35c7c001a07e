"""Transformer Engine's modules under contract, on a GPU: the same bits eager and captured in every order, hidden state
that commits with the step, and the hazards of its own graphs."""
from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")
te_world = pytest.importorskip("te_world", reason="Transformer Engine is not installed",
                               exc_type=(ImportError, OSError, RuntimeError))
pytestmark = [pytest.mark.te, pytest.mark.gpu]

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from te_world import (HIDDEN, MICROBATCHES, ORDERS, RECIPES, STEPS, TOKENS, FP8GlobalStateManager, adamw,  # noqa: E402
                      data, loss_of, modules, same, schedule_of, te)


@pytest.fixture(autouse=True)
def clean_globals() -> Any:
    te_world.clean_globals()
    yield
    te_world.clean_globals()


def pipeline_of(made: Any, order: str, recipe: str, capture: bool, optimizer: Any = None,
                **options: Any) -> tuple[Any, Any]:
    import qeffect.te as qte
    optimizer = adamw(made) if optimizer is None else optimizer
    x, y = data(1)[0]
    pipeline = qte.Pipeline(made, schedule_of(order), loss_of, recipe=RECIPES[recipe], example=(x[0], y[0]),
                            optimizer=optimizer, capture=capture, quiet=True, **options)
    return pipeline, optimizer


def state(pipeline: Any, made: Any, optimizer: Any) -> list[Any]:
    return te_world.state(made, optimizer)


def trained(order: str, recipe: str, capture: bool, **options: Any) -> tuple[list[Any], list[Any]]:
    made = modules()
    pipeline, optimizer = pipeline_of(made, order, recipe, capture, **options)
    losses = [pipeline.step(*batch) for batch in data()]
    found = state(pipeline, made, optimizer)
    pipeline.close()
    return losses, found


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_eager_and_captured_have_the_same_bits_in_every_order(recipe: str) -> None:
    first_losses, first = trained("gpipe", recipe, False)
    assert all(bool(loss.isfinite().all()) for loss in first_losses)
    for order in ORDERS:
        for capture in (False, True):
            losses, found = trained(order, recipe, capture)
            assert same(losses, first_losses), (order, capture)
            assert same(found, first), (order, capture)


def test_scales_of_every_tensor_that_is_quantized_rise_and_fall() -> None:
    made = modules()
    pipeline, _ = pipeline_of(made, "1f1b", "delayed", True)
    seen = []
    for batch in data():
        pipeline.step(*batch)
        seen.append(torch.cat([v for n, v in sorted(pipeline.fp8_state().items()) if n.endswith("scaling_fwd.scale")]))
    moved = torch.stack(seen).diff(dim=0)
    rises, falls = (moved > 0).any(0), (moved < 0).any(0)
    assert int(rises.sum()) >= 8 and int(falls.sum()) >= 8


def test_a_step_that_is_not_finite_leaves_scales_and_histories_too() -> None:
    made = modules()
    pipeline, optimizer = pipeline_of(made, "zbh1", "delayed", True)
    batches = data(4, zero=False)
    pipeline.step(*batches[0])
    before = state(pipeline, made, optimizer)
    inputs, targets = [list(part) for part in batches[1]]
    targets[2] = targets[2] * float("nan")
    pipeline.step(inputs, targets)
    assert same(state(pipeline, made, optimizer), before)
    pipeline.step(*batches[1])
    after = state(pipeline, made, optimizer)
    assert not same(after, before)
    other = modules()
    clean, other_optimizer = pipeline_of(other, "zbh1", "delayed", True)
    clean.step(*batches[0])
    clean.step(*batches[1])
    assert same(state(clean, other, other_optimizer), after)


def test_an_evaluation_between_steps_leaves_no_amax() -> None:
    """H17."""
    found = []
    for evaluates in (False, True):
        made = modules()
        pipeline, optimizer = pipeline_of(made, "1f1b", "delayed", True)
        for inputs, targets in data(3, zero=False):
            if evaluates:
                pipeline.evaluate([x * 100 for x in inputs], targets)
            pipeline.step(inputs, targets)
        found.append(state(pipeline, made, optimizer))
    assert same(*found)


def test_a_setting_that_changed_is_told_and_what_calls_of_the_modules_leave_behind_is_none() -> None:
    """Its modules keep notes of every call in their attributes: whether it was in FP8, in which dtype."""
    made = modules()
    pipeline, _ = pipeline_of(made, "1f1b", "delayed", True)
    batches = data(4, zero=False)
    pipeline.step(*batches[0])
    with torch.no_grad():
        made[0](batches[0][0][0])
        with torch.autocast("cuda", dtype=torch.float16):
            made[1].c(batches[0][0][0])
    pipeline.step(*batches[1])
    for change, back, told in (("eps", 1e-5, "stages.1.a.eps is 0.125 and was 1e-05"),
                               ("zero_centered_gamma", False, "stages.1.a.zero_centered_gamma is 0.125 and was False")):
        setattr(made[1].a, change, 0.125)
        with pytest.raises(qt.Trap, match=told) as caught:
            pipeline.step(*batches[2])
        assert caught.value.rule == "graph.constant"
        setattr(made[1].a, change, back)
        pipeline.step(*batches[3])


def test_fp8_state_is_plain_tensors_that_another_pipeline_goes_on_with(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file
    batches = data(6, zero=False)
    made = modules()
    pipeline, optimizer = pipeline_of(made, "1f1b", "delayed", True)
    for batch in batches[:3]:
        pipeline.step(*batch)
    save_file(pipeline.fp8_state(), str(tmp_path / "fp8.safetensors"))
    moments = copy.deepcopy(optimizer.state_dict())
    other = modules(seed=7)
    with torch.no_grad():
        for p, q in zip((p for m in made for p in m.parameters()), (q for m in other for q in m.parameters())):
            q.copy_(p)
    resumed, other_optimizer = pipeline_of(other, "zbh1", "delayed", True)
    other_optimizer.load_state_dict(moments)
    resumed.load_fp8_state(load_file(str(tmp_path / "fp8.safetensors"), device="cuda"))
    for batch in batches[3:]:
        pipeline.step(*batch)
        resumed.step(*batch)
    assert same(state(pipeline, made, optimizer), state(resumed, other, other_optimizer))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_fp8_state_with_a_scale_that_is_none_is_refused(value: float) -> None:
    pipeline, _ = pipeline_of(modules(), "1f1b", "delayed", True)
    pipeline.step(*data(1, zero=False)[0])
    before = {name: tensor.clone() for name, tensor in pipeline.fp8_state().items()}
    spoilt = {name: tensor.clone() for name, tensor in before.items()}
    next(tensor for name, tensor in spoilt.items() if name.endswith(".scale")).flatten()[0] = value
    with pytest.raises(qeffect.ArgumentError, match="no scale"):
        pipeline.load_fp8_state(spoilt)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipeline.fp8_state().items())


def test_the_global_flag_of_other_graphs_is_refused() -> None:
    """H9, Transformer Engine #3298: a flag of graphs made elsewhere decides whether weights are quantized."""
    made = modules()
    pipeline, _ = pipeline_of(made, "1f1b", "delayed", False)
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
    with pytest.raises(qt.Trap) as caught:
        pipeline.step(*data(1)[0])
    assert caught.value.rule == "cache.stale" and caught.value.module == "stages.0"


def test_transformer_engine_uses_a_cached_weight_of_an_old_version_in_silence() -> None:
    """H9 in the native stack: nobody records which version a cached copy was made from."""
    layer = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16).cuda()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=RECIPES["current"]):
        layer(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.mul_(-1.0)
        stale = layer(x, is_first_microbatch=False)
        right = layer(x, is_first_microbatch=True)
    assert float((stale - right).detach().norm() / right.detach().norm()) > 1.0


def test_a_captured_transformer_layer_has_the_bits_of_the_eager_one() -> None:
    def layer() -> Any:
        return te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0, bias=False,
                                   fuse_qkv_params=True, normalization="RMSNorm", activation="swiglu",
                                   params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True,
                                   attn_input_format="bshd", self_attn_mask_type="causal", seq_length=TOKENS,
                                   micro_batch_size=1)

    batches = [([x.unsqueeze(0) for x in xs], [y.unsqueeze(0) for y in ys]) for xs, ys in data(3, zero=False)]
    found = []
    for capture in (False, True):
        import qeffect.te as qte
        made = modules(kind=layer)
        optimizer = adamw(made)
        pipeline = qte.Pipeline(made, schedule_of("1f1b"), loss_of,
                                recipe=RECIPES["delayed"], example=(batches[0][0][0], batches[0][1][0]),
                                optimizer=optimizer, capture=capture, quiet=True)
        for batch in batches:
            pipeline.step(*batch)
        found.append(state(pipeline, made, optimizer))
    assert same(*found)


def veto_leaves_everything(make_optimizer: Any, capture: bool, spoil: Any) -> None:
    made = modules()
    optimizer = make_optimizer([p for m in made for p in m.parameters()])
    pipeline, _ = pipeline_of(made, "zbh1", "delayed", capture, optimizer)
    batches = data(4, zero=False)
    pipeline.step(*batches[0])
    before = state(pipeline, made, optimizer)
    spoil(pipeline, batches[1])
    assert same(state(pipeline, made, optimizer), before)
    assert int(pipeline.guard.commits) == 1
    pipeline.step(*batches[1])
    after = state(pipeline, made, optimizer)
    assert not same(after, before) and int(pipeline.guard.commits) == 2
    other = modules()
    clean_optimizer = make_optimizer([p for m in other for p in m.parameters()])
    clean, _ = pipeline_of(other, "zbh1", "delayed", capture, clean_optimizer)
    clean.step(*batches[0])
    clean.step(*batches[1])
    assert same(state(clean, other, clean_optimizer), after)


def step_that_is_not_finite(pipeline: Any, batch: Any) -> None:
    inputs, targets = [list(part) for part in batch]
    targets[2] = targets[2] * float("nan")
    pipeline.step(inputs, targets)


def step_that_is_vetoed(pipeline: Any, batch: Any) -> None:
    pipeline.guard.veto()
    pipeline.step(*batch)


def step_that_is_aborted(pipeline: Any, batch: Any) -> None:
    pipeline.begin()
    for action in pipeline.actions[:9]:  # some input gradients are computed whose weight gradients are not
        pipeline.run(action, batch[0][action.microbatch] * 100, batch[1][action.microbatch])
    pipeline.abort()


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "FusedAdam": lambda parameters: te.optimizers.FusedAdam(parameters, lr=1e-3, capturable=True),
    "FusedAdam with masters": lambda parameters: te.optimizers.FusedAdam(parameters, lr=1e-3, capturable=True,
                                                                         master_weights=True)}


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("spoil", [step_that_is_not_finite, step_that_is_vetoed, step_that_is_aborted])
def test_a_step_that_does_not_commit_leaves_everything_as_it_was(spoil: Any, optimizer: str, capture: bool) -> None:
    veto_leaves_everything(OPTIMIZERS[optimizer], capture, spoil)


@pytest.mark.parametrize("folds", ["step", "te"])
def test_a_vetoed_step_is_undone_wherever_scales_fold(folds: str) -> None:
    made = modules()
    pipeline, optimizer = pipeline_of(made, "zbh1", "delayed", True, folds=folds)
    batches = data(3, zero=False)
    pipeline.step(*batches[0])
    before = state(pipeline, made, optimizer)
    for spoil in (step_that_is_not_finite, step_that_is_vetoed, step_that_is_aborted):
        spoil(pipeline, batches[1])
        assert same(state(pipeline, made, optimizer), before), spoil


def test_no_step_waits_for_the_device() -> None:
    made = modules()
    optimizer = OPTIMIZERS["FusedAdam"]([p for m in made for p in m.parameters()])
    pipeline, _ = pipeline_of(made, "zbh1", "delayed", True, optimizer)
    batch = data(1)[0]
    pipeline.step(*batch)
    torch.cuda.set_sync_debug_mode("error")  # torch raises where it would synchronise
    try:
        pipeline.guard.veto()
        pipeline.step(*batch)
        pipeline.step(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_transformer_engines_optimizer_that_counts_on_the_host_is_refused() -> None:
    made = modules(count=1)
    parameters = [p for m in made for p in m.parameters()]
    for options, reason in (({}, "capturable"), ({"capturable": True, "use_decoupled_grad": True}, "decoupled")):
        with pytest.raises(qeffect.UnsupportedError, match=reason):
            qt.StepGuard(te.optimizers.FusedAdam(parameters, **options))


def test_capture_is_switched_off_and_on_in_the_middle_of_a_run() -> None:
    _, expected = trained("zbh1", "delayed", True)
    made = modules()
    pipeline, optimizer = pipeline_of(made, "zbh1", "delayed", True)
    for step, batch in enumerate(data()):
        pipeline.set_capture(step % 2 == 0)
        pipeline.step(*batch)
    assert same(state(pipeline, made, optimizer), expected)


def test_a_call_of_the_modules_between_steps_leaves_no_amax_and_no_cache() -> None:
    """H17, without the pipeline knowing: a loop evaluates as it always did, whatever flag it passes."""
    found = []
    for evaluates in (False, True):
        made = modules()
        pipeline, optimizer = pipeline_of(made, "1f1b", "delayed", True)
        for inputs, targets in data(4, zero=False):
            if evaluates:
                with torch.no_grad(), te.autocast(enabled=True, recipe=RECIPES["delayed"]):
                    for first in (True, False, None):
                        made[0](inputs[0] * 100, first)
            pipeline.step(inputs, targets)
        found.append(state(pipeline, made, optimizer))
    assert same(*found)


def test_an_example_leaves_no_amax() -> None:
    found = []
    for factor in (1, 100):
        made = modules()
        import qeffect.te as qte
        inputs, targets = data(1)[0]
        optimizer = adamw(made)
        pipeline = qte.Pipeline(made, schedule_of("1f1b"), loss_of, recipe=RECIPES["delayed"], capture=factor > 1,
                                example=(inputs[0] * factor, targets[0]), optimizer=optimizer, quiet=True)
        pipeline.step(inputs, targets)
        found.append(state(pipeline, made, optimizer))
    assert same(*found)


class Recomputed(torch.nn.Module):
    """Transformer Engine's checkpoint around a block. Its queue of scales is one per module, first in, first out."""

    def __init__(self) -> None:
        super().__init__()
        self.block = te_world.Block()

    def forward(self, x: Any) -> Any:
        return te.checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize("order", ["1f1b", "zbh1", "reversed"])
def test_recomputation_has_the_bits_of_what_was_kept(order: str) -> None:
    """H16: also when input gradients do not come in the order of the forwards."""
    found = []
    for kind in (te_world.Block, Recomputed):
        for capture in (False, True):
            made = modules(kind=kind)
            pipeline, optimizer = pipeline_of(made, order, "delayed", capture)
            batches = data(4, zero=False)
            for step, batch in enumerate(batches):
                if step == 2:
                    step_that_is_aborted(pipeline, batch)
                pipeline.step(*batch)
            found.append(te_world.state(made, optimizer))
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_module_of_transformer_engine_may_be_a_stage_itself(kind: str) -> None:
    """Its flag for the weight cache is set all the same: else main_grad would keep what the step before left."""
    class Within(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made_of(kind)

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    def made_of(name: str) -> Any:
        sizes = (HIDDEN, 2 * HIDDEN) if name == "LayerNormMLP" else (HIDDEN, HIDDEN)
        return getattr(te, name)(*sizes, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)

    found = []
    for build in (Within, lambda: made_of(kind)):
        made = modules(kind=build)
        pipeline, optimizer = pipeline_of(made, "zbh1", "delayed", True)
        for batch in data(4, zero=False):
            pipeline.step(*batch)
        found.append([p.detach().clone() for m in made for p in m.parameters()])
    assert same(*found)


ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]  # of Transformer Engine's own tests: 2 chunks, 3 microbatches
SPLIT = [1, 2, 1, 2, -2, -1, -2, -1, -2.5, -1.5, -2.5, 1, 2, -1.5, -2, -1, -1.5, -2.5]


def driven(calls: Any, order: Any, inputs: Any, recipe: Any) -> list[Any]:
    """A step of callables [chunk][microbatch] in an order, each chunk on inputs of its own; gradients of the inputs."""
    counts: dict[float, int] = {}
    kept, found = {}, []
    for entry in order:
        chunk, m = int(abs(entry)) - 1, counts.get(entry, 0)
        counts[entry] = m + 1
        if entry > 0:
            x = inputs[chunk][m].detach().requires_grad_(True)
            with te.autocast(enabled=True, recipe=recipe):
                kept[chunk, m] = (x, calls[chunk][m](x, is_first_microbatch=m == 0))
        elif entry == int(entry):
            x, y = kept.pop((chunk, m))
            y.backward(torch.ones_like(y) * 0.01)
            found.append(x.grad.clone())
        else:
            calls[chunk][m].backward_dw()
    return found


class Eager:
    """A block as a callable of its own, with Transformer Engine's flags."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def __call__(self, x: Any, is_first_microbatch: bool) -> Any:
        return self.block(x, is_first_microbatch)

    def backward_dw(self) -> None:
        for m in (self.block.c, self.block.b, self.block.a):
            m.backward_dw()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("order", [ORDER, SPLIT])
def test_graphed_callables_have_the_bits_of_transformer_engines_eager_modules(order: Any, recipe: str) -> None:
    """An order, cached weights and FP8 at once, which its own tests leave out."""
    import qeffect.te as qte
    split = any(entry != int(entry) for entry in order)
    expected, found = modules(kind=lambda: te_world.Block(delay_wgrad_compute=split)), modules()
    for p in (p for m in expected for p in m.parameters()):
        if p.dim() > 1:
            p.grad_added_to_main_grad = False
        p.register_post_accumulate_grad_hook(te_world._adds_to_main_grad)
    flat = qte.make_graphed_callables(
        tuple(found), tuple((data(1)[0][0][0].requires_grad_(True),) for _ in range(6)), enabled=True,
        recipe=RECIPES[recipe], cache_quantized_params=True, _order=order, _num_layers_per_chunk=1, quiet=True)
    assert [len(flat[i].qeffect_stage.slots) for i in (0, 3)] == [2, 2]
    calls = [flat[:3], flat[3:]]
    eager = [[Eager(m)] * 3 for m in expected]
    for step, (inputs, targets) in enumerate(data(8, zero=False)):
        for p in (p for m in expected for p in m.parameters()):
            p.main_grad.zero_()
        assert same(driven(eager, order, (inputs, targets), RECIPES[recipe]),
                    driven(calls, order, (inputs, targets), RECIPES[recipe]))
        for a, b in zip(expected, found):
            assert same([p.main_grad for p in a.parameters()], [p.main_grad for p in b.parameters()]), step
        assert same(list(te_world.scales(expected).values()), list(te_world.scales(found).values())), step
        te_world.disturb(expected, step)
        te_world.disturb(found, step)
    with pytest.raises(qeffect.ArgumentError, match="is_first_microbatch"):
        calls[0][0](inputs[0])
    flat[0].reset()


def test_what_graphed_callables_cannot_do_is_refused() -> None:
    import qeffect.te as qte
    x = data(1)[0][0][0].requires_grad_(True)
    with pytest.raises(qeffect.UnsupportedError, match="calibration"):
        qte.make_graphed_callables(modules(count=1)[0], (x,), enabled=True, calibrating=True)
    made = modules(count=1)[0]
    made.a.layer_norm_weight.main_grad = None
    with pytest.raises(qeffect.ArgumentError, match="main_grad"):
        qte.make_graphed_callables(made, (x,), enabled=True, recipe=RECIPES["current"])
