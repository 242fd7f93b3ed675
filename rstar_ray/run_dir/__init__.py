"""The files of a run: configuration, checkpoints, metrics, trajectories."""
