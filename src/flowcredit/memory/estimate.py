"""Parameters and memory of a run, by part and by phase, before anything is loaded.

Counted are tensors. A process takes more: the device's own context, what its allocator keeps between uses,
the workspaces of convolutions and matrix products. Not counted are the passes of text encoders and rewards.
"""

from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

from flowcredit import algorithms
from flowcredit.config import Recipe, WatchedReward
from flowcredit.errors import InputError
from flowcredit.limits import ends_in
from flowcredit.memory.activations import Passes, Work, decoding, decoding_flops, image_bytes
from flowcredit.memory.families import FAMILIES, inputs_of, network_of, rows_per_evaluation
from flowcredit.memory.folders import (
    Pipeline,
    published_pipeline,
    published_reward,
    read_pipeline,
    read_shapes,
)
from flowcredit.memory.sharded import Shares, shares
from flowcredit.memory.tape import FLOAT
from flowcredit.shapes import bundled_path

WIDTHS = {"float32": 4, "bfloat16": 2}
WEIGHTLESS = ("shapes", "shapes_exact", "sharpness", "ocr", "http", "chat")
"""Rewards without a network on this device."""
MODEL_OPTIONS = ("path", "detector", "clip")
"""Options of rewards that name a model's files."""


@dataclass(frozen=True)
class Part:
    """A part of a run's memory in bytes; None where it cannot be told, and ``note`` says why."""

    name: str
    size: int | None
    note: str = ""


