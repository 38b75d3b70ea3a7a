"""What the rewards behind a service share: options, secrets, columns, and what becomes of failures.

Axes: B images.
"""

import inspect
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from keyword import iskeyword
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards.endpoint import Endpoint, ServiceError, brief
from flowcredit.scoring import PartialFailure
from flowcredit.sections import NonNegative, Number, Section, Text, Whole


class EndpointOptions(Section):
    """Where a service is, and how patiently it is asked."""

    url: Text
    """Address of the service, http:// or https://. Required."""
    timeout: Annotated[Number, Field(gt=0, le=86400)] = 60.0
    """Seconds in which a request must be answered; 60."""
    retries: Annotated[Whole, Field(ge=0, le=100)] = 3
    """Further tries after a failed connection, or an answer 408, 425, 429 or 5xx; 3."""
    backoff: NonNegative = 1.0
    """Seconds before the first of them, doubled before each next one up to 30; 1."""
    token_env: Text | None = None
    """Environment variable with the token that is sent as `Authorization: Bearer ...`; none."""
    headers_env: dict[str, str] = Field(default_factory=dict)
    """Further headers: the name of each, and of the environment variable that holds its value; none."""


Options = TypeVar("Options", bound=Section)


def read_options(kind: type[Options], reward: str, options: Mapping[str, Any]) -> Options:
    """The checked options of a reward. Raises InputError, one line, for the first that does not fit."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise InputError(f"reward {reward!r} needs the option {name!r}") from None
        found = json.dumps(first["input"], ensure_ascii=False, default=str)[:60]
        if "_env" in name:
            found = "not as it should be"  # Perhaps the secret itself.
        problem = first["msg"][0].lower() + first["msg"][1:]
        raise InputError(f"reward {reward!r}: option {name!r} is {found}: {problem}") from None


def make_endpoint(reward: str, options: EndpointOptions) -> Endpoint:
    """The endpoint that the options describe; nothing is asked yet.

    Raises:
        InputError: an address that is none, or an environment variable that is not set.
    """
    _check_url(reward, options.url)
    headers = {name: _secret(reward, "headers_env", key) for name, key in options.headers_env.items()}
    if options.token_env is not None:
        headers["Authorization"] = f"Bearer {_secret(reward, 'token_env', options.token_env)}"
    for name in headers:
        if not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise InputError(f"reward {reward!r}: headers_env has {name!r}, which is no name of a header")
    return Endpoint(
        options.url.rstrip("/"), headers, options.timeout, options.retries, float(options.backoff)
    )


def _check_url(reward: str, url: str) -> None:
    # What follows a '?' or stands before an '@' may be a secret: it is not shown.
    if "@" in url:
        raise InputError(
            f"reward {reward!r}: the option 'url' holds an '@', so a user name or password; put the secret "
            "into an environment variable and name that by token_env or headers_env"
        )
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not re.fullmatch(r"[!-~]+", url) or "?" in url or "#" in url:
        raise InputError(
            f"reward {reward!r}: the option 'url' is {url.partition('?')[0]!r}; expected an address such as "
            "http://127.0.0.1:8765, without '?' and '#'"
        )


def _secret(reward: str, option: str, variable: str) -> str:
    # Whoever wrote the secret itself there must not find it on the screen.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise InputError(
            f"reward {reward!r}: {option} holds what is no name of an environment variable; expected the "
            "name of the variable that holds the secret, not the secret"
        )
    value = os.environ.get(variable, "").strip()
    if not value:
        raise InputError(
            f"reward {reward!r}: {option} names the environment variable {variable!r}, which is not set; "
            f"export {variable}=... before the run"
        )
    if not (value.isascii() and value.isprintable()):
        raise InputError(
            f"reward {reward!r}: the environment variable {variable!r} holds characters that no header can"
        )
    return value


def columns_signature(
    source: str, required: Collection[str], optional: Collection[str] = (), every: bool = False
) -> inspect.Signature:
    """The signature of a reward with these columns, as `flowcredit.scoring.columns_of` reads it.

    Raises:
        InputError: a column that cannot be a keyword argument; ``source`` says who asks for it.
    """
    for name in (*required, *optional):
        if not name.isidentifier() or iskeyword(name) or name in ("images", "prompts"):
            raise InputError(
                f"{source} asks for the column {brief(repr(name))}; expected a word that Python can name"
            )
    kind = inspect.Parameter
    parameters = [kind(name, kind.KEYWORD_ONLY) for name in ("images", "prompts", *dict.fromkeys(required))]
    parameters += [
        kind(name, kind.KEYWORD_ONLY, default=None)
        for name in dict.fromkeys(optional)
        if name not in required
    ]
    if every:
        parameters.append(kind("columns", kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


Outcome = float | ServiceError | None
"""What came of one image: a score, why there is none, or None for no score by the service's own judgement."""


def settle(outcomes: Sequence[Outcome]) -> Tensor:
    """[B] float32 scores, NaN for None.

    Raises:
        PartialFailure: some outcome is an error; it holds the scores of the others.
    """
    failed = {row: str(each) for row, each in enumerate(outcomes) if isinstance(each, ServiceError)}
    scores = torch.tensor(
        [torch.nan if each is None or isinstance(each, ServiceError) else each for each in outcomes],
        dtype=torch.float32,
    )
    if failed:
        raise PartialFailure(scores, failed)
    return scores
