#!/usr/bin/env python3
"""The same layer in PyTorch with FP8 products (_scaled_mm), by the protocol of protocol.py: eager, and torch.compile
captured into one graph, forward and backward.

    bench/peers/torch_gpu.py SHAPE [--deterministic] [--scaling dynamic|given] [--fast] [--figures eager,compiled]

PyTorch has no delayed scaling. `dynamic` takes each tensor's scale from its own largest value, as torchao's tensorwise
recipe does; `given` takes it as known and records nothing, which is less than delayed scaling must do: it flatters.
_scaled_mm cannot add to a gradient, so weight gradients leave it as bf16 and are added to the fp32 main gradients by a
kernel of their own. Weights are quantized beforehand, in both layouts. Attention is the faster of PyTorch's own that
can do what is asked; the line names it. Prints a JSON line for each figure.
Exit status: 0, 2 usage, 77 a GPU is missing.
"""
import argparse
import math
import os
import sys

try:
    import torch
    import torch.nn.functional as F
    import protocol
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as missing:
    print(f"skipped: this comparison needs PyTorch ({missing})", file=sys.stderr)
    sys.exit(77)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
GIVEN_SCALE = {E4M3: 64.0, E5M2: 1024.0}  # of values of about unit size, and of gradients
NORM_EPSILON = 1e-5


def quantized(x, kind, dynamic):
    """Codes and the inverse of their scale."""
    values = x.float()
    if dynamic:
        scale = LARGEST[kind] / x.abs().amax().float().clamp(min=1e-12)
    else:
        scale = torch.full((), GIVEN_SCALE[kind], device=x.device)
    return (values * scale).clamp(-LARGEST[kind], LARGEST[kind]).to(kind), scale.reciprocal()


class Product(torch.autograd.Function):
    """y = x w'. The codes of w lie by rows (w8) and transposed (w8t); `weight` only receives the gradient."""

    @staticmethod
    def forward(ctx, x, weight, w8, w8t, w_inverse, dynamic, fast):
        x8, x_inverse = quantized(x, E4M3, dynamic)
        ctx.save_for_backward(x8, x_inverse, w8t, w_inverse)
        ctx.dynamic, ctx.fast = dynamic, fast
        return torch._scaled_mm(x8, w8.t(), scale_a=x_inverse, scale_b=w_inverse, out_dtype=torch.bfloat16,
                                use_fast_accum=True)

    @staticmethod
    def backward(ctx, dy):
        x8, x_inverse, w8t, w_inverse = ctx.saved_tensors
        dy8, dy_inverse = quantized(dy, E5M2, ctx.dynamic)
        dx = torch._scaled_mm(dy8, w8t.t(), scale_a=dy_inverse, scale_b=w_inverse, out_dtype=torch.bfloat16,
                              use_fast_accum=ctx.fast)
        dw = torch._scaled_mm(dy8.t().contiguous(), x8.t().contiguous().t(), scale_a=dy_inverse, scale_b=x_inverse,
                              out_dtype=torch.bfloat16, use_fast_accum=ctx.fast)
        return dx, dw, None, None, None, None, None


def plain_product(x, weight, *unused):
    return x @ weight.t()


class Layer:
    """Functions of tensors only, so that one compilation serves all slots of a shape."""

    def __init__(self, shape, product, dynamic, fast):
        self.shape, self.product, self.dynamic, self.fast = shape, product, dynamic, fast

    def linear(self, x, matrix):
        return self.product(x, *matrix, self.dynamic, self.fast)

    def rotated(self, x, cosine, sine):
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(x.dtype)

    def attended(self, x, matrix, cosine, sine):
        s, d = self.shape, protocol.head_dim(self.shape)
        qkv = self.linear(x, matrix).view(1, s.tokens, s.heads + 2 * s.kv_heads, d).transpose(1, 2)
        q, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        q, k = self.rotated(q, cosine, sine), self.rotated(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
        return y.transpose(1, 2).reshape(s.tokens, s.hidden)

    def __call__(self, x, gains, matrices, cosine, sine):
        qkv, output, gate_up, down = matrices
        hidden = (self.shape.hidden,)
        normed = F.rms_norm(x, hidden, gains[0], NORM_EPSILON)
        x = x + self.linear(self.attended(normed, qkv, cosine, sine), output)
        gate, up = self.linear(F.rms_norm(x, hidden, gains[1], NORM_EPSILON), gate_up).chunk(2, dim=-1)
        return x + self.linear(F.silu(gate) * up, down)


class Slot:
    def __init__(self, shape, seed, device="cuda"):
        torch.manual_seed(seed)
        d = protocol.head_dim(shape)
        sizes = (((shape.heads + 2 * shape.kv_heads) * d, shape.hidden), (shape.hidden, shape.hidden),
                 (2 * shape.ffn, shape.hidden), (shape.hidden, shape.ffn))
        self.gains = [torch.ones(shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
        self.matrices = [self.matrix(size, device) for size in sizes]
        self.parameters = self.gains + [matrix[0] for matrix in self.matrices]
        self.x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
        self.dy = torch.randn_like(self.x)
        angle = torch.outer(torch.arange(shape.tokens, device=device, dtype=torch.float32),
                            10000.0 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d))
        self.cosine, self.sine = angle.cos(), angle.sin()

    @staticmethod
    def matrix(size, device):
        """The parameter, its codes by rows, their transpose, the inverse scale."""
        weight = (torch.randn(size, device=device) / math.sqrt(size[1])).to(torch.bfloat16)
        codes, inverse = quantized(weight, E4M3, True)
        return weight.requires_grad_(), codes, codes.t().contiguous(), inverse

    def turn(self, layer):
        """Forward, backward, and the gradients added to the main ones."""
        y = layer(self.x, self.gains, self.matrices, self.cosine, self.sine)
        y.backward(self.dy)
        for parameter, gradient in zip(self.parameters, self.main_gradients):
            gradient.add_(parameter.grad)

    def clear(self):
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def whole_turn(self, layer):
        self.turn(layer)
        self.clear()

    def capture(self, layer):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.whole_turn(layer)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.turn(layer)


def error_of(shape, layer, slot):
    """Of y, dx and the largest weight gradient against products in bf16: FP8 leaves a few percent."""
    def results(of):
        slot.clear()
        y = of(slot.x, slot.gains, slot.matrices, slot.cosine, slot.sine)
        y.backward(slot.dy)
        return y.detach().float(), slot.x.grad.float(), slot.matrices[2][0].grad.float()

    exact = results(Layer(shape, plain_product, False, False))
    found = results(layer)
    slot.clear()
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)]
    if not all(error < 0.2 for error in errors):
        raise RuntimeError(f"the FP8 layer is off by {errors}")
    return dict(zip(("y", "dx", "dw"), errors))


