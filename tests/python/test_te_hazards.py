"""Hazards H1 to H18 of graphed training with Transformer Engine (docs/te.md): what its own graphs and globals do in
silence, and what happens under QEffect, every time."""
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")
te_world = pytest.importorskip("te_world", reason="Transformer Engine is not installed",
                               exc_type=(ImportError, OSError, RuntimeError))
pytestmark = [pytest.mark.te, pytest.mark.gpu]

import qeffect.torch as qt  # noqa: E402
from te_world import (HIDDEN, RECIPES, TOKENS, FP8GlobalStateManager, Under, adamw, data, loss_of,  # noqa: E402
                      modules, same, schedule_of, te)

RUNS = 100
POSTPONED = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
SLEEP = 200_000_000  # cycles, some 100 ms: how long the other stream is late


@pytest.fixture(autouse=True)
def clean_globals() -> Any:
    te_world.clean_globals()
    yield
    te_world.clean_globals()


def words(**more: Any) -> dict[str, Any]:
    return {"bias": False, "params_dtype": torch.bfloat16, **more}


def mlp(**more: Any) -> Any:
    torch.manual_seed(0)
    return with_main_grads(te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **words(**more)).cuda())


def linear(seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    return with_main_grads(te.Linear(HIDDEN, HIDDEN, **words(**more)).cuda())


def with_main_grads(module: Any) -> Any:
    if getattr(module, "fuse_wgrad_accumulation", False):
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            parameter.grad_added_to_main_grad = False
    return module


def x_of(seed: int, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, generator=generator).cuda().bfloat16().requires_grad_(grad)


def dy_of(seed: int) -> Any:
    return x_of(100 + seed, False)


def right(module: Any, seed: int) -> tuple[Any, Any]:
    """(output, gradient of the input) of microbatch `seed`, eagerly."""
    x = x_of(seed)
    y = module(x)
    y.backward(dy_of(seed))
    return y.detach(), x.grad


def wrong(found: Any, expected: Any, by: float = 0.1) -> bool:
    """They are apart by more than a part of what is expected, or what was found is no number."""
    return not float((found.float() - expected.float()).norm() / expected.float().norm()) < by


def graphed(module: Any, **options: Any) -> Any:
    return te.make_graphed_callables(module, (x_of(9),), **{"enabled": False, **options})


def ordered(module: Any, order: list[float], count: int, **options: Any) -> Any:
    return te.make_graphed_callables((module,), tuple((x_of(9 + i),) for i in range(count)), _order=order,
                                     _num_layers_per_chunk=[1], **{"enabled": False, **options})


# ---- H1 to H4: replays, outputs ----


def test_h1_native_replays_in_another_order_overwrite_activations() -> None:
    expected = [right(mlp(), seed)[1] for seed in (1, 2)]
    calls = ordered(mlp(), [1, -1, 1, -1], 2)
    xs = [x_of(1), x_of(2)]
    ys = [call(x) for call, x in zip(calls, xs)]
    for y, seed in zip(ys, (1, 2)):
        y.backward(dy_of(seed))
    assert any(wrong(x.grad, e) for x, e in zip(xs, expected))


def test_h2_native_second_forward_overwrites_what_the_first_backward_needs() -> None:
    call, x = graphed(mlp()), x_of(1)
    y = call(x)
    call(x_of(2))
    y.backward(dy_of(1))
    assert wrong(x.grad, right(mlp(), 1)[1])


def test_h3_native_backwards_in_another_order_overwrite_activations() -> None:
    expected = [right(mlp(), seed)[1] for seed in (1, 2)]
    calls = ordered(mlp(), [1, 1, -1, -1], 2)
    xs = [x_of(1), x_of(2)]
    ys = [call(x) for call, x in zip(calls, xs)]
    for i in (1, 0):
        ys[i].backward(dy_of(i + 1))
    assert any(wrong(x.grad, e) for x, e in zip(xs, expected))


def test_h1_to_h3_are_refused_every_time() -> None:
    module = mlp()
    calls = qt.make_graphed_callables((module,), tuple((x_of(9),) for _ in range(3)), _order=[1, 1, -1, 1, -1, -1],
                                      _num_layers_per_chunk=1, names=["layers.0"], quiet=True)
    for _ in range(RUNS):
        first, second = calls[0](x_of(1)), calls[1](x_of(2))
        with pytest.raises(qt.Trap) as caught:
            calls[2](x_of(3))
        assert (caught.value.rule, caught.value.module) == ("slot.live", "layers.0")
        with pytest.raises(qt.Trap) as caught:
            second.backward(dy_of(2))
        assert caught.value.rule == "grad.order"
        first.backward(dy_of(1))
        calls[0].abort()


def test_h4_native_output_changes_with_the_next_replay() -> None:
    call = graphed(mlp())
    kept = call(x_of(1)).detach()
    call(x_of(2))
    assert wrong(kept, right(mlp(), 1)[0])


def test_h4_a_kept_output_raises_every_time() -> None:
    (call,) = qt.make_graphed_callables((mlp(),), ((x_of(9),),), quiet=True)
    for _ in range(RUNS):
        y = call(x_of(1))
        kept = y.detach()
        y.backward(dy_of(1))
        call(x_of(2)).backward(dy_of(2))
        with pytest.raises(RuntimeError, match="slot.stale"):
            kept.sum()


# ---- H5 to H7: streams ----


def late(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)


def test_h5_native_event_that_covers_less_than_the_graph_lets_the_caller_read_early() -> None:
    call, side, event = graphed(mlp()), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    call(x_of(2), cuda_graph_stream=side)
    torch.cuda.synchronize()
    x = x_of(1)
    late(side)
    read = call(x, cuda_graph_stream=side, cuda_graph_event=event).detach().clone()
    torch.cuda.synchronize()
    assert wrong(read, right(mlp(), 1)[0])


def weight_gradient_of_a_late_backward() -> tuple[Any, Any]:
    """(what `backward_dw` computes while the input gradient is late on another stream, what is right)"""
    module, expected = mlp(**POSTPONED), mlp(**POSTPONED)
    call, side, event = graphed(module), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    call(x_of(2), cuda_graph_stream=side).backward(dy_of(2))
    call.backward_dw()
    torch.cuda.synchronize()
    module.fc1_weight.main_grad.zero_()
    dy, y = dy_of(1), call(x_of(1), cuda_graph_stream=side, cuda_graph_event=event)
    torch.cuda.synchronize()
    late(side)
    y.backward(dy)
    call.backward_dw()
    torch.cuda.synchronize()
    right(expected, 1)
    expected.backward_dw()
    return module.fc1_weight.main_grad, expected.fc1_weight.main_grad


def test_h6_native_weight_gradient_is_computed_before_its_input_gradient() -> None:
    """The first time, libraries may still load kernels in between, which waits for the device."""
    assert any([wrong(*weight_gradient_of_a_late_backward()) for _ in range(3)])


def test_h7_native_fold_runs_while_a_graph_on_another_stream_is_in_flight() -> None:
    recipe, module = RECIPES["delayed"], linear()
    call = graphed(module, enabled=True, recipe=recipe)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    small, large = x_of(1), x_of(2) * 16
    with te.autocast(enabled=True, recipe=recipe):
        call(small, cuda_graph_stream=side)
    state = module.fp8_meta["scaling_fwd"]
    before = float(state.scale[0])
    torch.cuda.synchronize()
    late(side)
    with te.autocast(enabled=True, recipe=recipe):
        call(large, cuda_graph_stream=side, cuda_graph_event=event)
    torch.cuda.synchronize()
    assert before != 1.0 and float(state.scale[0]) == before  # the amax came behind its fold
    assert float(state.amax_history[0, 0]) == float(large.abs().max())


def test_h5_to_h7_work_on_late_streams_has_the_bits_of_one_stream_every_time() -> None:
    found = []
    for streams in (1, 3):
        run = Under("zbh1", "delayed", True, folds="step")
        pool = [torch.cuda.Stream() for _ in range(streams)]
        (inputs, targets), pipeline = data(1)[0], run.pipeline
        torch.cuda.synchronize()
        for _ in range(RUNS):
            pipeline.begin()
            for i, action in enumerate(pipeline.actions):
                with torch.cuda.stream(pool[i % streams]):
                    if streams > 1 and i % 5 == 0:
                        torch.cuda._sleep(SLEEP // 1000)
                    pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
            pipeline.finish()
        torch.cuda.synchronize()
        found.append(run.state())
    assert same(*found)


# ---- H8, H17: folds ----


class Branch(torch.nn.Module):
    """Its first module takes no part in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.used = linear(0, fuse_wgrad_accumulation=True), linear(1, fuse_wgrad_accumulation=True)

    def forward(self, x: Any) -> Any:
        self.idle(x)
        return x + self.used(x)


def test_h8_native_fold_of_gradients_never_comes_where_the_first_module_has_no_backward() -> None:
    branch = Branch()
    for seed in range(3):
        with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
            y = branch(x_of(seed))
        y.backward(dy_of(seed))
    state = branch.used.fp8_meta["scaling_bwd"]
    assert float(state.scale[0]) == 1.0 and float(state.amax_history[0, 0]) > 0


@pytest.mark.parametrize("folds", ["step", "te"])
@pytest.mark.parametrize("capture", [False, True])
def test_h8_gradients_fold_whichever_module_comes_first(capture: bool, folds: str) -> None:
    import qeffect.te as qte
    made = modules(kind=Branch)
    inputs, targets = data(1)[0]
    pipeline = qte.Pipeline(made, schedule_of("1f1b"), loss_of, recipe=RECIPES["delayed"], folds=folds,
                            example=(inputs[0], targets[0]), optimizer=adamw(made), capture=capture, quiet=True,
                            allow_unused=True)
    pipeline.step(inputs, targets)
    for stage in made:
        state = stage.used.fp8_meta["scaling_bwd"]
        assert float(state.scale[0]) != 1.0 and float(state.amax_history[0, 0]) == 0


def test_h17_native_evaluation_leaves_its_amax_for_the_next_fold() -> None:
    found = []
    for evaluates in (False, True):
        te_world.clean_globals()
        module = linear()
        if evaluates:
            with torch.no_grad(), te.autocast(enabled=True, recipe=RECIPES["delayed"]):
                module(x_of(1) * 100)
        with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
            module(x_of(2))
        found.append(float(module.fp8_meta["scaling_fwd"].scale[0]))
    assert found[0] > 10 * found[1]


# ---- H9 to H12: weights and main_grad ----


def test_h9_native_flag_of_one_graph_decides_about_the_weights_of_another() -> None:
    recipe, a, b, expected = RECIPES["current"], linear(0), linear(1), linear(1)
    first = graphed(a, enabled=True, recipe=recipe, cache_quantized_params=True)
    second = graphed(b, enabled=True, recipe=recipe)
    with torch.no_grad():
        expected.weight.mul_(-1)
    with te.autocast(enabled=True, recipe=recipe):
        first(x_of(1), is_first_microbatch=True)
        second(x_of(1))
        with torch.no_grad():
            b.weight.mul_(-1)
    with te.autocast(enabled=True, recipe=recipe):
        first(x_of(1), is_first_microbatch=False)
        stale = second(x_of(1)).detach().clone()
    with te.autocast(enabled=True, recipe=recipe):
        assert wrong(stale, expected(x_of(1)).detach(), by=1.0)


def test_h10_native_backward_meets_other_weights_than_its_forward() -> None:
    module, x = linear(), x_of(1)
    call = graphed(module)
    y = call(x)
    with torch.no_grad():
        module.weight.mul_(-1)
    y.backward(dy_of(1))
    assert wrong(x.grad, right(linear(), 1)[1], by=1.0)


def test_h10_is_refused_every_time() -> None:
    module = linear()
    (call,) = qt.make_graphed_callables((module,), ((x_of(9),),), names=["layer"], quiet=True)
    for _ in range(RUNS):
        y = call(x_of(1))
        with torch.no_grad():
            module.weight.mul_(-1)
        with pytest.raises(qt.Trap, match="weight") as caught:
            y.backward(dy_of(1))
        assert (caught.value.rule, caught.value.module) == ("weight.version", "layer")
        call.abort()


def test_h11_native_graph_goes_on_with_the_memory_of_a_moved_parameter() -> None:
    module = linear()
    call = graphed(module)
    module.weight.data = -module.weight.data
    found = call(x_of(1)).detach()
    assert wrong(found, -right(linear(), 1)[0], by=1.0)  # of memory that holds the old weight, or is somebody else's


def test_h11_a_moved_parameter_history_or_gradient_is_refused_every_time() -> None:
    run = Under("1f1b", "delayed", True)
    batch = data(1)[0]
    block = run.made[1]
    state = block.b.fp8_meta["scaling_fwd"]
    for turn in range(RUNS):
        owner, key = ((vars(block.c.fc2_weight), "main_grad"), (vars(state), "amax_history"))[turn % 2]
        kept = owner[key]
        owner[key] = kept.clone()
        with pytest.raises(qt.Trap, match=key) as caught:
            run.pipeline.step(*batch)
        assert (caught.value.rule, caught.value.module) == ("graph.address", "stages.1")
        owner[key] = kept
    run.pipeline.step(*batch)


def test_h12_native_graph_adds_to_what_the_step_before_left() -> None:
    recipe = RECIPES["current"]
    module, eager = linear(fuse_wgrad_accumulation=True), linear(fuse_wgrad_accumulation=True)
    call = graphed(module, enabled=True, recipe=recipe, cache_quantized_params=True)
    module.weight.main_grad.zero_()
    for seed in (1, 2):  # two steps of one microbatch
        for f in (call, eager):
            with te.autocast(enabled=True, recipe=recipe):
                y = f(x_of(seed), is_first_microbatch=True)
            y.backward(dy_of(seed))
    assert wrong(module.weight.main_grad, eager.weight.main_grad, by=0.5)  # eager: the first one sets


def test_h18_native_flag_of_a_gradient_that_was_added_is_set_by_capture_alone() -> None:
    recipe, module = RECIPES["current"], linear(fuse_wgrad_accumulation=True)
    call = graphed(module, enabled=True, recipe=recipe)
    module.weight.main_grad.zero_()
    module.weight.grad_added_to_main_grad = False
    with te.autocast(enabled=True, recipe=recipe):
        y = call(x_of(1))
    y.backward(dy_of(1))
    assert float(module.weight.main_grad.abs().max()) > 0 and not module.weight.grad_added_to_main_grad


def capture_that_fails() -> None:
    half = x_of(9).detach()[:, :HIDDEN // 2].contiguous().requires_grad_(True)
    with pytest.raises(AssertionError, match="GEMM not possible"):
        te.make_graphed_callables(linear(), (half,), enabled=False)


def test_a_native_capture_that_fails_leaves_every_other_module_without_fp8() -> None:
    """It wraps `__call__` of the module's class and, where it raises, never gives it back; nor does a scale fold."""
    found = []
    for failed in (False, True):
        te_world.clean_globals()
        module = linear(1)
        if failed:
            capture_that_fails()
        with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
            y = module(x_of(1))
        y.backward(dy_of(1))
        found.append((module.fp8, "scaling_bwd" in module.fp8_meta))
    assert found == [(True, True), (False, False)]


def test_what_a_capture_that_failed_left_is_refused_every_time() -> None:
    run, batch = Under("1f1b", "delayed", False), data(1)[0]
    for _ in range(RUNS):
        run.pipeline.step(*batch)
        capture_that_fails()
        with pytest.raises(qt.Trap, match="Linear") as caught:
            run.pipeline.step(*batch)
        assert (caught.value.rule, caught.value.module) == ("cache.stale", "stages.0")
        te_world.clean_globals()


# ---- H13 to H15: postponed weight gradients ----


def test_h13_native_input_is_reused_before_its_weight_gradient() -> None:
    module, expected = linear(**POSTPONED), linear(**POSTPONED)
    calls = ordered(module, [1, -1, 1, -1.5, -1, -1.5], 2, _reuse_graph_input_output_buffers=True)
    module.weight.main_grad.zero_()
    calls[0](x_of(1)).backward(dy_of(1))
    calls[1](x_of(2))
    calls[0].backward_dw()
    right(expected, 1)
    expected.backward_dw()
    assert wrong(module.weight.main_grad, expected.weight.main_grad, by=0.5)


def test_h14_native_weight_gradients_behind_all_input_gradients_read_what_was_overwritten() -> None:
    recipe = RECIPES["current"]
    made, expected = [mlp(**POSTPONED) for _ in range(2)], [mlp(**POSTPONED) for _ in range(2)]
    calls = te.make_graphed_callables(tuple(made), tuple((x_of(9),) for _ in made), enabled=True, recipe=recipe)
    for p in (p for m in made for p in m.parameters()):
        p.main_grad.zero_()
    for own in (calls, expected):
        with te.autocast(enabled=True, recipe=recipe):
            y = own[1](own[0](x_of(1)))
        y.backward(dy_of(1))
        for one in reversed(own):
            one.backward_dw()
    assert any(wrong(p.main_grad, q.main_grad) for m, e in zip(made, expected)
               for p, q in zip(m.parameters(), e.parameters()) if p.dim() > 1)


def test_h15_native_second_postponed_weight_gradient_is_wrong_or_crashes() -> None:
    module, expected = linear(**POSTPONED), linear(**POSTPONED)
    try:
        calls = ordered(module, [1, 1, -1, -1, -1.5, -1.5], 2)
    except RuntimeError:
        return
    module.weight.main_grad.zero_()
    for i in (0, 1):
        calls[i](x_of(i)).backward(dy_of(i))
        right(expected, i)
    for i in (0, 1):
        calls[i].backward_dw()
        expected.backward_dw()
    assert wrong(module.weight.main_grad, expected.weight.main_grad)


def test_h13_to_h15_each_microbatch_has_its_own_every_time() -> None:
    """Input gradients in the opposite order of the forwards, every weight gradient behind them all."""
    found = []
    for order in ("gpipe", "reversed"):
        run = Under(order, "delayed", True, folds="step")
        batches = data(4)
        for step in range(RUNS):
            run.pipeline.step(*batches[step % 4])
        found.append(run.state())
    assert same(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_h16_native_recompute_takes_the_scales_of_the_first_in_the_queue(reentrant: bool) -> None:
    """The second microbatch, 64 times as large, goes back first and recomputes with the first one's scales."""
    found = []
    for recomputes in (False, True):
        te_world.clean_globals()
        block = torch.nn.Sequential(linear(0), linear(1))
        for seed, amplitude in ((1, 1.0), (2, 64.0)):
            x = (x_of(seed).detach() * amplitude).requires_grad_(True)
            with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
                y = te.checkpoint(block, x, use_reentrant=reentrant) if recomputes else block(x)
        y.backward(dy_of(2))
        found.append(block[0].weight.grad)
    assert wrong(found[1], found[0], by=1.0)


# ---- what lies about between steps, every time ----


def leave_about(run: Any, inputs: Any, step: int) -> None:
    """main_grad as no step leaves it (H12), flags (H18), amaxes and a cache of an evaluation (H17)."""
    for parameter in (p for m in run.made for p in m.parameters()):
        parameter.main_grad.fill_(float("nan") if step % 2 else 7.0)
        parameter.grad_added_to_main_grad = bool(step % 3)
    with torch.no_grad(), te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        run.made[0](inputs[0] * 100, bool(step % 2))
    run.pipeline.evaluate(inputs[:1], inputs[:1])


@pytest.mark.parametrize("order", ["1f1b", "zbh1"])
def test_h8_h9_h12_h17_h18_what_lies_about_between_steps_changes_nothing_every_time(order: str) -> None:
    """And weights that are written by hand between steps (H9) are quantized anew, in graphs as by the eager modules."""
    found, batches = [], data(4)
    for capture, spoiled in ((False, False), (True, False), (True, True)):
        te_world.clean_globals()
        run = Under(order, "delayed", capture, folds="step")
        for step in range(RUNS):
            if spoiled:
                leave_about(run, batches[step % 4][0], step)
            with torch.no_grad():
                torch._foreach_mul_([p for m in run.made for p in m.parameters()], -1.0)
            run.pipeline.step(*batches[step % 4])
        found.append(run.state())
    assert same(found[0], found[1]) and same(found[0], found[2])


class Recomputed(te_world.Block):
    def forward(self, x: Any, first: Any = None) -> Any:
        return te.checkpoint(super().forward, x, use_reentrant=False)


def test_h16_each_microbatch_recomputes_with_its_own_scales_every_time() -> None:
    """Input gradients in the opposite order of the forwards."""
    found, batches = [], data(4, zero=False)
    for kind, capture in ((te_world.Block, False), (Recomputed, False), (Recomputed, True)):
        te_world.clean_globals()
        run = Under("reversed", "delayed", capture, folds="step", made=modules(kind=kind))
        for step in range(RUNS):
            run.pipeline.step(*batches[step % 4])
        found.append(run.state())
    assert same(found[0], found[1]) and same(found[0], found[2])


# ---- the workspace, and no false alarm ----


def test_two_pipelines_on_two_streams_share_the_workspace_in_order() -> None:
    """Transformer Engine has one GEMM workspace per device, whatever stream a product runs on."""
    batches = data(4)
    alone = Under("zbh1", "delayed", True, folds="step")
    for batch in batches:
        alone.pipeline.step(*batch)
    runs = [Under("zbh1", "delayed", True, folds="step") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in runs]
    torch.cuda.synchronize()
    for batch in batches:
        for run in runs:
            run.pipeline.begin()
        for action in runs[0].pipeline.actions:
            for run, stream in zip(runs, streams):
                with torch.cuda.stream(stream):
                    run.pipeline.run(action, batch[0][action.microbatch], batch[1][action.microbatch])
        for run in runs:
            run.pipeline.finish()
    torch.cuda.synchronize()
    assert all(same(run.state(), alone.state()) for run in runs)


def test_a_thousand_clean_steps_never_trap() -> None:
    run, batches = Under("zbh1", "delayed", True, folds="step"), data(4)
    for step in range(1000):
        run.pipeline.step(*batches[step % 4])
    assert int(run.pipeline.guard.commits) == 1000


def test_the_flag_is_read_anew_before_each_forward() -> None:
    """A caching capture elsewhere between two steps is refused at the next eager forward."""
    run, batch = Under("1f1b", "delayed", False), data(1)[0]
    for _ in range(RUNS):
        run.pipeline.step(*batch)
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
        with pytest.raises(qt.Trap) as caught:
            run.pipeline.step(*batch)
        assert caught.value.rule == "cache.stale"
        FP8GlobalStateManager.reset()
