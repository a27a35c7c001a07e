"""What a figure of a GPU peer is, the same for every peer.

One layer, forward + input gradient + weight gradient; weight gradients are added to fp32 main gradients that hold
something already; weights are quantized beforehand, in both layouts; all data is random. A *slot* is a whole layer of
its own: weights, gradients, input, output gradient and everything kept between. Slots take turns, and there are so
many of them that nothing of a slot is left in the second cache when its turn comes again. A figure is at least two
seconds of uninterrupted work after half a second that is not counted: time per turn over windows of about a tenth of a
second, their median, quartiles and extremes, and the clocks meanwhile.
"""
import json
import math
import statistics
import subprocess
import sys
import time
from collections import namedtuple

import torch

Shape = namedtuple("Shape", "name hidden ffn heads kv_heads tokens")

SHAPES = {shape.name: shape for shape in (
    Shape("h1024-t1024", 1024, 4096, 16, 16, 1024),
    Shape("h2048-t2048", 2048, 8192, 16, 16, 2048),
    Shape("h4096-t2048", 4096, 14336, 32, 8, 2048),
    Shape("h4096-t8192", 4096, 14336, 32, 8, 8192),
)}

HISTORY_LENGTH = 16     # of delayed scaling, where a peer has it
SETTLE_SECONDS = 0.5    # before a figure: clocks and caches are those of steady work
WINDOW_SECONDS = 0.1
FIGURE_SECONDS = 2.0
MARGIN = 1.2            # more than asked for, because the estimate of a turn is from cold clocks
CACHE_TIMES = 4         # bytes between two turns of a slot, as a multiple of the second cache
SLOTS_MIN = 2


def head_dim(shape):
    return shape.hidden // shape.heads


def parameters(shape):
    """Elements of the four matrices: qkv, output, gate and up, down."""
    qkv = (shape.heads + 2 * shape.kv_heads) * head_dim(shape)
    return shape.hidden * (qkv + shape.hidden + 3 * shape.ffn)


def work_flops(shape):
    """Products of a turn (three of each matrix) and causal attention (two forward, five backward, half of each)."""
    return 6 * shape.tokens * parameters(shape) + 7 * shape.tokens * shape.tokens * shape.hidden


def slots_for(shape):
    """Counts what every peer must touch: main gradients (fp32) and one FP8 layout of the weights at a time."""
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    slot_bytes = 5 * parameters(shape)
    return max(SLOTS_MIN, 1 + math.ceil(CACHE_TIMES * cache_bytes / slot_bytes))


def smi_name():
    """Of the device in use: CUDA_VISIBLE_DEVICES gives devices other numbers than nvidia-smi knows."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


class Clocks:
    """nvidia-smi beside the work, in a process of its own: no lock of this interpreter is taken from it."""
    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    NAMES = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")

    def __enter__(self):
        command = ["nvidia-smi", "-i", smi_name(), "--query-gpu=" + ",".join(self.FIELDS),
                   "--format=csv,noheader,nounits", "-lms", "100"]
        self.summary = None
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
        return self

    def __exit__(self, *unused):
        if self.process is None:
            return
        self.process.terminate()
        text, _ = self.process.communicate()
        self.summary = self.summarize(text)

    def summarize(self, text):
        rows = []
        for line in text.splitlines():
            try:
                row = [float(cell) for cell in line.split(",")]
            except ValueError:
                continue  # "[N/A]", or a line that was cut when the process was stopped
            if len(row) == len(self.FIELDS):
                rows.append(row)
        if not rows:
            return None
        columns = dict(zip(self.NAMES, zip(*rows)))
        return {name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
                for name, values in columns.items()} | {"samples": len(rows)}


def _timed(run, slots, turns, first):
    """Milliseconds of the device for `turns` turns from `first` on."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for turn in range(first, first + turns):
        run(turn % slots)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _windows(run, slots, turns, windows):
    """One event between windows and no wait: the device is never idle because of the measurement."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(windows + 1)]
    marks[0].record()
    turn = 0
    for window in range(windows):
        for _ in range(turns):
            run(turn % slots)
            turn += 1
        marks[window + 1].record()
    marks[-1].synchronize()
    return [marks[i].elapsed_time(marks[i + 1]) / turns for i in range(windows)]


def sustained(run, slots, seconds=FIGURE_SECONDS):
    """run(slot) queues one turn. Returns the fields of a figure."""
    _timed(run, slots, 3 * slots, 0)
    one_ms = _timed(run, slots, 3 * slots, 0) / (3 * slots)
    _timed(run, slots, slots * max(1, round(SETTLE_SECONDS * 1e3 / one_ms / slots)), 0)
    turns = slots * max(1, round(WINDOW_SECONDS * 1e3 / one_ms / slots))
    windows = math.ceil(MARGIN * seconds * 1e3 / (turns * one_ms))
    with Clocks() as clocks:
        begin = time.perf_counter()
        times = _windows(run, slots, turns, windows)
        while sum(times) * turns < seconds * 1e3:
            times += _windows(run, slots, turns, max(1, windows // 4))
        wall = time.perf_counter() - begin
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"ms": statistics.median(times), "quartiles_ms": [quartiles[0], quartiles[2]],
            "extremes_ms": [min(times), max(times)], "windows": len(times), "turns_per_window": turns,
            "sustained_s": sum(times) * turns / 1e3, "wall_s": wall, "slots": slots, "clocks": clocks.summary}


def random_main_gradients(parameters_of_layer, seed):
    """fp32 gradients that hold something: the next ones are added (beta = 1)."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(p.shape, device="cuda", dtype=torch.float32, generator=generator).mul_(1e-2)
            for p in parameters_of_layer]


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def emit(shape, peer, figure, attention, accumulation, fields):
    """One JSON line on standard output."""
    line = {"peer": peer, "figure": figure, "shape": shape._asdict(), "attention": attention,
            "accumulation": accumulation, "device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    if "ms" in fields:
        line["tflops"] = work_flops(shape) / fields["ms"] / 1e9
    print(json.dumps(rounded(line | fields)), flush=True)


def attempt(shape, peer, figure, attention, accumulation, measure):
    """A figure that fails says why, and the next is measured."""
    try:
        fields = measure()
    except Exception as error:  # whatever a library raises: the line names it
        print(f"{peer}, {figure}, {shape.name}: {error!r}", file=sys.stderr, flush=True)
        fields = {"error": repr(error)[:500]}
    emit(shape, peer, figure, attention, accumulation, fields)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def need_gpu():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(0) < (8, 9):
        print("skipped: this comparison needs a GPU that multiplies FP8 (compute capability 8.9 or later)",
              file=sys.stderr)
        sys.exit(77)
