"""Rewards: finding the answer, comparing it, and the user's functions (docs/rewards.md)."""
