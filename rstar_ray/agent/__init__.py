"""One rollout: the model thinks, calls a tool, reads the result, and continues."""
