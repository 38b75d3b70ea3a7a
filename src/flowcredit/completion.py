"""What a shell is offered for the word being typed; nothing heavy is loaded.

For a word that nothing here begins with, the shell offers files itself.
"""

from flowcredit.known_rewards import reward_names
from flowcredit.text_file import BROUGHT_ALONG, PACKAGE


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes and comparisons that come along, by `recipes/NAME.yaml`."""
    names = sorted(f"{own}/{file.name}" for own in BROUGHT_ALONG for file in (PACKAGE / own).glob("*.yaml"))
    return [name for name in names if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Settings, each with the ``=`` that its value follows; nothing once that is there."""
    if "=" in incomplete:
        return []
    from flowcredit.recipe_io import list_settings

    names = dict.fromkeys(each.setting for each in list_settings())
    return [f"{name}=" for name in names if name.startswith(incomplete)]


def complete_reward(incomplete: str) -> list[str]:
    """The registered rewards."""
    return [name for name in reward_names() if name.startswith(incomplete)]
