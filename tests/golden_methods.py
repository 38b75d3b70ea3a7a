"""The runs whose results are kept in golden/methods.json: three updates of every method, of every option."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from method_world import gather, learn, world

FILE = Path(__file__).parent / "golden" / "methods.json"
UPDATES = 3

PER_STEP = {"update": "per_step", "clip_range": 0.02, "learning_rate": 0.02, "max_grad_norm": 1e3}
FLOW = {"name": "flow_grpo", "num_steps": 5, "group_size": 4}
MIX = {"name": "mix_grpo", "num_steps": 6, "group_size": 4, "window_size": 2, "iterations_per_position": 1}
BRANCH = {"name": "branch_grpo", "num_steps": 6, "group_size": 4, "split_steps": [0, 2]}
TURNING = {"name": "turning_point_grpo", "num_steps": 5, "group_size": 5}

CASES: Mapping[str, Mapping[str, Any]] = {
    "g2rpo": {"algorithm": {"name": "g2rpo", "num_steps": 6, "group_size": 4}},
    "g2rpo without MGAI": {"algorithm": {"name": "g2rpo", "num_steps": 6, "group_size": 4, "strides": [1]}},
    "dense_grpo": {"algorithm": {"name": "dense_grpo", "num_steps": 5, "group_size": 4}},
    "dense_grpo state": {
        "algorithm": {"name": "dense_grpo", "num_steps": 5, "group_size": 4, "step_reward": "state"}
    },
    "flow_grpo": {"algorithm": FLOW},
    "flow_grpo batch": {"algorithm": {**FLOW, "advantage_std": "batch"}},
    "flow_grpo kl": {"algorithm": FLOW, "train": {"kl_weight": 0.5}},
    "flow_grpo guarded": {"algorithm": FLOW, "train": {"ratio": "guarded"}},
    "flow_grpo guarded kl": {"algorithm": FLOW, "train": {"ratio": "guarded", "kl_weight": 0.5}},
    "flow_grpo noise weights": {"algorithm": FLOW, "train": {"step_weights": "noise"}},
    "flow_grpo noise weights kl": {"algorithm": FLOW, "train": {"step_weights": "noise", "kl_weight": 0.5}},
    "flow_grpo accumulated": {"algorithm": FLOW, "train": {"update": "accumulated"}},
    "flow_grpo summed rewards": {"algorithm": FLOW, "train": {"reward_weights_on": "rewards"}},
    "flow_grpo cps": {"algorithm": FLOW, "noise": {"kind": "cps", "eta": 0.6}},
    "flow_grpo_fast": {
        "algorithm": {"name": "flow_grpo_fast", "num_steps": 6, "group_size": 4, "window_size": 2}
    },
    "dance_grpo": {"algorithm": {"name": "dance_grpo", "num_steps": 6, "group_size": 4}},
    "mix_grpo": {"algorithm": MIX},
    "mix_grpo random flash": {"algorithm": {**MIX, "window_order": "random", "finish_steps": 2}},
    "tempflow_grpo": {"algorithm": {"name": "tempflow_grpo", "num_steps": 5, "seeds": 2, "group_size": 3}},
    "branch_grpo": {"algorithm": BRANCH},
    "branch_grpo pruned": {
        "algorithm": {**BRANCH, "pruned_depths": 1, "kept_leaves": 3, "iterations_per_depth": 1}
    },
    "stepwise_flow_grpo": {"algorithm": {"name": "stepwise_flow_grpo", "num_steps": 5, "group_size": 4}},
    "stepwise_flow_grpo probes": {
        "algorithm": {"name": "stepwise_flow_grpo", "num_steps": 6, "group_size": 4, "probe_steps": 3}
    },
    "turning_point_grpo": {"algorithm": TURNING},
    "turning_point_grpo kl": {"algorithm": TURNING, "train": {"kl_weight": 0.5}},
    "coca": {"algorithm": {"name": "coca", "num_steps": 5, "group_size": 4}},
    "neighbor_grpo": {"algorithm": {"name": "neighbor_grpo", "num_steps": 5, "group_size": 5}},
    "dpo": {"algorithm": {"name": "dpo", "num_steps": 5, "group_size": 4, "draws": 3}},
}

Found = dict[str, list[float]]


def run(case: str) -> Found:
    """Losses and gradient norms of the updates, and every parameter after them."""
    sections = dict(CASES[case])
    algorithm = sections.pop("algorithm")
    sections["train"] = {**PER_STEP, **sections.get("train", {})}
    setup = world(algorithm, **sections)
    settings = setup.recipe.train
    network = setup.model.network
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=1e-4
    )
    metrics = [learn(setup, gather(setup, iteration), optimizer) for iteration in range(UPDATES)]
    return {
        "loss": [each["loss"] for each in metrics],
        "grad_norm": [each["grad_norm"] for each in metrics],
        "parameters": torch.cat([p.detach().flatten() for p in network.parameters()]).tolist(),
    }
