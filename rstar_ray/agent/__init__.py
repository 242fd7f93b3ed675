"""One rollout: think, call the tool, read its answer, continue."""
