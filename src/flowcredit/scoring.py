"""Images to scores, in batches, and what happens when a reward fails.

Axes: R rewards, N images, B images of one batch. Scores are float32 on the CPU; NaN means
"no score", and nothing here ever writes a 0 for it.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flowcredit.background import ready, settle, thread_like_this
from flowcredit.errors import InputError, one_line
from flowcredit.faults import Fault, FaultError
from flowcredit.interfaces import Reward

LARGEST = 1e30
"""A score beyond is a failure, as an infinite one is: sums and weighted scores would not fit into float32."""
OnError = Literal["stop", "skip"]


class RewardError(FaultError):
    """A reward that raised, hung, or returned something that is not one number per image."""


class PartialFailure(Exception):
    """Raised by a reward that failed on some of its images and knows which; the others keep their scores.

    Unlike any other exception it is not followed by a second try, image by image: a service that is down
    would be asked once more for each.
    """

    def __init__(self, scores: Tensor, reasons: Mapping[int, str]) -> None:
        """``scores`` [B], NaN for no score; ``reasons``: by an image's place, why it was not scored."""
        super().__init__(f"{len(reasons)} of {len(scores)} images failed: {reasons[min(reasons)]}")
        self.scores = scores
        self.reasons = reasons


@dataclass(frozen=True)
class Columns:
    """The columns of the prompt file that a reward declares by the parameters of its signature."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    every: bool
    """True for a reward with ``**columns``: it receives every column there is."""

    def choose(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """The columns, of those present, that the reward takes."""
        declared = {*self.required, *self.optional}
        return {name: values for name, values in columns.items() if self.every or name in declared}


@dataclass(frozen=True)
class Policy:
    """What a failing reward does, and since when a call counts as failed."""

    on_error: OnError
    timeout_s: float | None
    reasons: dict[str, str] = field(default_factory=dict)
    """Filled in while scoring: per reward, what the first failure that was skipped said."""
    faults: dict[str, Fault] = field(default_factory=dict)
    """And its images."""

    def skip(self, name: str, reason: str, batch: "Batch") -> None:
        """Take note of a failure that does not stop the run."""
        if name not in self.reasons:
            self.reasons[name] = one_line(reason)
            self.faults[name] = batch.fault(name, reason)


@dataclass(frozen=True)
class Batch:
    """Images [B, 3, H, W] that are scored together, with their B prompts and columns."""

    images: Tensor
    prompts: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    def fault(self, name: str, reason: str) -> Fault:
        """That the reward ``name`` failed on these images."""
        columns = {column: list(values) for column, values in self.columns.items()}
        details = {"reward": name, "prompts": list(self.prompts), "columns": columns}
        return Fault("reward", reason, {"images": self.images}, details)

    def only(self, rows: slice) -> "Batch":
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Batch(self.images[rows], self.prompts[rows], columns)


def columns_of(reward: Reward) -> Columns:
    """Read the columns a reward needs from its signature: every parameter but ``images`` and ``prompts``.

    A parameter without a default is a required column, one with a default an optional column.
    """
    kinds = inspect.Parameter
    named = [
        parameter
        for parameter in inspect.signature(reward).parameters.values()
        if parameter.name not in ("images", "prompts")
        and parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    every = any(p.kind is kinds.VAR_KEYWORD for p in inspect.signature(reward).parameters.values())
    return Columns(
        required=tuple(p.name for p in named if p.default is kinds.empty),
        optional=tuple(p.name for p in named if p.default is not kinds.empty),
        every=every,
    )


def check_columns(rewards: Mapping[str, Reward], available: Collection[str], source: str) -> None:
    """Refuse, before anything runs, prompts that lack a column which a reward needs.

    Args:
        available: the names of the prompt file's columns, the prompt itself left out.
        source: the prompt file, as the message shall name it.

    Raises:
        InputError: names the reward, the missing column and the columns that the file has.
    """
    for name, reward in rewards.items():
        missing = [column for column in columns_of(reward).required if column not in available]
        if missing:
            has = ", ".join(["prompt", *sorted(set(available) - {"prompt"})])
            needs = "column" if len(missing) == 1 else "columns"
            needs += " " + " and ".join(repr(column) for column in missing)
            raise InputError(
                f"{source}: reward {name!r} needs the {needs}, but the columns here are: {has}; "
                "add what is missing to every line of the prompt file, or leave the reward out"
            )


def score_images(
    rewards: Mapping[str, Reward],
    images: Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    batch_size: int,
    on_error: OnError = "stop",
    timeout_s: float | None = None,
) -> Tensor:
    """Score images with every reward, ``batch_size`` images a call.

    Args:
        rewards: R rewards by name.
        images: [N, 3, H, W] float32 in [0, 1].
        prompts: N prompts, one for each image.
        columns: further columns, N values each; a reward receives those that its signature names.
        on_error: what an exception, a time-out or an infinite score does: "stop" raises, "skip" leaves
            the image without a score. A batch that raises is scored again one image at a time, so that
            only the images at fault are lost.
        timeout_s: seconds that one call of a reward may take; None waits for ever. A call that hangs is
            abandoned in a daemon thread, since Python cannot end it.

    Returns:
        [R, N] float32 on the CPU, rewards in the order of the mapping; NaN where there is no score.

    Raises:
        RewardError: a failure under "stop"; under either, a reward that does not return N numbers.
    """
    _check_rows(images, prompts, columns)
    policy = Policy(on_error, timeout_s)
    whole = Batch(images, prompts, columns)
    parts = [score_batch(rewards, whole.only(rows), policy)[0] for rows in batches(len(whole), batch_size)]
    return torch.cat(parts, dim=1) if parts else torch.empty(len(rewards), 0)


def batches(total: int, batch_size: int) -> Iterator[slice]:
    """Slices of ``batch_size`` rows that make up ``total``."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected at least 1")
    return (slice(start, min(start + batch_size, total)) for start in range(0, total, batch_size))


