"""Align the bundled model with a reward and prompts of one's own; a minute on one CPU core.

python examples/own_reward.py
"""

from flowcredit import Trainer


def redness(images, prompts):
    """[B, 3, H, W] in [0, 1] to B numbers: red minus green, mean over the image."""
    return (images[:, 0] - images[:, 1]).mean((1, 2))


if __name__ == "__main__":
    trainer = Trainer(
        "recipes/shapes_g2rpo.yaml",
        rewards=redness,
        prompts=["a circle", "a square above a star", "two triangles", "a cross"],
        settings={"name": "redness", "train.iterations": 6, "train.prompts_per_iteration": 8, "watch": []},
    )
    outcome = trainer.train()
    change = outcome.change("__main__:redness")
    print(f"redness {change.mean:+.3f} ± {change.standard_error:.3f}; weights: {outcome.weights}")
