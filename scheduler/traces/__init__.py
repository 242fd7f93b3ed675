"""Traces: what rollouts turned out to be, in files of one a line, and synthetic ones of many distributions."""
