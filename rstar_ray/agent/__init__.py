"""One rollout: think, call the tool, read its answer, go on."""
