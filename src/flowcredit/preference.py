"""The objective of Diffusion-DPO (arXiv 2311.12908) on flows: errors of denoising, compared over pairs.

Axes: P prompts, W samples of a prompt, N pairs, K draws, *D latent dimensions; of a pair, the chosen image
comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcredit.interfaces import FlowModel
from flowcredit.noise import generator
from flowcredit.objectives import Metrics


@dataclass(frozen=True)
class PairStep:
    """One draw for each pair: ``x`` [N, 2, *D], both images at one ``sigma`` [N] under one noise; ``target``
    [N, 2, *D], the velocity noise - image; ``differ`` [N] bool, whether there is a preference at all;
    ``reference_error`` [N, 2], see ``denoising_error``."""

    beta: float
    x: Tensor
    sigma: Tensor
    prompts: Tensor
    target: Tensor
    differ: Tensor
    reference_error: Tensor | None = None

    @property
    def terms(self) -> int:
        return 1

    @property
    def counted(self) -> Tensor:
        return self.differ

    @property
    def live(self) -> Tensor:
        return self.differ

    @property
    def needs_reference(self) -> bool:
        return True

    def part(self, first: int, last: int) -> "PairStep":
        return self.only(slice(first, last))

    def only(self, cut: slice | Tensor) -> "PairStep":
        """Some of the rows."""
        return replace(
            self,
            x=self.x[cut],
            sigma=self.sigma[cut],
            prompts=self.prompts[cut],
            target=self.target[cut],
            differ=self.differ[cut],
            reference_error=None if self.reference_error is None else self.reference_error[cut],
        )

    def with_reference(self, v: Tensor) -> "PairStep":
        return replace(self, reference_error=denoising_error(v, self.target))

    def loss(self, v: Tensor) -> tuple[Tensor, Metrics]:
        """``-log sigmoid(margin)``, a mean over pairs; with it ``implicit_margin``, and
        ``implicit_accuracy``, the share of pairs whose margin is above 0."""
        assert self.reference_error is not None, "a preference is measured from a reference"
        gained = denoising_error(v, self.target) - self.reference_error
        margin = -self.beta / 2 * (gained[:, 0] - gained[:, 1])
        told = torch.stack([margin.detach().mean(), (margin.detach() > 0).to(margin.dtype).mean()])
        names = ("implicit_margin", "implicit_accuracy")
        return -torch.nn.functional.logsigmoid(margin).mean(), dict(zip(names, told.tolist(), strict=True))


def denoising_error(v: Tensor, target: Tensor) -> Tensor:
    """Mean over latent dimensions of ``(v - target)^2``: [N, 2, *D] to [N, 2]."""
    return ((v - target) ** 2).flatten(2).mean(-1)


def extremes(advantages: Tensor) -> tuple[Tensor, Tensor]:
    """The places [P, 2] of the best and the worst image of each group, and whether these differ [P].

    ``advantages`` [P, W]; where several are best or worst, the last of the best and the first of the worst.
    """
    order = advantages.argsort(dim=1, stable=True)
    ends = torch.stack([order[:, -1], order[:, 0]], 1)
    return ends, (advantages.gather(1, ends).diff(dim=1) < 0).squeeze(1)


def noise_levels(grid: Tensor, u: Tensor) -> Tensor:
    """Sigmas at the share ``u`` (0 to 1) of the way along a [T+1] grid, from noise to image, float64.

    Linear between the grid's own sigmas, so that any shift holds.
    """
    steps = len(grid) - 1
    place = u.to(torch.float64) * steps
    before = place.long().clamp(0, steps - 1)
    share = place - before
    return (1 - share) * grid[before] + share * grid[before + 1]


def pair_draws(
    model: FlowModel, grid: Tensor, seed: int, iteration: int, places: Sequence[int], draws: int
) -> tuple[Tensor, Tensor]:
    """Noises [K, N, *D] and sigmas [K, N], keyed by each prompt's place in the iteration.

    Sigma is logit-normal along the grid (SD3, arXiv 2403.03206), as in Flow-GRPO's DPO script.
    """
    noises, normals = [], []
    for draw in range(draws):
        keyed = [generator(seed, iteration, place, f"pair/{draw}") for place in places]
        noises.append(torch.cat([model.initial_noise(1, each) for each in keyed]))
        normals.append(torch.cat([torch.randn(1, generator=each, dtype=torch.float64) for each in keyed]))
    return torch.stack(noises), noise_levels(grid, torch.sigmoid(torch.stack(normals)))


def pair_sets(
    images: Tensor, prompts: Tensor, noises: Tensor, sigmas: Tensor, beta: float, differ: Tensor | None = None
) -> tuple[PairStep, ...]:
    """A set for each draw of ``noises`` [K, N, *D] and ``sigmas`` [K, N].

    ``images`` [N, 2, *D] at sigma 0; ``prompts`` [N], the pairs' rows of the conditioning; ``differ`` [N] as
    in ``PairStep``, all by default.
    """
    rows = prompts.to(images.device)
    there = torch.ones_like(rows, dtype=torch.bool) if differ is None else differ.to(images.device)
    sets = []
    for noise, sigma in zip(noises.to(images), sigmas.to(images), strict=True):
        both = noise.unsqueeze(1)
        s = sigma.view(-1, *[1] * (images.dim() - 1))
        x = (1 - s) * images + s * both
        sets.append(PairStep(beta, x, sigma, rows, both - images, there))
    return tuple(sets)
