"""Tools that a policy may call, and environments that reply to it (docs/tools.md)."""
