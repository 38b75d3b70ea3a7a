"""Every setting of a run: what it is, its unit, its bounds, its default and where that comes from.

"G²RPO" below is arXiv 2510.01982 and its released code for FLUX.1-dev; "Flow-GRPO" is arXiv 2505.05470.
Settings are frozen. Reading them from a file: ``flowcredit.recipe_io``.
"""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from flowcredit.methods import AlgorithmSettings, G2RPOSettings, with_method_defaults
from flowcredit.running import (
    CheckpointSettings,
    EvaluationSettings,
    GuardSettings,
    LoggingSettings,
    ParallelSettings,
    RolloutSettings,
    ScoringSettings,
)
from flowcredit.sections import (
    NAME_ALONE,
    Count,
    CountOrNone,
    Flag,
    Fraction,
    NonNegative,
    Number,
    Pixels,
    Positive,
    PositiveFraction,
    Section,
    Seed,
    Text,
    Whole,
    refuse,
    refuse_repeats,
)


class ModelSettings(Section):
    """The model that is aligned."""

    path: Text
    """Pipeline folder in diffusers' format, relative to the current one, or `bundled:shapes`. Required."""
    adapter: Text | None = None
    """An adapter of one's own as `module:attribute`, for a pipeline class that has none here; it is code, and
    runs. None by default: the class in the folder's model_index.json chooses."""
    lora: Text | None = None
    """A LoRA (a folder, such as final/ of a LoRA's run, or a .safetensors file) that is added to the weights
    before anything else; none by default. What is trained on top of it needs it again."""
    height: Pixels = 720
    """Image height in pixels; 720 as in G²RPO's runs."""
    width: Pixels = 720
    """Image width in pixels; 720 as in G²RPO's runs."""
    guidance_scale: Annotated[Number, Field(ge=0, le=100)] = 3.5
    """Guidance, in rollout, training and evaluation alike; 3.5 as in G²RPO's runs. Embedded for FLUX.1;
    classifier-free elsewhere, where 1 and less mean none."""
    negative_prompt: Annotated[str, Field(max_length=10_000)] = ""
    """Text that classifier-free guidance leads away from; empty as in diffusers' pipelines."""
    max_sequence_length: Annotated[Whole, Field(ge=1, le=4096)] = 512
    """Tokens of the long text encoder (T5, Qwen); 512 as in diffusers' FluxPipeline (256 in that of SD3)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Storage type of what is not trained (text encoders, VAE, the base under LoRA); bfloat16 as FLUX.1-dev
    is published. Trained weights are float32."""
    device: Text = "auto"
    """`auto` (a GPU if there is one), or a device of torch such as `cpu` or `cuda:1`."""
    text_cache: Text | None = None
    """Folder in which prompt embeddings are kept, so that each prompt is read by the text encoders once, over
    all runs; none by default. FLUX.1-dev's take 4 MB a prompt."""
    decode_batch_size: Count = 8
    """Latents decoded to images at once; 8, chosen for memory."""
    offload: tuple[Literal["text_encoders", "vae"], ...] = ()
    """Parts that wait in the CPU's memory and are on the device only while they work: the text encoders while
    they read prompts that `text_cache` does not hold, the VAE while it decodes; none by default."""
    vae_slicing: Flag = False
    """Let the VAE decode the images of a batch one after the other (diffusers' enable_slicing): less memory,
    the same images up to rounding; off."""
    vae_tiling: Flag = False
    """Let the VAE decode large images in tiles that are blended (diffusers' enable_tiling): less memory, and
    images that are no longer quite the same; off."""
    compile: Flag = False
    """Compile the trained network (torch.compile), in rollout, training and evaluation alike: the first calls
    take minutes, later ones less time; off. Its rounding differs from that of the network as it is."""

    @model_validator(mode="after")
    def _each_part_once(self) -> "ModelSettings":
        refuse_repeats("offload", self.offload)
        return self


