"""make_graphed_callables in PyTorch's and Transformer Engine's call shapes: right, or refused; never silently wrong.

What torch does with the same faults is shown on a GPU (marked gpu)."""
from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

import qeffect  # noqa: E402
import qeffect.torch as qt  # noqa: E402
from torch_world import DEVICES, HIDDEN, Block, Checkpointed, Custom, blocks, copies  # noqa: E402

RUNS = 100
# Interleaved pipeline of one rank, two chunks, three microbatches: TE's own test order.
ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]


def sample(device: str, seed: int = 0, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, HIDDEN, generator=generator).to(device).requires_grad_(grad)


def graphed(modules: Any, device: str, **options: Any) -> Any:
    return qt.make_graphed_callables(tuple(modules), tuple((sample(device),) for _ in modules), quiet=True, **options)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Block, Custom, Checkpointed])
def test_outputs_and_gradients_are_those_of_the_modules(kind: Any, device: str) -> None:
    base = blocks(2, kind)
    expected, found = copies(base, device), copies(base, device)
    calls = graphed(found, device)
    assert calls[0] is found[0]
    for seed in range(1, 4):
        xs = [sample(device, seed), sample(device, seed)]
        ys = [modules[1](modules[0](x)) for modules, x in zip((expected, found), xs)]
        close(*ys)
        for y in ys:
            y.square().sum().backward()
        close(xs[0].grad, xs[1].grad)
    for a, b in zip(expected, found):  # gradients of three microbatches, added up by autograd
        for p, q in zip(a.parameters(), b.parameters()):
            close(p.grad, q.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_one_module_is_given_back_as_one_and_takes_keywords(device: str) -> None:
    class Scaled(Block):
        def forward(self, x: Any, *, factor: Any = None, twice: bool = False) -> Any:
            y = super().forward(x) * factor
            return (y, y + 1) if twice else y

    (expected,), (found,) = copies([Scaled()], device), copies([Scaled()], device)
    found.load_state_dict(expected.state_dict())
    words = {"factor": torch.full((), 2.0, device=device), "twice": True}
    call = qt.make_graphed_callables(found, (sample(device),), sample_kwargs=words, quiet=True)
    assert call is found
    words["factor"] = torch.full((), 3.0, device=device)
    ya, yb = expected(sample(device, 1), **words), call(sample(device, 1), **words)
    assert isinstance(yb, tuple)
    close(ya[1], yb[1])
    with pytest.raises(qeffect.ArgumentError, match="other arguments"):
        call(sample(device, 1))
    with pytest.raises(qeffect.ArgumentError, match="captured as True"):
        call(sample(device, 1), factor=words["factor"], twice=False)


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_forward_before_the_first_backward_is_refused_every_time(device: str) -> None:
    """H2: torch replays over what the first backward needs, and says nothing."""
    (module,) = copies(blocks(1), device)
    (call,) = graphed([module], device, names=["model.layers.7"])
    for _ in range(RUNS):
        first = call(sample(device, 1))
        with pytest.raises(qt.Trap) as caught:
            call(sample(device, 2))
        trap = caught.value
        assert (trap.rule, trap.module) == ("slot.live", "model.layers.7")
        assert "test_torch_callables.py" in trap.submitted and trap.submitted in str(trap)
        first.sum().backward()  # the refused call changed nothing


@pytest.mark.gpu
def test_torch_itself_is_silently_wrong_there() -> None:
    (module,) = copies(blocks(1), "cuda")
    expected = copies([module], "cuda")[0]
    (call,) = torch.cuda.make_graphed_callables((module,), ((sample("cuda"),),))
    one, two = sample("cuda", 1), sample("cuda", 2)
    first = call(one)
    call(two)
    first.sum().backward()
    expected(one.detach().requires_grad_()).sum().backward()
    difference = (module.up.weight.grad - expected.up.weight.grad).norm() / expected.up.weight.grad.norm()
    assert difference > 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_kept_over_the_next_replay_raises_where_it_is_used(device: str) -> None:
    """H4: there it holds the numbers of the next microbatch."""
    (module,) = copies(blocks(1), device)
    (call,) = graphed([module], device)
    for _ in range(RUNS):
        kept = call(sample(device, 1))
        view = kept.detach()[0]
        kept.sum().backward()
        call(sample(device, 2)).sum().backward()
        for use in (lambda: view + 1, lambda: view.clone(), lambda: view.tolist()):
            with pytest.raises(RuntimeError, match="slot.stale"):
                use()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_is_never_memory_of_a_graph(device: str) -> None:
    """torch's first replay hands .grad over as graph memory: the second microbatch gives g2 + g2."""
    base = blocks(1)
    (expected,), (module,) = copies(base, device), copies(base, device)
    (call,) = graphed([module], device)
    x, other = sample(device, 1), sample(device, 1)
    for seed in range(3):
        expected(other).sum().backward()
        call(x).sum().backward()
    close(x.grad, other.grad)
    for p, q in zip(expected.parameters(), module.parameters()):
        close(p.grad, q.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_twice_is_refused(device: str) -> None:
    (module,) = copies(blocks(1), device)
    (call,) = graphed([module], device)
    y = call(sample(device, 1)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(qt.Trap) as caught:
        y.backward()
    assert caught.value.rule in ("slot.twice", "slot.empty")
    assert "test_torch_callables.py" in caught.value.submitted


@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_whose_result_is_dropped_frees_its_slot(device: str) -> None:
    (module,) = copies(blocks(1), device)
    (call,) = graphed([module], device)
    for _ in range(5):
        call(sample(device, 1))  # nobody will ask for its backward
        gc.collect()
    call(sample(device, 1)).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_and_no_grad_run_as_they_always_did(device: str) -> None:
    """H17."""
    base = blocks(1, lambda: Block(dropout=0.5))
    (expected,), (module,) = copies(base, device), copies(base, device)
    (call,) = graphed([module], device)
    y = call(sample(device, 1))
    with torch.no_grad():
        module.eval(), expected.eval()
        close(call(sample(device, 2)), expected(sample(device, 2)))
    module.train()
    y.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_parameter_is_refused_by_name(device: str) -> None:
    """H11: graphs would go on with the old memory."""
    (module,) = copies(blocks(1), device)
    (call,) = graphed([module], device, names=["layer"])
    for _ in range(RUNS):
        kept, module.down.bias.data = module.down.bias.data, module.down.bias.data.clone()
        with pytest.raises(qt.Trap, match="down.bias") as caught:
            call(sample(device, 1))
        assert caught.value.rule == "graph.address"
        module.down.bias.data = kept
        call(sample(device, 1)).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_zero_grad_by_dropping_is_right(device: str) -> None:
    base = blocks(1)
    (expected,), (module,) = copies(base, device), copies(base, device)
    (call,) = graphed([module], device)
    for seed in range(3):
        for model in (expected, module):
            model.zero_grad(set_to_none=True)
            (call if model is module else model)(sample(device, seed)).sum().backward()
        for p, q in zip(expected.parameters(), module.parameters()):
            close(p.grad, q.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_reset_gives_the_module_back(device: str) -> None:
    base = blocks(1)
    (expected,), (module,) = copies(base, device), copies(base, device)
    (call,) = graphed([module], device)
    call(sample(device, 1)).sum().backward()
    call.reset()
    assert "forward" not in module.__dict__ and "forward" not in module.up.__dict__
    assert torch.equal(module(sample(device, 2)), expected(sample(device, 2)))


def ordered(device: str, order: Any, layers: int = 2, chunks: int = 2, microbatches: int = 3, grads: bool = False,
            **options: Any) -> tuple[Any, Any, Any]:
    base = blocks(layers * chunks)
    expected, modules = copies(base, device), copies(base, device)
    if grads:
        for module in modules:
            for parameter in module.parameters():
                parameter.main_grad = torch.zeros_like(parameter)
    calls = qt.make_graphed_callables(
        tuple(modules), tuple((sample(device),) for _ in range(layers * chunks * microbatches)), quiet=True,
        _order=order, _num_layers_per_chunk=layers, names=[f"layers.{i}" for i in range(layers * chunks)], **options)
    return expected, modules, calls


def run(calls: Any, order: Any, device: str, layers: int = 2, chunks: int = 2, microbatches: int = 3) -> list[Any]:
    """Drives callables by an order, each chunk on inputs of its own, and returns the gradients of the inputs."""
    counts: dict[float, int] = {}
    outputs, inputs, found = {}, {}, []
    for entry in order:
        chunk = int(abs(entry)) - 1
        microbatch = counts.get(entry, 0)
        counts[entry] = microbatch + 1
        own = [calls[chunk * layers * microbatches + microbatch * layers + i] for i in range(layers)]
        if entry > 0:
            x = inputs[chunk, microbatch] = sample(device, 10 * chunk + microbatch)
            for call in own:
                x = call(x)
            outputs[chunk, microbatch] = x
        elif entry == int(entry):
            outputs.pop((chunk, microbatch)).square().sum().backward()
            found.append(inputs[chunk, microbatch].grad)
        else:
            for call in reversed(own):
                call.backward_dw()
    return found


def eager_calls(modules: Any, layers: int = 2, chunks: int = 2, microbatches: int = 3) -> list[Any]:
    return [modules[chunk * layers + i] for chunk in range(chunks) for _ in range(microbatches) for i in range(layers)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grads", [False, True])
def test_transformer_engines_order_is_right_with_as_many_slots_as_are_live(device: str, grads: bool) -> None:
    expected, modules, calls = ordered(device, ORDER, grads=grads)
    assert [len(calls[i].qeffect_stage.slots) for i in (0, 1, 6, 7)] == [2, 2, 2, 2]  # not 3
    for _ in range(2):
        for a, b in zip(run(eager_calls(expected), ORDER, device), run(calls, ORDER, device)):
            close(a, b)
    for a, b in zip(expected, modules):
        for p, q in zip(a.parameters(), b.parameters()):
            close(p.grad, q.main_grad if grads else q.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grads", [False, True])
def test_postponed_weight_gradients_have_entries_of_their_own(device: str, grads: bool) -> None:
    """H13 to H15: two input gradients of a chunk in flight before the first weight gradient."""
    order = [1, 1, -1, -1, -1.5, 1, -1.5, -1, -1.5]
    expected, modules, calls = ordered(device, order, 1, 1, 3, grads)
    native = [entry for entry in order if entry == int(entry)]
    for _ in range(2):
        for a, b in zip(run(eager_calls(expected, 1, 1), native, device, 1, 1), run(calls, order, device, 1, 1)):
            close(a, b)
    for a, b in zip(expected, modules):
        for p, q in zip(a.parameters(), b.parameters()):
            close(p.grad, q.main_grad if grads else q.grad)
    with pytest.raises(qt.Trap, match="slot.empty"):
        calls[0].backward_dw()


@pytest.mark.parametrize("device", DEVICES)
def test_a_replay_out_of_order_is_refused_every_time(device: str) -> None:
    """H1, H3: forwards beyond the live ones, and a backward before its turn."""
    _, _, calls = ordered(device, [1, 1, -1, 1, -1, -1], 1, 1, 3)
    for _ in range(RUNS):
        first, second = calls[0](sample(device, 1)), calls[1](sample(device, 2))
        with pytest.raises(qt.Trap) as caught:
            calls[2](sample(device, 3))  # both slots are live
        assert (caught.value.rule, caught.value.module, caught.value.microbatch) == ("slot.live", "layers.0", 2)
        with pytest.raises(qt.Trap) as caught:
            second.sum().backward()  # its contribution is due behind the first one's
        assert caught.value.rule == "grad.order" and caught.value.microbatch == 1
        first.sum().backward()
        calls[0].abort()


@pytest.mark.parametrize("device", DEVICES)
def test_an_order_that_cannot_be_is_refused_before_capture(device: str) -> None:
    for order in ([1, -1, -1, 1], [1, 1, -1], [-1, 1]):
        with pytest.raises(qeffect.ContractError):
            ordered(device, order, 1, 1, max(1, order.count(1), order.count(-1)))
    with pytest.raises(qeffect.ArgumentError, match="expected 3"):
        ordered(device, [1, -1, 1, -1, 1, -1], 1, 1, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_kept_longer_than_its_graphs_raises_where_it_is_used(device: str) -> None:
    (module,) = copies(blocks(1), device)
    (call,) = graphed([module], device)
    kept = call(sample(device, 1)).detach()
    call.reset()
    del call, module
    gc.collect()
    with pytest.raises(RuntimeError, match="slot.stale"):
        kept.sum()


@pytest.mark.parametrize("device", DEVICES)
def test_under_contract_and_not_captured_it_is_right_too(device: str) -> None:
    base = blocks(1)
    (expected,), (module,) = copies(base, device), copies(base, device)
    (call,) = graphed([module], device, capture="")
    for seed in range(3):
        x, y = sample(device, seed), sample(device, seed)
        (call(x) * 2).sum().backward()
        (expected(y) * 2).sum().backward()
        close(x.grad, y.grad)
    for p, q in zip(expected.parameters(), module.parameters()):
        close(p.grad, q.grad)
    call(x)
    first = call(x)
    with pytest.raises(qt.Trap):
        call(x)
    first.sum().backward()


@pytest.mark.torch
def test_what_cannot_be_captured_is_refused_with_the_reason() -> None:
    module = blocks(1)[0]
    with pytest.raises(qeffect.ArgumentError, match="no torch.nn.Module"):
        qt.make_graphed_callables(lambda x: x, (sample("cpu"),))
    handle = module.register_forward_hook(lambda *_: None)
    with pytest.raises(qeffect.ArgumentError, match="hooks"):
        qt.make_graphed_callables(module, (sample("cpu"),))
    handle.remove()
    with pytest.raises(qeffect.ArgumentError, match="pool"):
        qt.make_graphed_callables(module, (sample("cpu"),), pool=(0, 1))


@pytest.mark.torch
def test_capture_seconds_are_told(capsys: Any) -> None:
    qt.make_graphed_callables(blocks(1)[0], (sample("cpu"),))
    assert "captured 1 modules, 1 slots in " in capsys.readouterr().err


@pytest.mark.gpu
def test_calls_from_changing_streams_are_in_order() -> None:
    base = blocks(1)
    (expected,), (module,) = copies(base, "cuda"), copies(base, "cuda")
    (call,) = graphed([module], "cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for seed in range(20):
        x = sample("cuda", seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[seed % 2]):
            call(x).sum().backward()
        expected(x.detach()).sum().backward()
    torch.cuda.synchronize()
    for p, q in zip(expected.parameters(), module.parameters()):
        close(p.grad, q.grad)


@pytest.mark.gpu
def test_memory_of_graphs_follows_live_slots() -> None:
    def reserved() -> int:
        """Without workspaces of libraries: there is one per stream that was ever used, and torch takes streams in
        turns, so whether a capture's stream has one already goes by what ran before."""
        torch.cuda.synchronize()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    used = []
    kept: Any = ordered("cuda", [1, -1], 1, 1, 1)  # what libraries take once
    for microbatches in (8, 32):
        del kept
        order = [1, 1] + [-1, 1] * (microbatches - 2) + [-1, -1]
        before = reserved()
        kept = ordered("cuda", order, 1, 1, microbatches)
        used.append(reserved() - before)
    assert used[0] == used[1]


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_change_between_forward_and_backward_are_refused_every_time(device: str) -> None:
    """H10. A fused optimizer raises no version of a parameter; that it stepped is told by torch."""
    (module,) = copies(blocks(1), device)
    (call,) = graphed([module], device, names=["layer"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def by_hand() -> None:
        with torch.no_grad():
            module.up.weight.mul_(2)

    for turn in range(RUNS):
        y = call(sample(device, 1)).sum()
        (by_hand if turn % 2 else optimizer.step)()
        if turn == 0:  # without gradients it steps over nothing, and is told all the same
            assert all(p.grad is None for p in module.parameters())
        with pytest.raises(qt.Trap) as caught:
            y.backward()
        assert (caught.value.rule, caught.value.module) == ("weight.version", "layer")
        assert turn % 2 == 0 or "up.weight" in str(caught.value)
        call.abort()
    call(sample(device, 1)).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_given_up_has_no_backward_and_the_next_call_is_clean(device: str) -> None:
    base = blocks(1)
    (expected,), (module,) = copies(base, device), copies(base, device)
    (call,) = graphed([module], device)
    for seed in range(3):
        given_up = call(sample(device, 9)).sum()
        call.abort()
        with pytest.raises(qt.Trap) as caught:
            given_up.backward()
        assert caught.value.rule == "slot.stale"
        call(sample(device, seed)).sum().backward()
        expected(sample(device, seed)).sum().backward()
        with pytest.raises(qt.Trap):
            given_up.backward()
    for p, q in zip(expected.parameters(), module.parameters()):
        close(p.grad, q.grad)