def backends(deterministic):
    """cuDNN's backward has no fixed order in PyTorch."""
    return [SDPBackend.FLASH_ATTENTION] if deterministic else [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def faster_backend(shape, candidates):
    """By the time of forward and backward alone."""
    if len(candidates) == 1:
        return candidates[0]
    d = protocol.head_dim(shape)
    q, k, v = (torch.randn(1, heads, shape.tokens, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
               for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    times = {}
    for backend in candidates:
        def once(_, backend=backend):
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
            y.backward(y.detach())
            q.grad = k.grad = v.grad = None
        try:
            protocol._timed(once, 1, 5, 0)
            times[backend] = protocol._timed(once, 1, 20, 0)
        except RuntimeError as error:
            print(f"{backend}: {error}", file=sys.stderr)
    return min(times, key=times.get)


def measure(shape, figure, options, seconds):
    layer = Layer(shape, Product.apply, options.scaling == "dynamic", options.fast)
    slots = [Slot(shape, seed) for seed in range(protocol.slots_for(shape))]
    for seed, slot in enumerate(slots):
        slot.main_gradients = protocol.random_main_gradients(slot.parameters, seed)
    backend = faster_backend(shape, backends(options.deterministic))
    with sdpa_kernel(backend):
        errors = error_of(shape, layer, slots[0])
        if figure == "compiled":
            compiled = torch.compile(lambda *tensors: layer(*tensors), fullgraph=True, dynamic=False)
            for slot in slots:
                slot.capture(compiled)
            runs = [slot.graph.replay for slot in slots]
        else:
            runs = [lambda slot=slot: slot.whole_turn(layer) for slot in slots]
        fields = protocol.sustained(lambda slot: runs[slot](), len(slots), seconds)
    return fields | {"backend": backend.name, "relative_error": errors, "scaling": options.scaling}


FIGURES = {"eager": "eager, weights quantized beforehand",
           "compiled": "torch.compile, forward and backward in one graph, weights quantized beforehand"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape")
    parser.add_argument("--deterministic", action="store_true", help="attention adds up in one order")
    parser.add_argument("--fast", action="store_true", help="gradient products accumulate fast too")
    parser.add_argument("--scaling", choices=("dynamic", "given"), default="dynamic")
    parser.add_argument("--figures", default="eager,compiled")
    parser.add_argument("--seconds", type=float, default=protocol.FIGURE_SECONDS)
    return parser.parse_args()


def main():
    options = arguments()
    shape, figures = protocol.SHAPES.get(options.shape), options.figures.split(",")
    if shape is None or not set(figures) <= set(FIGURES):
        print(f"shapes: {' '.join(protocol.SHAPES)}; figures: {' '.join(FIGURES)}", file=sys.stderr)
        return 2
    protocol.need_gpu()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the bf16 products of the check ask for then
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would be timed, and changes no result
    attention = "deterministic" if options.deterministic else "any order"
    accumulation = "fast" if options.fast else "fast forward, split gradients"
    for figure in figures:
        protocol.attempt(shape, f"torch {torch.__version__}", f"{FIGURES[figure]}, {options.scaling} scales", attention,
                         accumulation, lambda figure=figure: measure(shape, figure, options, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
