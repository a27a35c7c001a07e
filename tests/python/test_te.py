"""Transformer Engine's modules under contract, on a GPU: the same bits eager and captured in every order, hidden state
that commits with the step, and the hazards of its own graphs."""
from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")
te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed",
                         exc_type=(ImportError, OSError, RuntimeError))
pytestmark = [pytest.mark.te, pytest.mark.gpu]

from transformer_engine.common.recipe import (DelayedScaling, Float8BlockScaling, Float8CurrentScaling,  # noqa: E402
                                              Format)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402

import qeffect.torch as qt  # noqa: E402
from qeffect import Schedule  # noqa: E402

HIDDEN, TOKENS, MICROBATCHES, STEPS = 256, 128, 4, 12
RECIPES = {"delayed": DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4), "current": Float8CurrentScaling(),
           "block": Float8BlockScaling()}
ORDERS = [("1f1b", 2, 1), ("interleaved", 1, 2), ("zbh1", 2, 1), ("zbv", 1, 2)]


@pytest.fixture(autouse=True)
def clean_globals() -> Any:
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


class Block(torch.nn.Module):
    """LayerNormLinear, Linear, LayerNormMLP: everything but attention."""

    def __init__(self) -> None:
        super().__init__()
        words = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
        self.a = te.LayerNormLinear(HIDDEN, HIDDEN, **words)
        self.b = te.Linear(HIDDEN, HIDDEN, **words)
        self.c = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **words)

    def forward(self, x: Any) -> Any:
        return x + self.c(self.b(self.a(x)))


def modules(seed: int = 0, kind: Any = Block) -> list[Any]:
    torch.manual_seed(seed)
    made = [kind().cuda() for _ in range(2)]
    for parameter in (p for m in made for p in m.parameters()):
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    return made


def data(steps: int = STEPS, zero: bool = True) -> list[Any]:
    """Amaxes rise and fall from step to step; one microbatch is all zero."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(steps, 2, MICROBATCHES, TOKENS, HIDDEN, generator=generator)
    made *= torch.tensor([1.0, 8.0, 0.25, 3.0] * 3)[:steps].reshape(-1, 1, 1, 1, 1)
    if zero:
        made[steps // 2, 0, 1] = 0
    made = made.cuda().bfloat16()
    return [(list(step[0]), list(step[1])) for step in made]


def loss_of(output: Any, target: Any) -> Any:
    return torch.nn.functional.mse_loss(output.float(), target.float())


def pipeline_of(made: Any, order: Any, recipe: str, capture: bool) -> tuple[Any, Any]:
    import qeffect.te as qte
    name, ranks, chunks = order
    schedule = Schedule.generate(name, ranks=ranks, chunks=chunks, microbatches=MICROBATCHES)
    optimizer = torch.optim.AdamW([p for m in made for p in m.parameters()], lr=1e-3, fused=True)
    x, y = data(1)[0]
    pipeline = qte.Pipeline(made, schedule, loss_of, recipe=RECIPES[recipe], example=(x[0], y[0]), optimizer=optimizer,
                            capture=capture, quiet=True)
    return pipeline, optimizer


def state(pipeline: Any, made: Any, optimizer: Any) -> list[Any]:
    found = [p.detach().clone() for m in made for p in m.parameters()]
    found += [v.clone() for m in made for p in m.parameters() for _, v in sorted(optimizer.state[p].items())]
    return found + [v for _, v in sorted(pipeline.fp8_state().items())]


def trained(order: Any, recipe: str, capture: bool) -> tuple[list[Any], list[Any]]:
    made = modules()
    pipeline, optimizer = pipeline_of(made, order, recipe, capture)
    losses = [pipeline.step(*batch) for batch in data()]
    found = state(pipeline, made, optimizer)
    pipeline.close()
    return losses, found


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_eager_and_captured_have_the_same_bits_in_every_order(recipe: str) -> None:
    first_losses, first = trained(("gpipe", 2, 1), recipe, False)
    assert all(bool(loss.isfinite().all()) for loss in first_losses)
    for order in ORDERS:
        for capture in (False, True):
            losses, found = trained(order, recipe, capture)
            assert same(losses, first_losses), (order, capture)
            assert same(found, first), (order, capture)


def test_scales_of_every_tensor_that_is_quantized_rise_and_fall() -> None:
    made = modules()
    pipeline, _ = pipeline_of(made, ORDERS[0], "delayed", True)
    seen = []
    for batch in data():
        pipeline.step(*batch)
        seen.append(torch.cat([v for n, v in sorted(pipeline.fp8_state().items()) if n.endswith("scaling_fwd.scale")]))
    moved = torch.stack(seen).diff(dim=0)
    rises, falls = (moved > 0).any(0), (moved < 0).any(0)
    assert int(rises.sum()) >= 8 and int(falls.sum()) >= 8


def test_a_step_that_is_not_finite_leaves_scales_and_histories_too() -> None:
    made = modules()
    pipeline, optimizer = pipeline_of(made, ORDERS[2], "delayed", True)
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
    clean, other_optimizer = pipeline_of(other, ORDERS[2], "delayed", True)
    clean.step(*batches[0])
    clean.step(*batches[1])
    assert same(state(clean, other, other_optimizer), after)


def test_an_evaluation_between_steps_leaves_no_amax() -> None:
    """H17."""
    found = []
    for evaluates in (False, True):
        made = modules()
        pipeline, optimizer = pipeline_of(made, ORDERS[0], "delayed", True)
        for inputs, targets in data(3, zero=False):
            if evaluates:
                pipeline.evaluate([x * 100 for x in inputs], targets)
            pipeline.step(inputs, targets)
        found.append(state(pipeline, made, optimizer))
    assert same(*found)


def test_fp8_state_is_plain_tensors_that_another_pipeline_goes_on_with(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file
    batches = data(6, zero=False)
    made = modules()
    pipeline, optimizer = pipeline_of(made, ORDERS[0], "delayed", True)
    for batch in batches[:3]:
        pipeline.step(*batch)
    save_file(pipeline.fp8_state(), str(tmp_path / "fp8.safetensors"))
    moments = copy.deepcopy(optimizer.state_dict())
    other = modules(seed=7)
    with torch.no_grad():
        for p, q in zip((p for m in made for p in m.parameters()), (q for m in other for q in m.parameters())):
            q.copy_(p)
    resumed, other_optimizer = pipeline_of(other, ORDERS[2], "delayed", True)
    other_optimizer.load_state_dict(moments)
    resumed.load_fp8_state(load_file(str(tmp_path / "fp8.safetensors"), device="cuda"))
    for batch in batches[3:]:
        pipeline.step(*batch)
        resumed.step(*batch)
    assert same(state(pipeline, made, optimizer), state(resumed, other, other_optimizer))


def test_the_global_flag_of_other_graphs_is_refused() -> None:
    """H9, Transformer Engine #3298: a flag of graphs made elsewhere decides whether weights are quantized."""
    made = modules()
    pipeline, _ = pipeline_of(made, ORDERS[0], "delayed", False)
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
        optimizer = torch.optim.AdamW([p for m in made for p in m.parameters()], lr=1e-3, fused=True)
        pipeline = qte.Pipeline(made, Schedule.generate("1f1b", ranks=2, microbatches=MICROBATCHES), loss_of,
                                recipe=RECIPES["delayed"], example=(batches[0][0][0], batches[0][1][0]),
                                optimizer=optimizer, capture=capture, quiet=True)
        for batch in batches:
            pipeline.step(*batch)
        found.append(state(pipeline, made, optimizer))
    assert same(*found)
