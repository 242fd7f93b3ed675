"""Runs the balancer with modelled engines in virtual time."""
