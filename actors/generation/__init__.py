"""Replicas: vLLM engines with the workers that play rollouts on them, and the driver's clients of these."""
