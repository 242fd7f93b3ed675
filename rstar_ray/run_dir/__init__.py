"""What a run leaves on disk: configuration, checkpoints, metrics, trajectories."""
