"""Rewards: one file each, loaded by name or by ``module:attribute``."""

from flowcredit.rewards.loading import load_reward, required_columns, reward_names

__all__ = ["load_reward", "required_columns", "reward_names"]
