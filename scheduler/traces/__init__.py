"""Traces: the lengths and times of rollouts, in files with one per line, and synthetic traces."""
