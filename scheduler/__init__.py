"""Where and when a rollout runs: decisions on KV tokens, without a clock, a socket or Ray."""
