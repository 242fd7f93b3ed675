"""What fits on which GPUs and how long a step takes, computed and not measured."""
