"""Bytes that passes of the network and of the VAE take beside weights, by a dry run over a tape.

Axes: B rows, each a state that the network is given; classifier-free guidance makes two of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from flowcredit.memory.convolutions import decoder
from flowcredit.memory.counts import Network
from flowcredit.memory.families import Inputs
from flowcredit.memory.folders import Component
from flowcredit.memory.tape import FLOAT, Meter, Tape


@dataclass(frozen=True)
class Work:
    """What the network and the VAE have to do: FLOPs of one velocity evaluation, guidance included, and of
    one decoded image; ``weights`` of the network, and the bytes of each as they are gathered."""

    evaluation: int
    decode: int | None
    weights: int
    gathered_width: int


@dataclass(frozen=True)
class Passes:
    """How the network is run: widths of its weights and of autocast's type, what is trained, whose rules;
    over how many devices gradients are spread."""

    network: Network
    component: Component
    inputs: Inputs
    stored: int
    compute: int | None
    gpu: bool
    full: bool
    rank: int
    adapted: Callable[[str], bool]
    checkpoints: bool
    parts: int = 1

    def _tape(self, recording: bool) -> Tape:
        return Tape(
            Meter(),
            self.stored,
            self.compute,
            gpu=self.gpu,
            full=self.full,
            rank=self.rank,
            adapted=self.adapted,
            recording=recording,
            checkpoints=self.checkpoints,
            parts=self.parts,
        )

    def _run(self, tape: Tape, rows: int) -> None:
        inputs = self.inputs
        x = tape.new((rows, *inputs.state), self.stored)
        text = tape.new((rows, *inputs.text), self.stored)
        pooled = tape.new((rows, inputs.pooled), self.stored)
        out = self.network(tape, self.component.config, x, text, pooled)
        out = tape.cast(out, FLOAT)
        if tape.recording:
            tape.backward(out)

    def sampling(self, rows: int) -> int:
        """The most that an evaluation without gradient takes."""
        tape = self._tape(recording=False)
        self._run(tape, rows)
        return tape.meter.peak

    def training(self, rows: int, accumulating: bool) -> tuple[int, int]:
        """The most that a forward and backward pass take, gradients of weights included; and of these the
        gradients. ``accumulating``: there are gradients of earlier passes from the start."""
        tape = self._tape(recording=True)
        self._run(tape, rows)
        if accumulating:
            sizes = {name: block.size for name, block in tape.gradients.items()}
            tape = self._tape(recording=True)
            tape.gradients = {name: tape.meter.take(size) for name, size in sizes.items()}
            tape.meter.held = tape.meter.held_at_peak = sum(sizes.values())
            self._run(tape, rows)
        return tape.meter.peak, tape.meter.held_at_peak

    def flops(self, rows: int) -> int:
        """Of an evaluation without gradient; adapters included."""
        tape = self._tape(recording=False)
        self._run(tape, rows)
        return tape.flops

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Names of the linear layers, with features in and out."""
        tape = self._tape(recording=False)
        self._run(tape, 1)
        return tape.linear_layers


def decoding(vae: Component, inputs: Inputs, images: int, width: int, gpu: bool) -> int | None:
    """The most that decoding so many images at once takes; None for a VAE that is not known here."""
    if vae.kind != "AutoencoderKL":
        return None
    tape = Tape(Meter(), width, gpu=gpu)
    latents = tape.new((images, *inputs.latent), width)
    decoder(tape, vae.config, latents)
    return tape.meter.peak


def decoding_flops(vae: Component, inputs: Inputs) -> int | None:
    """Of decoding one image; None for a VAE that is not known here."""
    if vae.kind != "AutoencoderKL":
        return None
    tape = Tape(Meter(), FLOAT)
    decoder(tape, vae.config, tape.new((1, *inputs.latent), FLOAT))
    return tape.flops


def image_bytes(images: int, height: int, width: int) -> int:
    return prod((images, 3, height, width, FLOAT))
