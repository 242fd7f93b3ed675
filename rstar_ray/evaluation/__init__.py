"""Evaluation of a policy on sets of problems: rollouts and figures."""
