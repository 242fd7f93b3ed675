"""Agents of the user in training: their processes, their HTTP endpoint, and the client of a generation worker."""
