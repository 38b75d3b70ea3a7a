"""A reward by its registered name, or one's own by ``module:attribute``."""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flowcredit.errors import InputError
from flowcredit.interfaces import Reward
from flowcredit.known_rewards import REGISTERED, Options, check_name, reward_names, take_options
from flowcredit.own_code import import_own, module_of, not_imported
from flowcredit.rewards.service import read_options
from flowcredit.scoring import columns_of

__all__ = ["check_reward", "load_reward", "required_columns", "reward_names"]

EXAMPLE = "'my_rewards:brightness' for the function brightness in my_rewards.py"


def load_reward(name: str, options: Options, device: torch.device | str) -> Reward:
    """Make the reward that a recipe names.

    Args:
        name: a registered name (`reward_names`), or ``module:attribute``. A registered name may be followed
            by a slash and a label, as ``http/deqa``, so that a recipe can hold several of a kind. The module
            is looked up on the import path and in the current folder. The attribute is a function, or a class
            whose instances are called; it takes ``images`` [B, 3, H, W] float32 in [0, 1], ``prompts`` and
            any columns of the prompt file as keyword arguments and returns B numbers, None for an image
            without a score.
        options: settings of the reward: of a registered one, those of its file; of a function, keyword
            arguments bound to it (no longer columns, then); of a class, arguments of its constructor,
            which also gets ``device`` if it has a parameter of that name.
        device: where the reward computes.

    Raises:
        InputError: an unknown name, a module or attribute that cannot be imported or called, an option
            that the reward does not have.
    """
    where = torch.device(device)
    kind = name.partition("/")[0]
    if kind in REGISTERED:
        return _load_registered(kind, options, where)
    check_name(name)
    return _load_own(name, options, where)


def required_columns(reward: Reward) -> tuple[str, ...]:
    """The columns that the prompt file must have: the parameters without a default in the signature."""
    return columns_of(reward).required


def check_reward(name: str, options: Options) -> None:
    """What `load_reward` refuses, as far as it can be told without making the reward, or importing one's own
    module, which may load what it likes."""
    check_name(name)
    kind = name.partition("/")[0]
    if kind in REGISTERED:
        _maker(kind, options)
        settings = REGISTERED[kind].settings
        if settings is not None:
            source = importlib.import_module(f"flowcredit.rewards.{REGISTERED[kind].module}")
            read_options(vars(source)[settings], kind, options)
        return
    module = module_of("reward", name, EXAMPLE)
    try:
        found = importlib.util.find_spec(module)
    except Exception as error:
        raise not_imported("reward", name, error) from error
    if found is None:
        raise not_imported("reward", name, ModuleNotFoundError(f"No module named {module!r}"))


def _load_registered(name: str, options: Options, device: torch.device) -> Reward:
    make = _maker(name, options)
    if REGISTERED[name].settings is not None:
        return cast(Reward, make(options))
    return cast(Reward, make(device=device, **options))


def _maker(name: str, options: Options) -> Callable[..., Any]:
    """The reward's function; its parameters say which options must be given, and of which type."""
    entry = REGISTERED[name]
    module = vars(importlib.import_module(f"flowcredit.rewards.{entry.module}"))
    make: Callable[..., Any] = module[entry.function]
    if entry.settings is not None:
        take_options(name, options, module[entry.settings].model_fields)
        return make
    take_options(name, options, entry.options)
    parameters = inspect.signature(make).parameters
    for option, meaning in entry.options.items():
        if option not in options and parameters[option].default is inspect.Parameter.empty:
            raise InputError(f"reward {name!r} needs the option {option!r}: {meaning}")
        if option in options and not isinstance(options[option], parameters[option].annotation):
            raise InputError(f"reward {name!r}: option {option!r} is {options[option]!r}; expected {meaning}")
    return make


def _load_own(name: str, options: Options, device: torch.device) -> Reward:
    found = import_own("reward", name, EXAMPLE)
    if isinstance(found, type):
        parameters = _parameters(name, found)
        given = {"device": device, **options} if "device" in parameters else dict(options)
        _check_options(name, given, parameters)
        try:
            found = found(**given)
        except Exception as error:
            raise InputError(f"reward {name!r}: making it raised {type(error).__name__}: {error}") from error
        options = {}
    if not callable(found):
        raise InputError(
            f"reward {name!r} is of type {type(found).__name__}, which cannot be called; expected a function"
            " of images, prompts and columns"
        )
    parameters = _parameters(name, found)
    _check_options(name, options, parameters)
    _check_arguments(name, parameters)
    return cast(Reward, _bind(found, options) if options else found)


def _parameters(name: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise InputError(
            f"reward {name!r}: its parameters cannot be read ({error}); wrap it in a Python function of "
            "images, prompts and columns"
        ) from error


def _check_options(name: str, options: Options, parameters: Mapping[str, inspect.Parameter]) -> None:
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    take_options(name, options, [known for known in parameters if known not in ("images", "prompts")])


def _check_arguments(name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    kinds = inspect.Parameter
    positional = [p.name for p in parameters.values() if p.kind is kinds.POSITIONAL_ONLY]
    if positional:
        raise InputError(
            f"reward {name!r}: the parameter {positional[0]!r} is positional-only; images, prompts and "
            "columns are passed by name"
        )
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        return
    for expected in ("images", "prompts"):
        if expected not in parameters:
            raise InputError(
                f"reward {name!r} takes {', '.join(parameters) or 'nothing'}; expected the parameters images "
                f"and prompts, then the columns that it needs: {expected!r} is missing"
            )


def _bind(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The function with its options filled in; its signature shows what is left, the columns."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def reward(images: Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> Any:
        return function(images=images, prompts=prompts, **columns, **options)

    left = [parameter for parameter in signature.parameters.values() if parameter.name not in options]
    vars(reward)["__signature__"] = signature.replace(parameters=left)
    return reward
