"""What an answer is worth: where it stands, what it means, and who judges it (docs/rewards.md)."""
