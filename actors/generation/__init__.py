"""Replicas: a vLLM engine with the agent loops that use it."""
