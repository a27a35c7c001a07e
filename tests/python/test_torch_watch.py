"""What crosses streams without an edge is found by the watch, every time; what has its edge is not."""
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

import qeffect.torch as qt  # noqa: E402
from qeffect import Schedule  # noqa: E402
from torch_world import adamw, batches, blocks, copies, loss_of  # noqa: E402

RUNS = 100


class Told:
    """Streams of a machine that has none: whichever the test says is current."""

    def __init__(self) -> None:
        self.now = 0

    def current(self) -> int:
        return self.now

    def order(self, earlier: int, later: int) -> None:
        return None


def pipeline_of(device: str, streams: Any = None) -> tuple[Any, Any]:
    data = batches(1, 4, device)
    modules = copies(blocks(2), device)
    pipeline = qt.Pipeline(modules, Schedule.generate("zbh1", ranks=2, microbatches=4), loss_of, capture=True,
                           example=(data[0][0][0], data[0][1][0]), optimizer=adamw(modules), streams=streams,
                           quiet=True)
    return pipeline, data[0]


@pytest.mark.torch
def test_an_input_written_on_another_stream_without_an_edge_is_found_every_time() -> None:
    streams = Told()
    pipeline, (inputs, targets) = pipeline_of("cpu", streams)
    for _ in range(RUNS):
        with qt.Watch(pipeline) as watch:
            streams.now = 1
            inputs[2].mul_(0.5)
            streams.now = 0
            with pytest.raises(qt.Trap) as caught:
                pipeline.step(inputs, targets)
            assert caught.value.rule == "sync.side" and "aten.mul_" in str(caught.value)
            assert "test_torch_watch.py" in str(caught.value)
            watch.edge(1, 0)
            pipeline.step(inputs, targets)


@pytest.mark.torch
def test_an_output_read_on_another_stream_without_an_edge_is_found() -> None:
    streams = Told()
    pipeline, (inputs, targets) = pipeline_of("cpu", streams)
    with qt.Watch(pipeline) as watch:
        losses = pipeline.step(inputs, targets)
        streams.now = 1
        with pytest.raises(qt.Trap, match="sync.side"):
            losses.sum()
        watch.edge(0, 1)
        losses.sum()


@pytest.mark.torch
def test_a_step_whose_actions_change_streams_has_its_edges() -> None:
    streams = Told()
    pipeline, (inputs, targets) = pipeline_of("cpu", streams)
    with qt.Watch(pipeline):
        for _ in range(3):
            streams.now = 0
            pipeline.begin()
            for i, action in enumerate(pipeline.actions):
                streams.now = i % 2
                pipeline.run(action, inputs[action.microbatch], targets[action.microbatch])
            pipeline.finish()
    pipeline.step(inputs, targets)  # and nothing is watched any more
    assert all(stage.tell is None for stage in pipeline.stages)


@pytest.mark.torch
def test_views_touch_nothing_and_ranges_of_one_storage_are_apart() -> None:
    streams = Told()
    with qt.Watch(streams=streams):
        x = torch.zeros(8)
        streams.now = 1
        left, right = x[:4], x[4:]
        streams.now = 0
        left.add_(1)
        with pytest.raises(qt.Trap):
            streams.now = 1
            right.add_(1)  # zeros wrote it on the other stream


@pytest.mark.gpu
def test_side_streams_of_a_gpu_are_found_every_time_and_their_edges_are_seen() -> None:
    pipeline, (inputs, targets) = pipeline_of("cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for turn in range(RUNS):
        with qt.Watch(pipeline):
            with torch.cuda.stream(side):
                inputs[turn % 4].mul_(1.0)
            with pytest.raises(qt.Trap) as caught:
                pipeline.step(inputs, targets)
            assert caught.value.rule == "sync.side"
            torch.cuda.current_stream().wait_stream(side)
            losses = pipeline.step(inputs, targets)
            with pytest.raises(qt.Trap), torch.cuda.stream(side):
                losses.sum()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                losses.sum()
            torch.cuda.synchronize()
