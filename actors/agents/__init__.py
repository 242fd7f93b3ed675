"""Agents of the user in training: their processes, their endpoint, and what a worker asks of them."""
