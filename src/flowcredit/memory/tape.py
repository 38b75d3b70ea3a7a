"""A dry run of a network: which blocks of memory its operations take, keep for the backward pass, and free.

A `Block` is a piece of memory; while something refers to it, its bytes count, as torch's tensors do. An
operation of `Tape` makes the blocks that the torch operation of that name makes, and keeps those that its
backward pass reads. So a forward pass written in the order of a network's own code has that network's peak,
and what it keeps; `Tape.backward` walks back over it. Attention is the memory-efficient one, which keeps its
inputs, its output and one number a head and token, and no matrix of token by token.

Rules for types: under autocast a linear layer, a convolution and attention compute in its type, from copies
where the type is another, and nothing keeps such copies for a second use; norms compute in float32 on a GPU,
and in the type of what they are given on a CPU (ATen/autocast_mode.h).

Counts are elements, widths bytes for an element (4 float32, 2 bfloat16).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

FLOAT = 4


@dataclass
class Meter:
    """Bytes in blocks that are alive, and the most there were; ``held`` are those of gradients of weights."""

    now: int = 0
    peak: int = 0
    held: int = 0
    held_at_peak: int = 0

    def take(self, size: int) -> "Block":
        self.now += size
        if self.now > self.peak:
            self.peak, self.held_at_peak = self.now, self.held
        return Block(self, size)


class Block:
    """Memory that is freed as soon as nothing refers to it."""

    def __init__(self, meter: Meter, size: int) -> None:
        self.meter, self.size = meter, size

    def __del__(self) -> None:
        self.meter.now -= self.size


@dataclass(eq=False)
class Node:
    """Where a gradient belongs: a tensor's number of elements and their width, without its memory."""

    count: int
    width: int


@dataclass(eq=False)
class Value:
    """A tensor without values: ``shape``, bytes for an element, whether a gradient reaches it."""

    shape: tuple[int, ...]
    width: int
    block: Block
    node: Node
    grad: bool = False

    @property
    def count(self) -> int:
        return prod(self.shape)


Run = Callable[..., tuple[Value, ...]]


@dataclass
class _Step:
    """One operation to walk back over: what it keeps, where its gradient goes."""

    outs: list[Node]
    inputs: list[Node]
    kept: list[Block]
    weights: list[tuple[str, int, int]]
    """Trained weights: name, elements, width of their gradient as it is computed."""
    passes: bool = False
    """Whether the gradient is handed on as it is, as by a sum."""
    again: Run | None = None
    """Of a checkpoint: its forward pass, and what that is given."""
    given: tuple[Value, ...] = ()


