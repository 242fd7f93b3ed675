"""A conversation with a policy, behind `rstar chat` and `rstar serve`: an engine or a server, and the tools."""
