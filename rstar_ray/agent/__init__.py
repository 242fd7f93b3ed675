"""One rollout: think, call the tool, read its answer, go on; and what its answer is worth."""