@dataclass
class Tape:
    """One pass of a network.

    ``stored``: width of the network's weights. ``compute``: that of autocast's type, None without. ``gpu``:
    whose rules for norms hold. ``full``: every weight is trained; else only adapters of ``rank`` on the
    layers that ``adapted`` says. ``recording``: a backward pass will follow. ``checkpoints``: it computes
    blocks anew. ``parts``: over how many devices gradients are spread, each having one part.
    """

    meter: Meter
    stored: int
    compute: int | None = None
    gpu: bool = True
    full: bool = False
    rank: int = 0
    adapted: Callable[[str], bool] = lambda name: False
    recording: bool = False
    checkpoints: bool = False
    parts: int = 1
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    linear_layers: dict[str, tuple[int, int]] = field(default_factory=dict)
    gradients: dict[str, Block] = field(default_factory=dict)
    flops: int = 0
    """Additions and multiplications of matrix products, convolutions and attention, forward."""
    steps: list[_Step] = field(default_factory=list)

    def new(self, shape: Sequence[int], width: int) -> Value:
        count = prod(shape)
        return Value(tuple(shape), width, self.meter.take(count * width), Node(count, width))

    def _weight(self, name: str, shape: tuple[int, ...]) -> None:
        self.parameters[name] = shape

    def _record(
        self,
        out: Value,
        inputs: Sequence[Value],
        kept: Sequence[Block] = (),
        weights: Sequence[tuple[str, int, int]] = (),
        passes: bool = False,
    ) -> Value:
        reached = [each.node for each in inputs if each.grad]
        out.grad = bool(reached or weights)
        if self.recording and out.grad:
            self.steps.append(_Step([out.node], reached, list(kept), list(weights), passes))
        return out

    def cast(self, x: Value, width: int) -> Value:
        """The same in another type: a copy, or itself."""
        if x.width == width:
            return x
        return self._record(self.new(x.shape, width), [x])

    def view(self, x: Value, shape: Sequence[int]) -> Value:
        return Value(tuple(shape), x.width, x.block, x.node, x.grad)

    def part(self, x: Value, shape: Sequence[int]) -> Value:
        """A slice: no memory of its own; its gradient is of the size of the whole."""
        return self._record(Value(tuple(shape), x.width, x.block, Node(prod(shape), x.width)), [x])

    def copy(self, x: Value, shape: Sequence[int] | None = None) -> Value:
        return self._record(self.new(x.shape if shape is None else shape, x.width), [x])

    def linear(self, x: Value, name: str, out: int, bias: bool = True) -> Value:
        """[..., in] to [..., out], with its adapter if it has one."""
        features = x.shape[-1]
        self._weight(f"{name}.weight", (out, features))
        if bias:
            self._weight(f"{name}.bias", (out,))
        self.linear_layers[name] = (features, out)
        y = self._matmul(x, (*x.shape[:-1], out), features * out, self.stored, name if self.full else None)
        if not (self.rank and self.adapted(name)):
            return y
        # peft gives its float32 matrices a float32 input, which autocast casts back.
        low = self.cast(x, FLOAT)
        low = self._matmul(low, (*x.shape[:-1], self.rank), features * self.rank, FLOAT, f"{name}.lora_A")
        low = self._matmul(low, y.shape, out * self.rank, FLOAT, f"{name}.lora_B")
        low = self.copy(low)  # times alpha / rank
        return self.cast(self.add(y, low), y.width)

    def _matmul(
        self,
        x: Value,
        shape: tuple[int, ...],
        elements: int,
        stored: int,
        trained: str | None,
        always_keeps: bool = False,
    ) -> Value:
        """``always_keeps`` its input, as convolutions do whether or not their weights are trained."""
        width = x.width if self.compute is None else self.compute
        channels = shape[1] if always_keeps else shape[-1]
        self.flops += 2 * prod(shape) * (elements // channels)
        x = self.cast(x, width)
        kept: list[Block] = [x.block] if trained is not None or always_keeps else []
        weight = None if stored == width else self.meter.take(elements * width)
        if x.grad and weight is not None:
            kept.append(weight)
        weights = [(f"{trained}.weight", elements, width)] if trained is not None else []
        return self._record(self.new(shape, width), [x], kept, weights)

    def conv(
        self, x: Value, name: str, out: int, *, kernel: int = 3, stride: int = 1, padded: bool = True
    ) -> Value:
        """[B, C, h, w] to [B, out, h / stride, w / stride], or less where there is no padding."""
        rows, channels, height, width = x.shape
        self._weight(f"{name}.weight", (out, channels, kernel, kernel))
        self._weight(f"{name}.bias", (out,))
        lost = 0 if padded else kernel - 1
        shape = (rows, out, (height - lost - 1) // stride + 1, (width - lost - 1) // stride + 1)
        elements = out * channels * kernel * kernel
        return self._matmul(x, shape, elements, self.stored, name if self.full else None, always_keeps=True)

    def norm(self, x: Value, name: str | None, size: int, groups: int) -> Value:
        """Layer and group norm: keeps its input and two numbers for each of ``groups``."""
        if name is not None:
            self._weight(f"{name}.weight", (size,))
            self._weight(f"{name}.bias", (size,))
        if self.gpu and self.compute is not None:
            x = self.cast(x, FLOAT)
        stats = self.meter.take(2 * FLOAT * groups)
        weights = [(f"{name}.weight", size, FLOAT)] if self.full and name is not None else []
        return self._record(self.new(x.shape, x.width), [x], [x.block, stats], weights)

    def rms_norm(self, x: Value, name: str, stored: int | None = None) -> Value:
        """torch's own: in one operation on a GPU, of several on a CPU."""
        size = x.shape[-1]
        self._weight(f"{name}.weight", (size,))
        weights = [(f"{name}.weight", size, FLOAT)] if self.full else []
        scale = self.meter.take(FLOAT * (x.count // size))
        if self.gpu:
            wide = self.cast(x, FLOAT) if self.compute is not None else x
            return self._record(self.new(x.shape, wide.width), [wide], [wide.block, scale], weights)
        wide = self.cast(x, FLOAT)
        out = self._record(self.new(x.shape, FLOAT), [wide], [wide.block, scale])
        kept = [out.block] if self.full else []
        return self.cast(self._record(self.new(x.shape, FLOAT), [out], kept, weights), x.width)

    def slow_rms_norm(self, x: Value, name: str) -> Value:
        """diffusers' own, written out: a float32 copy is squared, the product is float32."""
        size = x.shape[-1]
        self._weight(f"{name}.weight", (size,))
        wide = self.cast(x, FLOAT)
        squares = self.copy(wide)
        scale = self.meter.take(FLOAT * (x.count // size))
        out = self._record(self.new(x.shape, FLOAT), [x], [wide.block, x.block, scale])
        del wide, squares
        if self.stored != FLOAT:
            out = self.cast(out, self.stored)
        weights = [(f"{name}.weight", size, FLOAT)] if self.full else []
        kept = [out.block] if self.full else []
        return self._record(self.new(x.shape, out.width), [out], kept, weights)

    def activation(self, x: Value) -> Value:
        return self._record(self.new(x.shape, x.width), [x], [x.block])

    def add(self, x: Value, y: Value) -> Value:
        return self._record(self.new(_larger(x, y), max(x.width, y.width)), [x, y], passes=True)

    def times(self, x: Value, y: Value) -> Value:
        kept = [x.block] * y.grad + [y.block] * x.grad
        return self._record(self.new(_larger(x, y), max(x.width, y.width)), [x, y], kept)

    def join(self, parts: Sequence[Value], axis: int) -> Value:
        shape = list(parts[0].shape)
        shape[axis] = sum(each.shape[axis] for each in parts)
        return self._record(self.new(shape, max(each.width for each in parts)), parts)

    def rotary(self, x: Value) -> Value:
        """Of real pairs: in float32, and back."""
        turned = self.copy(x)
        first = self.new(x.shape, FLOAT)
        wide = self.cast(turned, FLOAT)
        second = self.new(x.shape, FLOAT)
        del wide
        both = self._record(self.new(x.shape, FLOAT), [x, turned])
        del first, second
        return self.cast(both, x.width)

    def complex_rotary(self, x: Value) -> Value:
        """Of complex numbers: a product in float32, and back."""
        wide = self.cast(x, FLOAT)
        turned = self._record(self.new(x.shape, FLOAT), [wide])
        return self.cast(turned, x.width)

    def larger_image(self, x: Value) -> Value:
        """[B, C, h, w] to twice the height and width."""
        rows, channels, height, width = x.shape
        return self._record(self.new((rows, channels, 2 * height, 2 * width), x.width), [x])

    def attention(self, q: Value, k: Value, v: Value) -> Value:
        """[B, T, heads, D] to the same."""
        width = q.width if self.compute is None else self.compute
        self.flops += 4 * q.count * k.shape[1]
        q, k, v = (self.cast(each, width) for each in (q, k, v))
        out = self.new(q.shape, width)
        sums = self.meter.take(FLOAT * q.count // q.shape[-1])
        return self._record(out, [q, k, v], [q.block, k.block, v.block, out.block, sums])

    def block(self, run: Run, *inputs: Value) -> tuple[Value, ...]:
        """``run(*inputs)``; under checkpoints only ``inputs`` are kept of it, and it is run again."""
        if not (self.recording and self.checkpoints):
            return run(*inputs)
        self.recording = False
        outs = run(*inputs)
        self.recording = True
        reached = [each.node for each in inputs if each.grad]
        self.steps.append(_Step([out.node for out in outs], reached, [], [], again=run, given=inputs))
        return outs

    def backward(self, out: Value) -> None:
        """Walk back from ``out``, freeing what was kept; ``gradients`` gets those of trained weights."""
        grads = {out.node: self.meter.take(out.count * out.width)}
        self._walk(self.steps, grads)

    def _walk(self, steps: list[_Step], grads: dict[Node, Block]) -> None:
        while steps:
            step = steps.pop()
            arrived = [grads.pop(node) for node in step.outs if node in grads]
            if not arrived:
                continue
            if step.again is not None:
                self._again(step, grads, arrived)
                continue
            for node in step.inputs:
                same = step.passes and arrived[0].size == node.count * node.width
                block = arrived[0] if same else self.meter.take(node.count * node.width)
                grads.setdefault(node, block)
                del block
            for name, elements, width in step.weights:
                self._store(name, elements, width)

    def _again(self, step: _Step, grads: dict[Node, Block], arrived: list[Block]) -> None:
        fresh = tuple(replace(each, node=Node(each.count, each.width)) for each in step.given)
        outer, self.steps = self.steps, []
        assert step.again is not None
        self.checkpoints = False
        outs = step.again(*fresh)
        inner, self.steps, self.checkpoints = self.steps, outer, True
        within = {out.node: block for out, block in zip(outs, arrived, strict=False)}
        arrived.clear()
        del outs
        self._walk(inner, within)
        for new, old in zip(fresh, step.given, strict=True):
            if new.node in within and old.grad:
                grads.setdefault(old.node, within.pop(new.node))

    def _store(self, name: str, elements: int, width: int) -> None:
        computed = self.meter.take(elements * width)
        kept = -(-elements * FLOAT // self.parts)
        gradient = computed if width == FLOAT and self.parts == 1 else self.meter.take(kept)
        if name not in self.gradients:
            self.gradients[name] = gradient
            self.meter.held += gradient.size


def _larger(x: Value, y: Value) -> tuple[int, ...]:
    return x.shape if x.count >= y.count else y.shape
