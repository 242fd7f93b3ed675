"""Ray and its nodes: starting a head, authentication, devices, placement and metrics."""
