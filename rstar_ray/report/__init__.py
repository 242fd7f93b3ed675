"""What a run did, from its directory alone: tables, plots, and a page with its trajectories."""
