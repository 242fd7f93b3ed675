"""What a policy is worth on a set of problems: its rollouts, and the figures made of them."""