@dataclass(frozen=True)
class Estimate:
    """``trained`` and ``parameters`` count numbers, ``parts`` and ``phases`` bytes.

    A phase holds the parts that stay and its own; ``peak`` is the largest phase. ``published`` names the
    model whose published config stands in for a folder that is not there. ``rows``: the network's rows for
    each velocity evaluation.
    """

    published: str | None
    parameters: dict[str, int | None]
    trained: int | None
    rows: int
    parts: tuple[Part, ...]
    phases: dict[str, int] = field(default_factory=dict)
    work: Work | None = None

    @property
    def peak(self) -> int | None:
        return max(self.phases.values(), default=None)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts that no phase contains, because their size cannot be told."""
        return tuple(part.name for part in self.parts if part.size is None)


def find_pipeline(recipe: Recipe) -> Pipeline | None:
    """The recipe's pipeline by its folder, or by its folder's name among the published ones; or None.

    Raises InputError for files that cannot be read, and for a pipeline without its network or its VAE.
    """
    folder = bundled_path(recipe.model.path)
    found = read_pipeline(folder) if (folder / "model_index.json").is_file() else published_pipeline(folder)
    if found is None or found.kind not in FAMILIES:
        return None
    for part in (FAMILIES[found.kind].part, "vae"):
        if part not in found.parts:
            raise InputError(
                f"model {folder}: model_index.json lists no {part}; expected a whole {found.kind}"
            )
    return found


def estimate(recipe: Recipe, processes: int = 1) -> Estimate | None:
    """Parameters and memory of a recipe; None where neither folder nor a published config tells.

    Of the first iteration's tree, and of each of so many processes. Raises InputError for files that cannot
    be read.
    """
    pipeline = find_pipeline(recipe)
    if pipeline is None:
        return None
    try:
        algorithm = algorithms.build(recipe.algorithm, recipe.seed)
        return _Reckoning(recipe, algorithm, pipeline, processes).estimate()
    except (KeyError, TypeError) as error:
        raise InputError(
            f"model {recipe.model.path}: a config.json holds a value of another kind ({error}); expected the"
            " configs that diffusers writes"
        ) from None


class _Reckoning:
    """One recipe on one pipeline."""

    def __init__(
        self, recipe: Recipe, algorithm: algorithms.Algorithm, pipeline: Pipeline, processes: int
    ) -> None:
        self.recipe, self.plan, self.pipeline = recipe, algorithm.plan, pipeline
        self.set_states = algorithm.set_states(algorithm.plan)
        self.family = FAMILIES[pipeline.kind]
        self.component = pipeline.parts[self.family.part]
        self.full = recipe.weights.method == "full"
        self.gpu = not recipe.model.device.startswith("cpu")
        self.width = WIDTHS[recipe.model.dtype]
        self.stored = FLOAT if self.full else self.width
        self.rows = rows_per_evaluation(pipeline, recipe.model)
        self.inputs = inputs_of(pipeline, recipe.model)
        self.prompts = -(-recipe.train.prompts_per_iteration // processes)
        self.shares = Shares()
        if recipe.parallel.sharding == "sharded":
            gathered = 2 if recipe.train.mixed_precision == "bf16" else self.stored
            self.shares = shares(self.component, processes, gathered)
        targets = self.family.targets if recipe.weights.targets is None else recipe.weights.targets
        network = network_of(pipeline)
        self.passes = None
        if network is not None:
            compute = 2 if recipe.train.mixed_precision == "bf16" else None
            self.passes = Passes(
                network,
                self.component,
                self.inputs,
                # Weights that are spread are gathered in the type that they are computed with.
                self.stored if self.shares.processes == 1 or compute is None else compute,
                compute,
                self.gpu,
                self.full,
                0 if self.full else recipe.weights.rank,
                partial(ends_in, targets),
                recipe.train.gradient_checkpointing,
                self.shares.processes,
            )
        self.targets = targets

    @property
    def trained(self) -> int | None:
        """Numbers that the optimizer moves: every parameter, or rank (in + out) for each adapted layer."""
        if self.full:
            return self.component.count if self.passes is None else self._parameters
        shapes = self.component.shapes
        layers: list[tuple[int, ...]] = []
        if shapes is not None:
            layers = [
                shape
                for name, shape in shapes.items()
                if len(shape) == 2 and ends_in(self.targets, name.removesuffix(".weight"))
            ]
        elif self.passes is not None:
            layers = [s for name, s in self.passes.linear_layers().items() if ends_in(self.targets, name)]
        else:
            return None
        return sum(self.recipe.weights.rank * sum(shape) for shape in layers)

    @property
    def _parameters(self) -> int | None:
        """Of the network, its buffers left out: the positions of SD3."""
        count = self.component.count
        if count is None or self.component.kind != "SD3Transformer2DModel":
            return count
        config = self.component.config
        width = config["num_attention_heads"] * config["attention_head_dim"]
        return count - config["pos_embed_max_size"] ** 2 * width

    def estimate(self) -> Estimate:
        standing, passing = self._standing(), self._passing()
        away = {part.name: part.size or 0 for part in standing if self._waits(part.name)}
        resident = sum(part.size or 0 for part in standing) - sum(away.values())
        phases = {}
        if self.passes is not None and self.trained is not None:
            phases = {name: resident + size for name, size in self._phases(passing).items()}
            if away:
                for name in phases.keys() & {"scoring", "evaluation"}:
                    # One reward at a time comes back, or the VAE before them.
                    phases[name] += max((s for n, s in away.items() if n != "text encoders"), default=0)
                phases["text encoding"] = resident + away.get("text encoders", 0)
        return Estimate(
            self.pipeline.published,
            {name: part.count for name, part in self.pipeline.parts.items() if part.kind not in _UNCOUNTED},
            self.trained,
            self.rows,
            (*standing, *passing.values()),
            phases,
            self._work(),
        )

    def _work(self) -> Work | None:
        if self.passes is None or self._parameters is None:
            return None
        compute = self.passes.compute
        return Work(
            self.passes.flops(self.rows),
            decoding_flops(self.pipeline.parts["vae"], self.inputs),
            self._parameters,
            self.stored if compute is None else compute,
        )

    def _waits(self, name: str) -> bool:
        """Whether a part is elsewhere while the network works."""
        parts = {"text encoders": "text_encoders", "VAE": "vae"}
        if name in parts:
            return parts[name] in self.recipe.model.offload
        return name.startswith("reward ") and self.recipe.scoring.offload

    def _standing(self) -> list[Part]:
        """What is there from the beginning of a run, or from its first update, to its end."""
        recipe, trained = self.recipe, self.trained
        network = self.component.count
        share = self.shares.of
        parts = [Part(f"{self.family.part} weights", share(_times(network, self.stored)))]
        if not self.full:
            parts.append(Part("adapter weights", share(_times(trained, FLOAT))))
        texts = [each for name, each in self.pipeline.parts.items() if name.startswith("text_encoder")]
        counts = [each.count for each in texts]
        known = [count for count in counts if count is not None]
        size = sum(known) * self.width if len(known) == len(counts) else None
        parts.append(Part("text encoders", size))
        parts.append(Part("VAE", _times(self.pipeline.parts["vae"].count, self.width)))
        parts += [_reward_part(reward) for reward in (*recipe.rewards, *recipe.watch)]
        parts.append(Part("Adam's moments", share(_times(trained, 2 * FLOAT))))
        if recipe.train.ema_decay > 0:
            parts.append(Part("moving average", share(_times(trained, FLOAT))))
        if recipe.train.kl_weight > 0 and self.full:
            parts.append(Part("reference copy", share(_times(trained, FLOAT))))
        return parts

    def _passing(self) -> dict[str, Part]:
        """What some phases take and give back, by a short name of its own."""
        recipe, model = self.recipe, self.recipe.model
        images = min(recipe.scoring.batch_size, self.plan.decodes * self.prompts)
        at_once = 1 if model.vae_slicing else min(model.decode_batch_size, images)
        decoded = decoding(self.pipeline.parts["vae"], self.inputs, at_once, self.width, self.gpu)
        # Images decoded so far, their copy in one piece or for a reward, and those of the batch before.
        copies = 3 if self.plan.decodes * self.prompts > images else 2
        decode = (
            None if decoded is None else decoded + copies * image_bytes(images, model.height, model.width)
        )
        found = {
            "gradients": Part("gradients", self.shares.of(_times(self.trained, FLOAT))),
            "latents": Part("latents and texts", self._latents()),
            "decode": Part(f"decoding {at_once} at once", decode),
        }
        if self.passes is None:
            found["rollout"] = Part("activations", None, f"not known for {self.component.kind}")
            return found
        states, rows = self._rollout_rows, self._training_rows
        found["rollout"] = Part(
            f"activations of rollout, {states} at once", self.passes.sampling(states * self.rows)
        )
        peak, held = self._training_peak()
        checkpoints = "blocks computed anew" if recipe.train.gradient_checkpointing else "all kept"
        found["training"] = Part(
            f"activations of training, {rows} at once", peak - held + self._loss(rows), checkpoints
        )
        found["step"] = Part("optimizer's own", self._optimizer_step(), "while it steps")
        if self.shares.gathered:
            note = "of other processes, block by block"
            found["gathered"] = Part("gathered weights", self.shares.gathered, note)
        return found

    def _phases(self, passing: dict[str, Part]) -> dict[str, int]:
        size = {name: part.size or 0 for name, part in passing.items()}
        assert self.passes is not None
        rows = self._training_rows
        states = 3 * self._states_at_once * self.inputs.latent_count * FLOAT
        peak, _ = self._training_peak()
        gathered = self.shares.gathered
        passing_through = peak + gathered + self.shares.arriving
        phases = {
            "rollout": size["latents"] + states + size["rollout"] + gathered,
            "training": size["latents"]
            + max(passing_through + self._loss(rows), size["gradients"] + size["step"]),
        }
        if passing["decode"].size is not None:
            phases["scoring"] = size["latents"] + size["decode"]
        copy = self.shares.of(_times(self.trained, FLOAT)) or 0
        if self.recipe.train.kl_weight > 0 and self.full:
            phases["reference"] = size["latents"] + copy + gathered + self.passes.sampling(rows * self.rows)
        evaluated = min(self.recipe.evaluation.batch_size, self.recipe.evaluation.prompts)
        own = max(self.passes.sampling(evaluated * self.rows) + gathered, size["decode"])
        phases["evaluation"] = own + (copy if self.recipe.train.ema_decay > 0 else 0)
        return phases

    @property
    def _rollout_rows(self) -> int:
        plan = self.plan
        at = [0] * (plan.num_steps + 1)
        for node, below in zip(plan.nodes, plan.children, strict=True):
            at[node.index] += node.width if below else 0
        return min(self.recipe.rollout.batch_size, max(at) * self.prompts)

    @property
    def _step_states(self) -> list[int]:
        """Distinct states that each optimizer step is made from."""
        widths = [states * self.prompts for states in self.set_states]
        return widths if self.recipe.train.update == "per_step" else [sum(widths)]

    @property
    def _training_rows(self) -> int:
        return min(self.recipe.train.micro_batch_size, max(self._step_states))

    def _training_peak(self) -> tuple[int, int]:
        """Of an optimizer step's passes: the first has no gradients yet, a last one may have fewer rows."""
        assert self.passes is not None
        first = self._training_rows
        second = min(first, max(self._step_states) - first)
        peaks = [self.passes.training(first * self.rows, accumulating=False)]
        if second > 0:
            peaks.append(self.passes.training(second * self.rows, accumulating=True))
        return max(peaks)

    def _latents(self) -> int:
        """Transitions and leaves of an iteration, float32, and its texts."""
        plan = self.plan
        # Of a transition its start, that start's velocity, and its ends; of a recorded step both states.
        kept = sum(plan.width(i) + 2 * (plan.width(i) // plan.segments[i].fan_out) for i in plan.transitions)
        kept += plan.decodes + sum(2 * plan.width(i) for i, s in enumerate(plan.segments) if s.recorded)
        states = self.prompts * kept
        tokens, width = self.inputs.text
        texts = self.prompts * (tokens * width + self.inputs.pooled) * self.width
        return states * self.inputs.latent_count * FLOAT + texts

    def _loss(self, rows: int) -> int:
        """Log-probs of a fan-out: differences from the mean and their squares, float32."""
        # Without transitions, all images of a prompt are compared.
        fan_outs = [self.plan.segments[i].fan_out for i in self.plan.transitions]
        fan_out = max(fan_outs, default=self.plan.root_width)
        return rows * (3 * fan_out + 6) * self.inputs.latent_count * FLOAT

    @property
    def _states_at_once(self) -> int:
        """The most states at one grid index, of all prompts; three such tensors live beside what is kept."""
        at = [0] * (self.plan.num_steps + 1)
        for node in self.plan.nodes:
            at[node.index] += node.width
        return max(at) * self.prompts

    def _optimizer_step(self) -> int:
        """Roots of second moments: on a GPU of all weights at once, on a CPU of one after the other."""
        if self.gpu:
            return self.shares.of(_times(self.trained, FLOAT)) or 0
        return 0


_UNCOUNTED = ("CLIPTokenizer", "T5TokenizerFast", "StableDiffusionSafetyChecker")


def _times(count: int | None, width: int) -> int | None:
    return None if count is None else count * width


def _reward_part(reward: WatchedReward) -> Part:
    """Models of rewards are float32, whatever their files hold."""
    name = f"reward {reward.name}"
    if reward.name.partition("/")[0] in WEIGHTLESS:
        return Part(name, 0)
    models = [value for option in MODEL_OPTIONS if isinstance(value := reward.options.get(option), str)]
    if not models:
        return Part(name, None, "a model of its own")
    parts = [_model_part(name, bundled_path(model)) for model in models]
    unknown = next((part for part in parts if part.size is None), None)
    if unknown is not None:
        return unknown
    return Part(name, sum(part.size or 0 for part in parts), parts[0].note)


def _model_part(name: str, where: Path) -> Part:
    shapes = read_shapes(where) if where.is_dir() else None
    if shapes is not None:
        return Part(name, FLOAT * sum(prod(shape) for shape in shapes.values()))
    published = published_reward(where)
    if published is not None:
        note = "" if where.exists() else f"{where.name} is not there: by its published config"
        return Part(name, FLOAT * published, note)
    if where.is_file():
        return Part(name, where.stat().st_size, "the size of its file")
    return Part(name, None, f"{where} is not there" if not where.exists() else f"{where} has no safetensors")
