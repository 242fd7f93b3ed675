"""Decides where and when a rollout runs, based on KV tokens; without a clock, a socket or Ray."""
