"""A reward in Ray actors, on this machine or others: for scorers that want GPUs of their own.

What passes between the processes is Ray's own serialization, which is pickle: a cluster is trusted as this
process is. A service that is not trusted belongs behind the reward ``http``.

Axes: B images, H and W their height and width.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowcredit.errors import InputError, one_line
from flowcredit.interfaces import Reward
from flowcredit.known_rewards import check_name
from flowcredit.rewards.endpoint import ServiceError, brief
from flowcredit.rewards.files import need_module
from flowcredit.rewards.service import Outcome, columns_signature, read_options, settle
from flowcredit.scoring import batches, columns_of, describe
from flowcredit.sections import Count, NonNegative, Number, Section, Text, Whole

NAMESPACE = "flowcredit"


class RayOptions(Section):
    """The options of the reward ``ray``."""

    reward: Text
    """The reward that the actors make: a registered name, or `module:attribute`. Required."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options; files are those of the actors' machines."""
    actors: Count = 1
    """Copies of it, which share the images; 1."""
    batch_size: Count = 16
    """Images that an actor scores at once; 16."""
    address: Text | None = None
    """The cluster: `auto` for the one of this machine, or `ray://host:10001`. None takes RAY_ADDRESS, and
    starts Ray on this machine where that is not set."""
    num_cpus: NonNegative = 1.0
    """CPU cores that each actor reserves; 1."""
    num_gpus: NonNegative = 0.0
    """GPUs that each actor reserves, and may be a part of one; 0."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where an actor computes: `auto` is its GPU if it has one."""
    shared_as: Text | None = None
    """A name by which all processes of a run use the same actors; None gives each process its own."""
    working_dir: Text | None = None
    """A folder that Ray copies to the actors' machines: where a module of one's own lies; none. Ray takes one
    for a whole process: that of the first reward."""
    start_timeout: Annotated[Number, Field(gt=0, le=86400)] = 600.0
    """Seconds in which the actors must be there, their reward loaded; 600."""
    timeout: Annotated[Number, Field(gt=0, le=86400)] = 600.0
    """Seconds in which a batch must be scored; 600."""
    restarts: Annotated[Whole, Field(ge=0, le=100)] = 3
    """How often an actor that died is started anew, and a batch that it held is scored again; 3."""


class Scorer:
    """What an actor is: the reward, made and called on its machine. Failures are told, not raised, since an
    exception of a reward's own need not be one that another process can read."""

    def __init__(self, name: str, options: Mapping[str, Any], device: str, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._made = name, options, device

    @cached_property
    def _reward(self) -> Reward:
        from flowcredit.rewards.loading import load_reward

        return load_reward(*self._made)

    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...], bool] | str:
        """The columns it needs, those it can use, and whether it takes all; or why there is none."""
        try:
            columns = columns_of(self._reward)
        except InputError as error:
            return str(error)
        return columns.required, columns.optional, columns.every

    def score(
        self, images: np.ndarray, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None] | str:
        """[B, 3, H, W] float32 in [0, 1], B prompts and columns of B values to B scores, None for none; or
        what was raised."""
        try:
            with torch.no_grad():
                # A copy: what Ray hands over cannot be written to, and a reward may scale in place.
                pixels = torch.from_numpy(images.copy())
                found = self._reward(images=pixels, prompts=list(prompts), **columns)
            values = found.tolist() if isinstance(found, Tensor) else list(found)
            return [None if value is None else float(value) for value in values]
        except (Exception, SystemExit) as error:
            return describe(error)


