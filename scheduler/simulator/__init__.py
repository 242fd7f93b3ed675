"""The balancer over modelled engines in virtual time."""
