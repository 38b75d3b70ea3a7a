"""What a run is computed with."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("flowcredit", "torch", "diffusers", "transformers", "peft", "safetensors")


def versions() -> list[str]:
    """Python's and those of the packages that move a number, as "torch 2.13.0"."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def environment(device: torch.device, processes: int) -> dict[str, str]:
    """What a run notes down of where it was begun: on all of it may depend how sums round."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "Versions": ", ".join(versions()),
        "Device": name,
        "Processes": str(processes),
        "System": f"{platform.system()} {platform.machine()}",
    }
