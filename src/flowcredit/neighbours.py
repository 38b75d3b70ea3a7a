"""The objective of Neighbor GRPO (arXiv 2511.16955): a policy of distances between deterministic neighbours.

Axes: P prompts, G neighbours of a prompt, B anchors of a prompt, N = P B rows, *D latent dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcredit.credit import Neighbours
from flowcredit.objectives import Metrics
from flowcredit.policy_loss import clipped_loss
from flowcredit.transition import euler


@dataclass(frozen=True)
class NeighbourStep:
    """One step of the anchors: ``x`` [N, 1, *D], the neighbours' next states ``x_next`` [N, G, *D],
    ``log_prob`` [N, G] of the policy before the update, and ``advantages`` [N, G]."""

    sigma_next: float
    temperature: float
    clip_range: float
    x: Tensor
    sigma: Tensor
    prompts: Tensor
    x_next: Tensor
    log_prob: Tensor
    advantages: Tensor

    @property
    def terms(self) -> int:
        return self.advantages.shape[1]

    @property
    def counted(self) -> Tensor:
        return torch.ones_like(self.prompts, dtype=torch.bool)

    @property
    def live(self) -> Tensor:
        return (self.advantages != 0).any(1)

    @property
    def needs_reference(self) -> bool:
        return False

    def part(self, first: int, last: int) -> "NeighbourStep":
        return self.only(slice(first, last))

    def only(self, cut: slice | Tensor) -> "NeighbourStep":
        return replace(
            self,
            x=self.x[cut],
            sigma=self.sigma[cut],
            prompts=self.prompts[cut],
            x_next=self.x_next[cut],
            log_prob=self.log_prob[cut],
            advantages=self.advantages[cut],
        )

    def with_reference(self, v: Tensor) -> "NeighbourStep":
        return self

    def loss(self, v: Tensor) -> tuple[Tensor, Metrics]:
        sigma = float(self.sigma[0])
        stepped = euler(self.x, v, sigma, self.sigma_next)
        log_ratio = leaping_log_prob(stepped, self.x_next, self.temperature) - self.log_prob
        return clipped_loss(log_ratio, self.advantages, self.clip_range)


def leaping_log_prob(stepped: Tensor, x_next: Tensor, temperature: float) -> Tensor:
    """Log-probability that the policy leaps from a state to each neighbour's next: [N, G].

    Softmax over the neighbours of minus the squared distance to ``stepped`` [N, 1, *D], the mean over latent
    dimensions over the temperature (equation 8, which prints a sum and no temperature). ``x_next`` [N, G,
    *D].
    """
    distance = ((x_next - stepped) ** 2).flatten(2).mean(-1)
    return torch.log_softmax(-distance / temperature, dim=-1)


def neighbour_sets(
    recorded: Sequence[tuple[Tensor, Tensor]],
    sigmas: Sequence[tuple[float, float]],
    advantages: Tensor,
    anchors: Tensor,
    objective: Neighbours,
    clip_range: float,
) -> tuple[NeighbourStep, ...]:
    """The recorded steps of a rollout, in order: start and end states [P, G, *D] and their sigmas.

    ``advantages`` [P, G]; ``anchors`` [P, B] says which neighbours anchor.
    """
    prompts, count = anchors.shape
    device = recorded[0][0].device
    rows = torch.arange(prompts, device=device).repeat_interleave(count)
    chosen = anchors.to(device).flatten()
    spread = advantages.to(device)[rows]
    sets = []
    for (start, end), (sigma, sigma_next) in zip(recorded, sigmas, strict=True):
        neighbours = end[rows]
        before = leaping_log_prob(end[rows, chosen].unsqueeze(1), neighbours, objective.temperature)
        x = start[rows, chosen].unsqueeze(1)
        at = x.new_full((len(rows),), sigma)
        sets.append(
            NeighbourStep(
                sigma_next, objective.temperature, clip_range, x, at, rows, neighbours, before, spread
            )
        )
    return tuple(sets)
