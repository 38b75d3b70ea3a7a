"""Every setting of a run: what it is, its unit, its bounds, its default and where that comes from.

"G²RPO" below is arXiv 2510.01982 and its released code for FLUX.1-dev; "Flow-GRPO" is arXiv 2505.05470.
Settings are frozen. Reading them from a file: ``flowcredit.recipe_io``.
"""

from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict, model_validator
from pydantic_core import PydanticCustomError

# Strict: 1.5 is no count, true no number, and "1" neither.
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Field(min_length=1)]
Pixels = Annotated[Whole, Field(ge=8, le=4096)]
Steps = Annotated[Whole, Field(ge=1, le=1000)]
Count = Annotated[Whole, Field(ge=1, le=1_000_000)]
CountOrNone = Annotated[Whole, Field(ge=0, le=1_000_000)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63)]
Positive = Annotated[Number, Field(gt=0, le=1e6)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
PositiveFraction = Annotated[Number, Field(gt=0, lt=1)]


def _refuse(setting: str, found: str, expected: str) -> NoReturn:
    """A cross-check's refusal; ``setting``, dotted from the checked section on, is where it points."""
    raise PydanticCustomError(
        "cross_check",
        "{found}; expected {expected}",
        {"setting": setting, "found": found, "expected": expected},
    )


def _refuse_repeats(setting: str, values: tuple[object, ...]) -> None:
    for value in values:
        if values.count(value) > 1:
            _refuse(setting, f"{value!r} stands there more than once", "each once")


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


NAME_ALONE = BeforeValidator(_named)
"""Lets ``algorithm: g2rpo`` stand for ``algorithm: {name: g2rpo}``."""


class Section(BaseModel):
    """A group of settings: cannot be changed once read, and knows no setting but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ModelSettings(Section):
    """The model that is aligned."""

    path: Text
    """Pipeline folder in diffusers' format, relative to the current one, or `bundled:shapes`. Required."""
    height: Pixels = 720
    """Image height in pixels; 720 as in G²RPO's runs."""
    width: Pixels = 720
    """Image width in pixels; 720 as in G²RPO's runs."""
    guidance_scale: Annotated[Number, Field(ge=0, le=100)] = 3.5
    """Guidance, in rollout, training and evaluation alike; 3.5 as in G²RPO's runs."""
    max_sequence_length: Annotated[Whole, Field(ge=1, le=4096)] = 512
    """Tokens of the long text encoder (T5); 512 as in diffusers' FluxPipeline."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Storage type of what is not trained (text encoders, VAE, the base under LoRA); bfloat16 as FLUX.1-dev
    is published. Trained weights are float32."""
    device: Text = "auto"
    """`auto` (a GPU if there is one), or a device of torch such as `cpu` or `cuda:1`."""
    decode_batch_size: Count = 8
    """Latents decoded to images at once; 8, chosen for memory."""


class PromptSettings(Section):
    """The prompt files."""

    train: Text
    """Prompts to train on: a .txt or .jsonl file, or bundled ones: `bundled:shapes/train`. Required."""
    heldout: Text
    """Prompts to evaluate on, in the same formats; best with none of the prompts of `train`. Required."""


class G2RPOSettings(Section):
    """Granular-GRPO: one stochastic step at a time, several strides to the image (arXiv 2510.01982)."""

    name: Literal["g2rpo"] = "g2rpo"
    """The method; it decides which further settings there are."""
    num_steps: Annotated[Whole, Field(ge=2, le=1000)] = 16
    """Steps T of the sampling grid; 16 as in G²RPO's runs."""
    train_steps: Literal["first_half"] | Annotated[tuple[Whole, ...], Field(min_length=1)] = "first_half"
    """Grid steps M that are made stochastic and trained, as indices from 0 (noise) and never the last;
    `first_half`, 0 to T/2 - 1, as in G²RPO's runs."""
    group_size: Annotated[Whole, Field(ge=2, le=4096)] = 12
    """Branches G for each prompt and trained step; 12 as in G²RPO's runs."""
    strides: Annotated[tuple[Steps, ...], Field(min_length=1)] = (1, 2, 3)
    """Strides Λ by which each branch is finished, an image and an advantage for each; 1, 2, 3 as in the
    paper (its scripts have 1, 2)."""
    anchor: Literal["end", "branch"] = "end"
    """Whence strides are counted: the clean `end` (the paper) or the `branch` (its released code)."""
    combine: Literal["sum", "mean"] = "sum"
    """How the advantages of the strides become one; `sum` as in G²RPO."""
    advantage_clamp: Positive = 5.0
    """Advantages are cut to plus and minus this; 5 as in G²RPO's released code."""
    initial_noise: Literal["shared", "separate"] = "shared"
    """One initial noise for all branches of a prompt, or one for each, at the cost of a trunk and a trained
    state for each; `shared` as in G²RPO."""

    @property
    def train_indices(self) -> tuple[Whole, ...]:
        """``train_steps`` written out, ascending."""
        if self.train_steps == "first_half":
            return tuple(range(self.num_steps // 2))
        return tuple(sorted(self.train_steps))

    @model_validator(mode="after")
    def _fits_the_grid(self) -> "G2RPOSettings":
        last = self.num_steps - 1
        for step in self.train_indices:
            if not 0 <= step < last:
                why = " (its noise would stay in the image)" if step == last else ""
                _refuse(
                    "train_steps",
                    f"step {step} of {self.num_steps} cannot be trained{why}",
                    f"0 to {last - 1}",
                )
        _refuse_repeats("train_steps", self.train_indices)
        _refuse_repeats("strides", self.strides)
        if max(self.strides) > self.num_steps:
            _refuse(
                "strides", f"stride {max(self.strides)} is longer than the grid", f"at most {self.num_steps}"
            )
        return self


# With a second method: Annotated[G2RPOSettings | OtherSettings, Field(discriminator="name")].
AlgorithmSettings = G2RPOSettings


class GridSettings(Section):
    """The sigmas of sampling."""

    kind: Literal["shifted_linear", "resolution_shift", "scheduler"] = "shifted_linear"
    """Shifted linear (G²RPO), shifted by the image's resolution (as FLUX samples), or what the model's own
    scheduler gives."""
    shift: Annotated[Number, Field(gt=0, le=100)] = 3.0
    """Shift a in sigma = a u / (1 + (a - 1) u), for kind `shifted_linear` alone; 3 as in G²RPO's runs."""


class NoiseSettings(Section):
    """The stochastic step."""

    kind: Literal["flow_sde", "dance_sde", "cps", "cps_squared_error", "table"] = "flow_sde"
    """Flow-SDE (G²RPO, Flow-GRPO), Dance-SDE, Flow-CPS scored by its density or as its authors score it, or
    Dance-SDE with a level for each step."""
    eta: Positive = 0.7
    """Noise level η, for all kinds but `table`; 0.7 as in G²RPO's runs."""
    table: Text | None = None
    """File with a level ψ for each grid step (a list in YAML or JSON), for kind `table` alone."""

    @model_validator(mode="after")
    def _level_fits_kind(self) -> "NoiseSettings":
        if self.kind == "table" and self.table is None:
            _refuse("table", "noise kind 'table' is given no file of levels", "a path")
        if self.kind != "table" and self.table is not None:
            _refuse("table", f"noise kind '{self.kind}' reads no table", "null, or noise.kind 'table'")
        if self.kind.startswith("cps") and self.eta > 1:
            _refuse("eta", f"Flow-CPS cannot use a level of {self.eta}", "at most 1")
        return self


class WatchedReward(Section):
    """A reward that is only measured."""

    name: Text
    """A reward by name (`shapes`, `clip`) or as `module:attribute`. Required."""
    options: dict[str, JsonValue] = {}
    """What the reward itself takes, such as a model folder; nothing by default."""


class RewardSettings(WatchedReward):
    """A reward that is trained."""

    weight: Annotated[Number, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor on this reward's advantages before rewards are added; 1 as in G²RPO."""


class RolloutSettings(Section):
    """How rollouts are computed."""

    batch_size: Count = 16
    """States in one velocity evaluation; 16, chosen for memory. Results depend on it by rounding alone."""


class ScoringSettings(Section):
    """How rewards are called."""

    batch_size: Count = 16
    """Images handed to a reward at once; 16, chosen for memory."""
    on_error: Literal["stop", "skip"] = "stop"
    """When a reward fails: `stop` the run, or `skip` its images, which then have no score and no advantage
    (never 0 instead)."""
    timeout_s: Annotated[Number, Field(gt=0, le=86400)] | None = None
    """Seconds after which a call of a reward counts as failed; no limit by default."""


class TrainSettings(Section):
    """The optimisation."""

    iterations: Count = 300
    """Rollouts of the run; 300 after the 301 updates of G²RPO's runs."""
    prompts_per_iteration: Count = 16
    """Prompts of one rollout, over all processes; 16, as G²RPO's one on each of 16 GPUs."""
    update: Literal["per_step", "accumulated"] = "per_step"
    """An optimizer step for each trained grid step (ratios move, and are clipped) or one for the rollout;
    G²RPO's released code has both."""
    clip_range: PositiveFraction = 1e-4
    """Clipping ε of the probability ratio; 1e-4 as in G²RPO's runs."""
    learning_rate: PositiveFraction = 2e-6
    """AdamW's highest learning rate; 2e-6 as in G²RPO's full fine-tuning."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's decay of the first and the second moment; 0.9 and 0.999 as in G²RPO's runs."""
    weight_decay: Fraction = 1e-4
    """AdamW's weight decay; 1e-4 as in G²RPO's runs."""
    adam_epsilon: PositiveFraction = 1e-8
    """AdamW's ε beside the root of the second moment; 1e-8 as in torch."""
    max_grad_norm: Positive = 1.0
    """Total norm to which gradients are scaled down; 1 as in G²RPO's runs."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after the warm-up: constant (G²RPO), or falling to 0 at the last iteration."""
    warmup_iterations: CountOrNone = 0
    """Iterations in which the learning rate rises from 0; none in G²RPO's runs."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """Autocast of the trained network, in rollout, training and evaluation; bf16 as in G²RPO's runs."""
    micro_batch_size: Count = 1
    """Distinct states in one training forward, their gradients added up; 1, chosen for memory."""
    gradient_checkpointing: Flag = False
    """Compute activations anew in the backward, for less memory and more time; off, as small models need."""
    ema_decay: Fraction = 0.0
    """Decay of the weights' moving average, which is then evaluated and exported; 0, off, as in G²RPO."""
    ratio_tolerance: PositiveFraction = 1e-4
    """How far the ratio on fresh rollouts may stray from 1 before the run stops, without mixed precision;
    1e-4, the clipping's own size."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> "TrainSettings":
        if self.warmup_iterations >= self.iterations:
            warmup = self.warmup_iterations
            _refuse(
                "warmup_iterations",
                f"{warmup} leaves no iteration after the warm-up",
                f"below {self.iterations}",
            )
        return self


class WeightSettings(Section):
    """What is trained."""

    method: Literal["full", "lora"] = "full"
    """All weights of the network, or low-rank adapters on a frozen one; full as in G²RPO's runs."""
    rank: Annotated[Whole, Field(ge=1, le=4096)] = 64
    """Rank of the adapters, for `lora` alone; 64 as in Flow-GRPO on FLUX.1-dev."""
    alpha: Positive = 128.0
    """Adapters count alpha / rank times, for `lora` alone; 128 as in Flow-GRPO on FLUX.1-dev."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] = ("to_q", "to_k", "to_v", "to_out.0")
    """Ends of the names of the layers with adapters, for `lora` alone; the attention's projections, as in
    the LoRA scripts of diffusers."""


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


class LoggingSettings(Section):
    """What is told while it runs."""

    every: Count = 1
    """Iterations between lines on the console; 1. The JSONL log holds every iteration."""


class Recipe(Section):
    """One run: everything that decides its course."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the run and of its folder, of letters, digits, dots, dashes and underscores. Required."""
    seed: Seed = 0
    """Seed of every random draw of the run; 0."""
    output: Text = "runs"
    """Folder in which the runs' folders are made; `runs`."""
    model: ModelSettings
    prompts: PromptSettings
    algorithm: Annotated[AlgorithmSettings, NAME_ALONE] = G2RPOSettings()
    """The method and its settings, or its name alone."""
    grid: GridSettings = GridSettings()
    noise: NoiseSettings = NoiseSettings()
    rewards: Annotated[tuple[Annotated[RewardSettings, NAME_ALONE], ...], Field(min_length=1)]
    """The rewards that are trained, their advantages weighted and added. Required."""
    watch: tuple[Annotated[WatchedReward, NAME_ALONE], ...] = ()
    """Rewards that are measured at every evaluation and never trained; none by default."""
    rollout: RolloutSettings = RolloutSettings()
    scoring: ScoringSettings = ScoringSettings()
    train: TrainSettings = TrainSettings()
    weights: WeightSettings = WeightSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()

    @model_validator(mode="after")
    def _rewards_differ(self) -> "Recipe":
        trained = tuple(reward.name for reward in self.rewards)
        _refuse_repeats("rewards", trained)
        _refuse_repeats("watch", tuple(reward.name for reward in self.watch))
        for index, reward in enumerate(self.watch):
            if reward.name in trained:
                _refuse(
                    f"watch.{index}", f"'{reward.name}' is among rewards, so it is measured", "another reward"
                )
        return self
