"""The registered rewards: their names, where they are made, what options they take. Nothing heavy is
imported."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowcredit.errors import InputError
from flowcredit.nearest import nearest

Options = Mapping[str, Any]
FILES = ("path", "detector", "clip", "tokenizer", "processor", "head")
"""Options of registered rewards that name files or folders."""


def reward_names() -> tuple[str, ...]:
    """The registered rewards."""
    return tuple(sorted(REGISTERED))


def check_name(name: str) -> None:
    """InputError for a name that is no registered reward's, with a label or without, and no
    ``module:attribute``."""
    if name.partition("/")[0] not in REGISTERED and ":" not in name:
        raise InputError(
            f"unknown reward {name!r}{meant(name, REGISTERED)}; known are {', '.join(reward_names())}, "
            "or 'module:attribute' for one of your own"
        )


def take_options(reward: str, options: Options, known: Collection[str]) -> Options:
    """The options, if all of them are known; InputError naming the nearest known one otherwise."""
    for option in options:
        if option not in known:
            expected = f"its options are {', '.join(sorted(known))}" if known else "it has no options"
            raise InputError(
                f"reward {reward!r}: unknown option {option!r}{meant(option, known)}; {expected}"
            )
    return options


def meant(name: str, known: Collection[str]) -> str:
    """The known name that is near, as an end to a message; empty where none is."""
    close = nearest(name, known)
    return f" (did you mean {close!r}?)" if close else ""


@dataclass(frozen=True)
class Registered:
    """A reward of the room `rewards`: the function that makes it, and its options with what each of them is.

    Where options are many, ``settings`` names the module's class that has and checks them.
    """

    module: str
    function: str
    options: Mapping[str, str] = field(default_factory=dict)
    settings: str | None = None


REGISTERED: Mapping[str, Registered] = {
    "shapes": Registered("shapes", "load_graded"),
    "shapes_exact": Registered("shapes", "load_exact"),
    "clip": Registered(
        "clip",
        "load_clip_score",
        {"path": "the folder of a transformers CLIPModel, or 'bundled:shapes-clip'"},
    ),
    "aesthetic": Registered(
        "aesthetic",
        "load_aesthetic",
        {
            "path": "the folder of CLIP ViT-L/14 as a transformers CLIPModel",
            "head": "sac+logos+ava1-l14-linearMSE.pth, or the same as .safetensors",
        },
    ),
    "geneval": Registered(
        "geneval",
        "load_geneval",
        {
            "detector": "the folder of a transformers object detector for COCO's classes, such as YOLOS",
            "clip": "the folder of CLIP ViT-L/14 as a transformers CLIPModel, for colours",
            "graded": "true for a score by degrees as in Flow-GRPO, false for GenEval's 1 or 0",
        },
    ),
    "hps": Registered(
        "hps",
        "load_hps",
        {
            "path": "HPS_v2.1_compressed.pt, or the folder of HPS as a transformers CLIPModel",
            "tokenizer": "the folder of CLIP's tokenizer in transformers' layout",
        },
    ),
    "image_reward": Registered(
        "image_reward",
        "load_image_reward",
        {
            "path": "ImageReward.pt",
            "tokenizer": "the folder of bert-base-uncased's tokenizer in transformers' layout",
        },
    ),
    "ocr": Registered("ocr", "load_ocr"),
    "pickscore": Registered(
        "pickscore",
        "load_pickscore",
        {"path": "the folder of PickScore's CLIPModel", "processor": "the folder of its processor"},
    ),
    "http": Registered("http", "load_http", settings="HttpOptions"),
    "ray": Registered("ray_actors", "load_ray", settings="RayOptions"),
    "chat": Registered("chat", "load_chat", settings="ChatOptions"),
    "sharpness": Registered("sharpness", "load_sharpness"),
}
