"""What rewards demand of prompts, checked before a model is loaded."""

from collections.abc import Mapping

from flowcredit.errors import InputError
from flowcredit.interfaces import ChecksPrompts, Reward
from flowcredit.prompts import PromptSet
from flowcredit.rewards.waiting import itself
from flowcredit.scoring import OnError, check_columns


def check_prompts(rewards: Mapping[str, Reward], prompts: PromptSet, on_error: OnError) -> None:
    """Refuse prompts that lack a column which a reward needs, or that a reward cannot score.

    The latter only where a failure would stop the run: under "skip" such images are left without a score.

    Raises:
        InputError: names the reward and what it misses, with file and line of the first such prompt.
    """
    check_columns(rewards, prompts.columns, prompts.source)
    if on_error == "skip":
        return
    for name, reward in rewards.items():
        demanding = itself(reward)
        if isinstance(demanding, ChecksPrompts):
            _ask(name, demanding, prompts)


def _ask(name: str, reward: ChecksPrompts, prompts: PromptSet) -> None:
    found: list[tuple[int, str]] = []
    for row, prompt in enumerate(prompts.prompts):
        values = {column: cells[row] for column, cells in prompts.columns.items()}
        refusal = reward.refusal(prompt, values)
        if refusal is not None:
            found.append((row, refusal))
    if found:
        row, refusal = found[0]
        where = prompts.places[row] if prompts.places else prompts.source
        more = f" ({len(found)} of {len(prompts)} prompts cannot be scored)" if len(found) > 1 else ""
        raise InputError(
            f"{where}: reward {name!r}: {refusal}{more}; mend or remove the prompt, or set"
            " scoring.on_error=skip to leave such images without a score"
        )
