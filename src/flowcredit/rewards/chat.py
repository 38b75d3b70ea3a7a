"""A vision-language judge behind an OpenAI-compatible chat endpoint, such as vLLM serves.

As UnifiedReward (arXiv 2503.05236) is used by Flow-GRPO and Pref-GRPO: the judge sees one image with a
question, and the number after "Final Score:" in its answer is the score.

Axes: B images, H and W their height and width.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.rewards.endpoint import Endpoint, ServiceError, brief
from flowcredit.rewards.service import (
    EndpointOptions,
    Outcome,
    columns_signature,
    make_endpoint,
    read_options,
    settle,
)
from flowcredit.rewards.wire import encode_images, shown
from flowcredit.sections import Flag, Number, Text, Whole

QUESTION = """\
The image above was drawn for this description: "{{prompt}}"

Judge two things: how fully the image shows what the description asks for (objects, counts, colours,
places, text), and how well it is made (sharp, free of artefacts, pleasing). Explain in one or two sentences.
Then end with one line of this form, with a number from {low} (neither) to {high} (both, without fault):
Final Score: <number>"""

PATTERN = r"(?i)final\s+score[\s*_]*:[\s*_]*(-?\d+(?:[.,]\d+)?)"

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


class ChatOptions(EndpointOptions):
    """The options of the reward ``chat``."""

    model: Text
    """The model's name at the endpoint. Required."""
    template: Text | None = None
    """The question, in which {prompt}, and any column of the prompt file in braces, is filled in; our own."""
    scale: tuple[Number, Number] = (1, 5)
    """Lowest and highest score of the question; 1 to 5, as UnifiedReward was taught."""
    raw: Flag = False
    """The score as the judge gives it, instead of mapped from the scale to [0, 1]; false."""
    pattern: Text = PATTERN
    """Regular expression whose one group is the score; its last match in the answer counts."""
    concurrency: Annotated[Whole, Field(ge=1, le=1024)] = 8
    """Requests under way at once; 8."""
    max_tokens: Annotated[Whole, Field(ge=1, le=1_000_000)] = 512
    """Longest answer, in tokens; 512."""


@dataclass(frozen=True)
class ChatJudge:
    """The reward: one question an image, at temperature 0."""

    endpoint: Endpoint
    model: str
    template: str
    pattern: re.Pattern[str]
    scale: tuple[float, float]
    raw: bool
    concurrency: int
    max_tokens: int
    signature: inspect.Signature

    @property
    def __signature__(self) -> inspect.Signature:
        """The columns are those that the template names."""
        return self.signature

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] and B prompts to [B] float32; NaN where the judge gives no score.

        Raises:
            PartialFailure: images that the endpoint gave no answer for, with its reasons.
        """
        texts = {"prompt": prompts, **columns}
        questions = [
            _filled(self.template, {name: values[row] for name, values in texts.items()})
            for row in range(len(prompts))
        ]
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="judge") as pool:
            return settle(list(pool.map(self._judge, questions, encode_images(images))))

    def refusal(self, prompt: str, columns: Mapping[str, Any]) -> str | None:
        """For `interfaces.ChecksPrompts`: a column of the question that a row leaves empty, None if none."""
        empty = [name for name in _FIELD.findall(self.template) if name != "prompt" and columns[name] is None]
        return f"its question needs the column {empty[0]!r}, which is empty here" if empty else None

    def _judge(self, question: str, png: str) -> Outcome:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}
        body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "messages": [{"role": "user", "content": [picture, {"type": "text", "text": question}]}],
        }
        try:
            answer = self.endpoint.post("/chat/completions", body)
            return self.score_in(_content(answer, f"{self.endpoint.url}/chat/completions"))
        except ServiceError as failure:
            return failure

    def score_in(self, text: str) -> float | None:
        """The score in a judge's answer: the last one on the scale's terms, None if there is none."""
        low, high = self.scale
        found = [match.group(1) for match in self.pattern.finditer(text)]
        try:
            score = float(found[-1].replace(",", "."))
        except (IndexError, ValueError, AttributeError):
            return None
        if not low <= score <= high:
            return None
        return score if self.raw else (score - low) / (high - low)


def _filled(template: str, values: Mapping[str, Any]) -> str:
    # In one pass: braces inside a prompt are the prompt's own.
    return _FIELD.sub(lambda field: str(values[field.group(1)]), template)


_NO_COMPLETION = object()


def _content(answer: Any, url: str) -> str:
    """What the judge said; empty where it said nothing, as when it refuses."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = _NO_COMPLETION
    if content is None:
        return ""
    if not isinstance(content, str):
        raise ServiceError(f"{url}: answered {shown(answer)}; expected a chat completion")
    return content


def load_chat(options: Mapping[str, Any]) -> ChatJudge:
    """Check the options, and that the endpoint has the model.

    Raises:
        InputError: options that do not fit, an endpoint that does not answer, or one without the model.
    """
    checked = read_options(ChatOptions, "chat", options)
    pattern = _pattern(checked.pattern)
    low, high = (float(bound) for bound in checked.scale)
    if low >= high:
        raise InputError(f"reward 'chat': option 'scale' is [{low:g}, {high:g}]; expected [lowest, highest]")
    template = checked.template
    if template is None:
        template = QUESTION.format(low=f"{low:g}", high=f"{high:g}")
    fields = dict.fromkeys(_FIELD.findall(template))
    signature = columns_signature("reward 'chat': template", [name for name in fields if name != "prompt"])
    endpoint = make_endpoint("chat", checked)
    _check_model(endpoint, checked.model)
    return ChatJudge(
        endpoint,
        checked.model,
        template,
        pattern,
        (low, high),
        checked.raw,
        checked.concurrency,
        checked.max_tokens,
        signature,
    )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InputError(f"reward 'chat': option 'pattern' is no regular expression: {error}") from None
    if pattern.groups != 1:
        raise InputError(
            f"reward 'chat': option 'pattern' has {pattern.groups} groups; expected one, around the score"
        )
    return pattern


def _check_model(endpoint: Endpoint, model: str) -> None:
    url = f"{endpoint.url}/models"
    try:
        answer = endpoint.get("/models")
        names = [entry["id"] for entry in answer["data"]]
    except ServiceError as error:
        raise InputError(
            f"reward 'chat': {error}; expected an OpenAI-compatible endpoint, its address ending in /v1"
        ) from None
    except (KeyError, TypeError):
        raise InputError(f"reward 'chat': {url} answered JSON that is no list of models") from None
    if model not in names:
        there = brief(", ".join(repr(name) for name in names if isinstance(name, str)) or "none", 300)
        raise InputError(f"reward 'chat': {url} has no model {model!r}; it has {there}")