@dataclass(frozen=True)
class RayReward:
    """Scores of actors; the images of a call are divided between them batch by batch."""

    ray: ModuleType
    actors: Sequence[Any]
    signature: inspect.Signature
    settings: RayOptions

    @property
    def __signature__(self) -> inspect.Signature:
        """The columns, as the actors' reward takes them."""
        return self.signature

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32; NaN where the reward gives none.

        Raises:
            PartialFailure: images that no actor scored, with the reasons.
        """
        pixels = images.detach().cpu().numpy()
        parts = list(batches(len(prompts), self.settings.batch_size))
        asked = [self._ask(i, rows, pixels, prompts, columns) for i, rows in enumerate(parts)]
        outcomes: list[Outcome] = []
        for place, (rows, answer) in enumerate(zip(parts, asked, strict=True)):
            found = self._answer(answer, rows.stop - rows.start)
            if isinstance(found, _Raised) and rows.stop - rows.start > 1:
                # Some image of the batch is at fault: only that one shall go without a score.
                singly = [slice(row, row + 1) for row in range(rows.start, rows.stop)]
                again = [self._ask(place, row, pixels, prompts, columns) for row in singly]
                outcomes += [one for each in again for one in self._each(self._answer(each, 1), 1)]
            else:
                outcomes += self._each(found, rows.stop - rows.start)
        return settle(outcomes)

    def _ask(
        self,
        place: int,
        rows: slice,
        pixels: np.ndarray,
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> Any:
        actor = self.actors[place % len(self.actors)]
        chosen = {name: list(values[rows]) for name, values in columns.items()}
        return actor.score.remote(pixels[rows], list(prompts[rows]), chosen)

    def _answer(self, asked: Any, count: int) -> list[float | None] | ServiceError:
        errors = self.ray.exceptions
        name = self.settings.reward
        try:
            scores: list[float | None] | str = self.ray.get(asked, timeout=float(self.settings.timeout))
        except errors.GetTimeoutError:
            self.ray.cancel(asked)
            return ServiceError(f"an actor of {name!r} gave no answer within {self.settings.timeout:g} s")
        except errors.RayError as error:
            return ServiceError(f"an actor of {name!r} is lost: {brief(one_line(error), 200)}")
        if isinstance(scores, str):
            return _Raised(f"{name!r} in its actor: {brief(scores, 300)}")
        if len(scores) != count:
            return ServiceError(f"{name!r} returned {len(scores)} scores for {count} images in its actor")
        return scores

    def _each(self, found: list[float | None] | ServiceError, count: int) -> Sequence[Outcome]:
        return [found] * count if isinstance(found, ServiceError) else found


class _Raised(ServiceError):
    """The reward itself raised; the actor lives."""


def load_ray(options: Mapping[str, Any]) -> RayReward:
    """Join or start Ray, and make the actors.

    Raises:
        InputError: options that do not fit, Ray that is not installed or cannot be reached, and whatever the
            actors' reward refuses.
    """
    settings = read_options(RayOptions, "ray", options)
    if settings.reward.partition("/")[0] == "ray":
        raise InputError("reward 'ray': option 'reward' is 'ray' again; expected the reward of its actors")
    check_name(settings.reward)
    ray = need_module("ray", "ray", "ray")
    _connect(ray, settings)
    actors = [_actor(ray, settings, index) for index in range(settings.actors)]
    try:
        asked = [actor.columns.remote() for actor in actors]
        told = ray.get(asked, timeout=float(settings.start_timeout))[0]
    except ray.exceptions.GetTimeoutError:
        raise InputError(
            f"reward 'ray': {settings.actors} actors with {settings.num_cpus:g} CPU cores and "
            f"{settings.num_gpus:g} GPUs each were not there within {settings.start_timeout:g} s; the "
            f"cluster has {_resources(ray)}: ask for less, or raise start_timeout where loading takes longer"
        ) from None
    except ray.exceptions.RayError as error:
        raise InputError(f"reward 'ray': an actor could not begin: {brief(one_line(error), 300)}") from None
    if isinstance(told, str):
        raise InputError(f"{told}, in an actor of the reward 'ray'")
    signature = columns_signature(f"reward 'ray': {settings.reward}", *told)
    return RayReward(ray, actors, signature, settings)


def _connect(ray: ModuleType, settings: RayOptions) -> None:
    if ray.is_initialized():
        return
    # A run tells nobody that it runs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = settings.address is None and not os.environ.get("RAY_ADDRESS")
    start: dict[str, Any] = {"include_dashboard": False} if local else {"address": settings.address}
    if settings.working_dir is not None:
        start["runtime_env"] = {"working_dir": settings.working_dir}
    try:
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **start)
    except (ConnectionError, ValueError, RuntimeError, OSError, TimeoutError) as error:
        raise InputError(
            f"reward 'ray': Ray at {settings.address or os.environ.get('RAY_ADDRESS') or 'this machine'} "
            f"cannot be reached: {brief(one_line(error), 200)}; expected a running cluster (ray start --head)"
        ) from None


def _actor(ray: ModuleType, settings: RayOptions, index: int) -> Any:
    chosen: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "num_gpus": settings.num_gpus,
        "max_restarts": settings.restarts,
        "max_task_retries": settings.restarts,
    }
    if settings.shared_as is not None:
        chosen |= {"name": f"{settings.shared_as}-{index}", "get_if_exists": True}
    # On the CPU its sums round as those of this process only with as many threads.
    threads = torch.get_num_threads() if settings.device == "cpu" else None
    made = ray.remote(Scorer).options(**chosen)
    return made.remote(settings.reward, settings.options, settings.device, threads)


def _resources(ray: ModuleType) -> str:
    held = ray.cluster_resources()
    return f"{held.get('CPU', 0):g} CPU cores and {held.get('GPU', 0):g} GPUs"
