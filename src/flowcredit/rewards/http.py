"""The reward of a service of one's own, asked in JSON: for scorers too heavy or too old for this process.

The protocol, and how to write a service, stands in ``docs/remote_rewards.md``.

Axes: B images, H and W their height and width.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field, JsonValue
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards.endpoint import Endpoint, RequestRefused, ServiceError
from flowcredit.rewards.service import (
    EndpointOptions,
    Outcome,
    columns_signature,
    make_endpoint,
    read_options,
    settle,
)
from flowcredit.rewards.wire import PROTOCOL, encode_images, read_scores, shown
from flowcredit.sections import Count, Section, Text


class HttpOptions(EndpointOptions):
    """The options of the reward ``http``."""

    batch_size: Count = 16
    """Images in one request; 16."""
    columns: tuple[Text, ...] = ()
    """Columns of the prompt file to send, besides those that the service says it needs; none."""


class _Columns(Section):
    model_config = ConfigDict(extra="ignore")

    required: tuple[Text, ...] = ()
    optional: tuple[Text, ...] = ()
    every: bool = False


class _Health(Section):
    model_config = ConfigDict(extra="ignore")

    protocol: str
    name: Text
    version: str = ""
    columns: _Columns = Field(default_factory=_Columns)


@dataclass(frozen=True)
class HttpReward:
    """Scores of a service. ``name`` and ``version`` are what it calls itself."""

    endpoint: Endpoint
    name: str
    version: str
    signature: inspect.Signature
    batch_size: int

    @property
    def __signature__(self) -> inspect.Signature:
        """The columns that are sent: which they are is known only since the service was asked."""
        return self.signature

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32; NaN where the service gives null.

        Raises:
            PartialFailure: images that the service did not score, with its reasons.
        """
        pngs = encode_images(images)
        outcomes: list[Outcome] = []
        for start in range(0, len(pngs), self.batch_size):
            rows = range(start, min(start + self.batch_size, len(pngs)))
            outcomes += self._score(rows, pngs, prompts, columns)
        return settle(outcomes)

    def _score(
        self, rows: range, pngs: Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Sequence[Outcome]:
        body: dict[str, JsonValue] = {
            "protocol": PROTOCOL,
            "prompts": [prompts[row] for row in rows],
            "columns": {name: [values[row] for row in rows] for name, values in columns.items()},
            "images": [pngs[row] for row in rows],
        }
        try:
            return read_scores(self.endpoint.post("", body), len(rows), self.endpoint.url)
        except RequestRefused as refused:
            if len(rows) == 1:
                return [refused]
            # Some image or prompt of the batch is at fault: only that one shall go without a score.
            singly = (self._score(rows[i : i + 1], pngs, prompts, columns) for i in range(len(rows)))
            return [outcome for one in singly for outcome in one]
        except ServiceError as failure:
            return [failure] * len(rows)


def load_http(options: Mapping[str, Any]) -> HttpReward:
    """Ask a service what it is, and make its reward.

    Raises:
        InputError: options that do not fit, or a service that does not answer as the protocol says.
    """
    checked = read_options(HttpOptions, "http", options)
    endpoint = make_endpoint("http", checked)
    source = f"{endpoint.url}/health"
    try:
        answer = endpoint.get("/health")
    except ServiceError as error:
        raise InputError(
            f"reward 'http': {error}; expected a reward service there, such as flowcredit serve-reward starts"
        ) from None
    health = _read_health(answer, source)
    signature = columns_signature(
        f"reward 'http': {source}",
        (*checked.columns, *health.columns.required),
        health.columns.optional,
        health.columns.every,
    )
    return HttpReward(endpoint, health.name, health.version, signature, checked.batch_size)


def _read_health(answer: Any, source: str) -> _Health:
    if not isinstance(answer, dict) or "protocol" not in answer:
        raise InputError(
            f"reward 'http': {source} answered JSON without 'protocol'; expected {PROTOCOL!r}: is "
            "it a reward service?"
        )
    if answer["protocol"] != PROTOCOL:
        raise InputError(
            f"reward 'http': {source} speaks {shown(answer['protocol'])}; this version speaks {PROTOCOL!r}"
        )
    try:
        return read_options(_Health, "http", answer)
    except InputError as error:
        raise InputError(f"{error}, in the answer of {source}") from None
