"""What a policy may do besides writing: tools, and environments that answer it (docs/tools.md)."""
