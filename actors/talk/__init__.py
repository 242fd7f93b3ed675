"""Conversations with a policy for `rstar chat` and `rstar serve`: a local engine or a server, and the tools."""
