"""Settings of how a run is carried out, beside what it learns: batches, scoring, evaluation, checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flowcredit.sections import Count, CountOrNone, Flag, Number, Section, Seed, Steps, Text, refuse


class RolloutSettings(Section):
    """How rollouts are computed."""

    batch_size: Count = 16
    """States in one velocity evaluation; 16, chosen for memory. Results depend on it by rounding alone."""
    prompts: Count | None = None
    """Prompts that each process rolls out together, and then scores, before it goes on with the next; all of
    them by default. Results depend on it by rounding alone."""


class ScoringSettings(Section):
    """How rewards are called."""

    batch_size: Count = 16
    """Images handed to a reward at once; 16, chosen for memory."""
    on_error: Literal["stop", "skip"] = "stop"
    """When a reward fails: `stop` the run, or `skip` its images, which then have no score and no advantage
    (never 0 instead)."""
    timeout_s: Annotated[Number, Field(gt=0, le=86400)] | None = None
    """Seconds after which a call of a reward counts as failed; no limit by default."""
    offload: Flag = False
    """Let each reward's networks wait in the CPU's memory and be on the device only while they score; off."""
    overlap: Flag = False
    """Call rewards while the next prompts are rolled out (see rollout.prompts), or the next images are
    decoded, instead of waiting for them; with the same results. Off, as quick rewards need."""

    @model_validator(mode="after")
    def _waits_or_overlaps(self) -> "ScoringSettings":
        if self.offload and self.overlap:
            refuse(
                "overlap",
                "true, while scoring.offload keeps rewards off the device so that rollouts have it alone",
                "one of the two",
            )
        return self


class EvaluationSettings(Section):
    """The evaluation on held-out prompts."""

    every: CountOrNone = 25
    """Iterations between evaluations, 0 for only before and after the run; 25, chosen for time."""
    prompts: Count = 64
    """Prompts taken from the head of the held-out file, or all if it has fewer; 64, chosen for time."""
    num_steps: Steps | None = None
    """Deterministic sampling steps; as many as the algorithm's by default."""
    seed: Seed = 0
    """Seed of the initial noises, the same at every evaluation; 0."""
    group_by: Text | None = None
    """Column of the prompt file by which the table is split, such as `task`; none by default."""
    batch_size: Count = 16
    """Images sampled at once; 16, chosen for memory."""
    images: CountOrNone = 16
    """Images shown in the grids before and after, or as many as there are prompts; 16, chosen for a page."""


class CheckpointSettings(Section):
    """What is kept for resuming."""

    every: Count = 1
    """Iterations between checkpoints; 1, so that a killed run loses no finished iteration."""
    keep_last: Count = 2
    """Newest checkpoints kept; 2, should the newest be damaged."""
    keep_best: CountOrNone = 0
    """Checkpoints kept besides, of the iterations whose trained rewards on held-out prompts are highest; they
    are then also written at every evaluation. None: 0."""


TrackerName = Literal["tensorboard", "wandb", "trackio"]


class LoggingSettings(Section):
    """What is told while it runs."""

    every: Count = 1
    """Iterations between lines on the console; 1. The JSONL log holds every iteration."""
    trackers: Literal["auto"] | tuple[TrackerName, ...] = "auto"
    """Where figures and held-out images are shown besides: a list of `tensorboard`, `wandb`, `trackio`; `[]`
    for none. `auto` is TensorBoard where it is installed."""
    project: Text = "flowcredit"
    """The project's name for `wandb` and `trackio`; flowcredit."""


class ParallelSettings(Section):
    """Several processes under torchrun, one for each device."""

    sharding: Literal["replicated", "sharded"] = "replicated"
    """Whether every process holds all weights, or a part of the trained network's weights, gradients and
    optimizer state (FSDP2), for networks too large for one device; replicated, as small ones need."""
    timeout_s: Annotated[Number, Field(ge=1, le=86400)] = 1800.0
    """Seconds that a process waits for the others before the run ends; 1800, chosen for slow rewards."""


class GuardSettings(Section):
    """What is watched for a collapse of the policy, and what is done when it comes."""

    action: Literal["off", "warn", "stop", "return"] = "warn"
    """On a collapse: `warn`, `stop` the run, or `return` to the best checkpoint and go on at a lower learning
    rate; warn, as a run that recovers shall not be lost."""
    heldout_errors: Annotated[Number, Field(gt=0, le=1000)] = 4.0
    """A trained reward has collapsed on held-out prompts where it has fallen below the model before training
    by more than so many standard errors of the change; 4, which chance hardly reaches. In rollouts where its
    mean has fallen as far below that of the first iteration, `patience` times."""
    heldout_lost: Annotated[Number, Field(gt=0, le=1)] = 0.5
    """And where it has lost more than this share of its best gain, by as many standard errors; half."""
    image_spread: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    """Images have collapsed where those of a prompt differ by less than this share of what they did in the
    first iteration (image_spread of the log); a tenth, 0 for never."""
    kl: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    """Largest KL divergence from the reference (kl_reference of the log, where there is one); no limit."""
    ratio: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    """Largest |ratio - 1| (ratio_max_deviation of the log); no limit."""
    clip_fraction: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Largest share of clipped ratios; no limit, as G²RPO's narrow range clips most of them."""
    patience: Count = 3
    """Iterations in a row in which a sign that is no evaluation must hold; 3, for an odd batch is none."""
    returns: Count = 2
    """How often a run returns before it stops; 2."""
    rate: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    """What the learning rate is multiplied by at each return; half: at the same rate all would come again."""