def _check_rows(images: Tensor, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
    for name, values in {"prompts": prompts, **columns}.items():
        if len(values) != len(images):
            raise ValueError(f"got {len(values)} {name} for {len(images)} images; expected one for each")


def score_batch(rewards: Mapping[str, Reward], batch: Batch, policy: Policy) -> tuple[Tensor, Tensor]:
    """[R, B] scores and [R] numbers of failures among them."""
    results = [_score(name, reward, batch, policy) for name, reward in rewards.items()]
    if not results:
        return torch.empty(0, len(batch)), torch.zeros(0, dtype=torch.int64)
    return torch.stack([scores for scores, _ in results]), torch.tensor([failures for _, failures in results])


def _score(name: str, reward: Reward, batch: Batch, policy: Policy) -> tuple[Tensor, int]:
    failed = 0
    try:
        scores = _call(name, reward, batch, policy.timeout_s)
    except RewardError as error:
        raise RewardError(str(error), batch.fault(name, str(error))) from error
    except _Hung as hung:
        if policy.on_error == "stop":
            raise _failure(name, batch, str(hung)) from None
        policy.skip(name, str(hung), batch)
        return torch.full((len(batch),), torch.nan), len(batch)
    except PartialFailure as partial:
        first = min(partial.reasons)
        at_fault = batch.only(slice(first, first + 1))
        if policy.on_error == "stop":
            raise _failure(name, at_fault, partial.reasons[first], len(partial.reasons) - 1) from None
        policy.skip(name, partial.reasons[first], at_fault)
        scores, failed = _as_scores(name, partial.scores, len(batch)).clone(), len(partial.reasons)
        scores[list(partial.reasons)] = torch.nan
    except (Exception, SystemExit) as cause:
        if len(batch) > 1:
            return _score_singly(name, reward, batch, policy, cause)
        if policy.on_error == "stop":
            raise _failure(name, batch, describe(cause)) from cause
        policy.skip(name, describe(cause), batch)
        return torch.full((1,), torch.nan), 1
    infinite = scores.abs() > LARGEST
    if infinite.any():
        first = int(infinite.nonzero()[0, 0])
        value = scores[first].item()
        said = f"{value:g}" + ("" if math.isinf(value) else f"; expected numbers up to {LARGEST:g} in size")
        at_fault = batch.only(slice(first, first + 1))
        if policy.on_error == "stop":
            raise _failure(name, at_fault, f"it returned {said}")
        policy.skip(name, f"it returned {said}", at_fault)
    return scores.masked_fill(infinite, torch.nan), failed + int(infinite.sum())


def _score_singly(
    name: str, reward: Reward, batch: Batch, policy: Policy, cause: BaseException
) -> tuple[Tensor, int]:
    """Score the images of a batch that failed as a whole one by one, to find those at fault."""
    results = [_score(name, reward, batch.only(rows), policy) for rows in batches(len(batch), 1)]
    if policy.on_error == "stop":
        raise RewardError(
            f"reward {name!r} fails on {len(batch)} images at once, though on none of them alone: "
            f"{describe(cause)}; score fewer images at a time",
            batch.fault(name, describe(cause)),
        ) from cause
    return torch.cat([scores for scores, _ in results]), sum(failures for _, failures in results)


def _call(name: str, reward: Reward, batch: Batch, timeout_s: float | None) -> Tensor:
    columns = columns_of(reward).choose(batch.columns)

    def call() -> Any:
        # The gradient mode belongs to a thread, and a reward may scale its images in place.
        with torch.no_grad():
            return reward(images=batch.images.clone(), prompts=list(batch.prompts), **columns)

    return _as_scores(name, call() if timeout_s is None else _within(timeout_s, call), len(batch))


class _Hung(Exception):
    pass


def _within(timeout_s: float, call: Callable[[], Any]) -> Any:
    outcome: Future[Any] = Future()
    thread_like_this(lambda: settle(call, outcome), "reward").start()
    if not ready(outcome, timeout_s):
        raise _Hung(f"no answer within {timeout_s:g} seconds")
    return outcome.result()


def _as_scores(name: str, result: Any, expected: int) -> Tensor:
    """One float32 on the CPU for each image; None becomes NaN."""
    if not isinstance(result, Tensor):
        try:
            result = torch.tensor([torch.nan if value is None else float(value) for value in result])
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(
                f"reward {name!r} returned a value of type {type(result).__name__}, no list of numbers"
                f" ({error}); expected {expected} numbers, None for an image without a score"
            ) from error
    if result.is_complex():
        raise RewardError(f"reward {name!r} returned complex numbers; expected a real one for each image")
    if result.ndim != 1:
        raise RewardError(
            f"reward {name!r} returned a tensor of shape {list(result.shape)}, expected [{expected}]: "
            "one number for each image"
        )
    if len(result) != expected:
        raise RewardError(
            f"reward {name!r} returned {len(result)} scores for {expected} images; expected {expected}, "
            "None or NaN for an image without a score"
        )
    return result.detach().to("cpu", torch.float32)


def _failure(name: str, batch: Batch, cause: str, others: int | None = None) -> RewardError:
    count = len(batch) - 1 if others is None else others
    more = f" (and {count} more in its batch)" if count else ""
    return RewardError(
        f"reward {name!r} failed on the prompt {batch.prompts[0]!r}{more}: {cause}; mend the reward, or "
        "set scoring.on_error=skip to leave such images without a score",
        batch.fault(name, cause),
    )


def describe(cause: BaseException) -> str:
    """What was raised, and where, in a line."""
    frames = traceback.extract_tb(cause.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(cause).__name__}: {one_line(cause)}{where}"
