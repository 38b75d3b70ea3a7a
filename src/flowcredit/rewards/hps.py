"""HPS v2.1: how well people like an image for a prompt, by a CLIP ViT-H/14 trained on their rankings.

Wu et al., "Human Preference Score v2", arXiv 2306.09341; the reward of G²RPO (arXiv 2510.01982). The score is
the cosine without the logit scale, about 0.2 to 0.4. As in the authors' package, the image is not cut but
made square by black bars.

Axes: B images, H and W image height and width.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flowcredit.errors import InputError
from flowcredit.image_grid import to_pixels
from flowcredit.rewards.clip import ClipScore, clip_score, load_clip_model
from flowcredit.rewards.files import read_tensors
from flowcredit.rewards.open_clip import clip_from_open_clip
from flowcredit.rewards.preprocessing import CLIP_MEAN, CLIP_STD


@dataclass(frozen=True)
class Square:
    """Scale the longer side to ``size``, keeping the aspect, and pad to a square with zeros (black).

    The authors' package resizes 8-bit images as float tensors with torchvision. This is what it does with a
    torchvision that anti-aliases tensors (from 0.17 on): Pillow's bicubic filter without its rounding and
    clipping to bytes; earlier versions sampled without anti-aliasing. Their package also leaves an oblong
    image alone whose longer side is ``size`` already, which the model cannot take; here it is padded.
    """

    size: int

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, 3, size, size] float32, normalised, on the CPU."""
        pixels = torch.from_numpy(to_pixels(images)).permute(0, 3, 1, 2).to(torch.float32) / 255
        height, width = pixels.shape[2:]
        scale = self.size / max(height, width)
        target = (round(height * scale), round(width * scale))
        if target != (height, width):
            pixels = nn.functional.interpolate(
                pixels, size=target, mode="bicubic", antialias=True, align_corners=False
            )
        above, left = (self.size - target[0]) // 2, (self.size - target[1]) // 2
        below, right = self.size - target[0] - above, self.size - target[1] - left
        padded = nn.functional.pad(pixels, (left, right, above, below))
        channel = (1, -1, 1, 1)
        mean, std = torch.tensor(CLIP_MEAN).view(channel), torch.tensor(CLIP_STD).view(channel)
        return (padded - mean) / std


def load_hps(path: str, device: torch.device, tokenizer: str | None = None) -> ClipScore:
    """Load HPS from a local file or folder.

    Args:
        path: ``HPS_v2.1_compressed.pt`` as published under ``xswu/HPSv2`` (open_clip's names; read without
            unpickling), or the folder of the same model as a transformers ``CLIPModel``.
        tokenizer: the folder of CLIP's tokenizer in transformers' layout, such as that of
            ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K``. None: it lies in the folder ``path``. Where open_clip
            pads with 0, transformers may pad with another token; the text encoder looks from the end token
            backward alone, so that the score is the same.

    Raises:
        InputError: a file or folder that is missing, not complete, or of another model.
    """
    where = Path(path)
    if where.is_dir():
        model = load_clip_model(where)
        files = where if tokenizer is None else Path(tokenizer)
    elif tokenizer is None:
        raise InputError(
            f"reward 'hps': {where} is no folder, and a file holds no tokenizer; give the option "
            "'tokenizer': the folder of CLIP's tokenizer in transformers' layout"
        )
    else:
        model = clip_from_open_clip(read_tensors(where, "the checkpoint of HPS v2.1"), where)
        files = Path(tokenizer)
    return clip_score(model, files, Square(model.config.vision_config.image_size), device)