class PromptSettings(Section):
    """The prompt files."""

    train: Text
    """Prompts to train on: a .txt, .jsonl, .json, .csv, .tsv or .parquet file, a folder of parquet files, a
    data set of the Hugging Face hub (`hf:owner/name@revision#split`), or `bundled:shapes/train`. Required."""
    heldout: Text
    """Prompts to evaluate on, in the same formats; best with none of the prompts of `train`. Required."""
    column: Text = "prompt"
    """The column (or key) of both that holds the prompt; the others are there for rewards to ask for."""


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
    Dance-SDE with a level for each step. DanceGRPO and Flow-GRPO-Fast have their own by default."""
    eta: Positive = 0.7
    """Noise level η, for all kinds but `table`; 0.7 as in G²RPO's runs."""
    table: Text | None = None
    """File with a level ψ for each grid step (a list in YAML or JSON), for kind `table` alone."""

    @model_validator(mode="before")
    @classmethod
    def _a_table_names_its_kind(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("table") is not None and "kind" not in value:
            return {"kind": "table", **value}
        return value

    @model_validator(mode="after")
    def _level_fits_kind(self) -> "NoiseSettings":
        if self.kind == "table" and self.table is None:
            refuse("table", "noise kind 'table' is given no file of levels", "a path")
        if self.kind != "table" and self.table is not None:
            refuse("table", f"noise kind '{self.kind}' reads no table", "null, or noise.kind 'table'")
        if self.kind.startswith("cps") and self.eta > 1:
            refuse("eta", f"Flow-CPS cannot use a level of {self.eta}", "at most 1")
        return self


class WatchedReward(Section):
    """A reward that is only measured."""

    name: Text
    """A reward by name (`shapes`, `clip`), with a label (`http/deqa`) where there are several of a kind, or
    as `module:attribute`. Required."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """What the reward itself takes, such as a model folder; nothing by default."""


class RewardSettings(WatchedReward):
    """A reward that is trained."""

    weight: Annotated[Number, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor on this reward's advantages before rewards are added (`train.reward_weights_on`); 1 as in
    G²RPO."""


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
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or a gradient is no finite number: `stop` the run, or `skip` that optimizer step and count
    it; stop. Either way the batch is kept in the run's folder, faults/, for flowcredit replay."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after the warm-up: constant (G²RPO), or falling to 0 at the last iteration."""
    warmup_iterations: CountOrNone = 0
    """Iterations in which the learning rate rises from 0; none in G²RPO's runs."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """Autocast of the trained network, in rollout, training and evaluation; bf16 as in G²RPO's runs."""
    micro_batch_size: Count = 1
    """Distinct states (for dpo, pairs of them) in one training forward, their gradients added up; 1, chosen
    for memory."""
    gradient_checkpointing: Flag = False
    """Compute activations anew in the backward, for less memory and more time; off, as small models need."""
    ema_decay: Fraction = 0.0
    """Decay of the weights' moving average, which is then evaluated and exported; 0, off, as in G²RPO."""
    reward_weights_on: Literal["advantages", "rewards"] = "advantages"
    """What the rewards' weights multiply before they are added: each reward's `advantages`, so that none
    dominates by its unit (G²RPO), or the `rewards` themselves, whose sum is then normalised."""
    kl_weight: NonNegative = 0.0
    """Weight β of the KL divergence of each trained step from the model before training; 0, none, as in
    G²RPO (Flow-GRPO takes 0.01 to 0.04 of a KL that is -dt times this, TempFlow-GRPO 0.001 to 0.004 of this).
    """
    ratio: Literal["plain", "guarded"] = "plain"
    """The probability ratio as it is, or `guarded`: without its drift and on one scale for every step, with
    steps' gradients balanced (GRPO-Guard, arXiv 2510.22319, which clips at 2e-6 to 4e-6); plain as in
    G²RPO."""
    step_weights: Literal["equal", "noise"] = "equal"
    """Weights of the trained steps: `equal`, or each step's own `noise`, its standard deviation over their
    mean (TempFlow-GRPO, arXiv 2508.04324); equal as in G²RPO."""
    ratio_tolerance: PositiveFraction = 1e-4
    """How far the ratio on fresh rollouts may stray from 1 before the run stops, without mixed precision;
    1e-4, the clipping's own size."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> "TrainSettings":
        if self.warmup_iterations >= self.iterations:
            warmup = self.warmup_iterations
            refuse(
                "warmup_iterations",
                f"{warmup} leaves none of the {self.iterations} of train.iterations after the warm-up",
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
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Ends of the names of the layers with adapters, for `lora` alone; by default the attention's
    projections to_q, to_k, to_v and to_out.0, as in the LoRA scripts of diffusers, and for SD3 and
    Qwen-Image the further layers that Flow-GRPO's scripts name."""

    @model_validator(mode="after")
    def _adapters_are_asked_for(self) -> "WeightSettings":
        if self.method == "full":
            # Not the targets: resolved recipes of runs before they depended on the family name them all.
            for name in ("rank", "alpha"):
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    refuse(
                        name, f"{value} is for adapters, but method 'full' has none", "weights.method lora"
                    )
        return self


class CalibrationSettings(Section):
    """How `flowcredit calibrate` finds a noise level for each step (Algorithm 1 of DenseGRPO, arXiv
    2601.20218)."""

    trajectories: Annotated[Whole, Field(ge=2, le=1_000_000)] = 512
    """Trajectories that judge the steps in each round, at least; 512, open in the paper."""
    tolerance: PositiveFraction = 0.1
    """A step is balanced where the shares of trajectories that gain and that lose by it differ by less than
    this; 0.1, between 45 and 55 % (the paper's ε1 is a count, 2)."""
    step: PositiveFraction = 0.1
    """By how much a level moves in a round, as a share of its start; 0.1, halved as the level settles (the
    paper's ε2 is 0.01, always)."""
    floor: Positive = 0.01
    """Lowest level; 0.01, open in the paper."""
    turns: Count = 2
    """Changes between balanced and not after which a step is settled; 2, open in the paper."""
    rounds: Count = 60
    """Rounds after which it ends, settled or not; 60, open in the paper."""


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
    rewards: tuple[Annotated[RewardSettings, NAME_ALONE], ...]
    """The rewards that are trained, their advantages weighted and added; none, `[]`, where the method learns
    from a file's pairs. Required."""
    watch: tuple[Annotated[WatchedReward, NAME_ALONE], ...] = ()
    """Rewards that are measured at every evaluation and never trained; none by default."""
    rollout: RolloutSettings = RolloutSettings()
    scoring: ScoringSettings = ScoringSettings()
    train: TrainSettings = TrainSettings()
    weights: WeightSettings = WeightSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    guard: GuardSettings = GuardSettings()
    logging: LoggingSettings = LoggingSettings()
    parallel: ParallelSettings = ParallelSettings()
    calibration: CalibrationSettings = CalibrationSettings()

    @model_validator(mode="before")
    @classmethod
    def _as_its_method_has_it(cls, value: object) -> object:
        return with_method_defaults(value)

    @model_validator(mode="after")
    def _guard_has_a_density(self) -> "Recipe":
        if self.train.ratio == "guarded" and self.noise.kind == "cps_squared_error":
            refuse(
                "train.ratio",
                "'guarded' mends a ratio of densities, but noise kind 'cps_squared_error' has none",
                "plain, or noise.kind cps",
            )
        return self

    @model_validator(mode="after")
    def _its_method_reads_it(self) -> "Recipe":
        method, train = self.algorithm, self.train
        for name in method.unread:
            value, default = getattr(train, name), TrainSettings.model_fields[name].default
            if value != default:
                refuse(
                    f"train.{name}", f"{value!r}, which algorithm {method.name} does not read", f"{default!r}"
                )
        if method.reads_rewards and not self.rewards:
            refuse("rewards", "there is none to train", "at least 1 in the list")
        if self.rewards and not method.reads_rewards:
            refuse("rewards", "pairs from a file train no reward", "[], with what is to be measured in watch")
        return self

    @model_validator(mode="after")
    def _rewards_differ(self) -> "Recipe":
        trained = tuple(reward.name for reward in self.rewards)
        refuse_repeats("rewards", trained)
        refuse_repeats("watch", tuple(reward.name for reward in self.watch))
        for index, reward in enumerate(self.watch):
            if reward.name in trained:
                others = ", ".join(each.name for each in self.watch if each.name not in trained)
                refuse(
                    f"watch.{index}",
                    f"'{reward.name}' is among rewards, so it is measured",
                    f"it to be left out, as in watch=[{others}]",
                )
        return self
