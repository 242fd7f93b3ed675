"""Benchmarks and the traces they replay. The product imports nothing from here, and the wheel does not contain it."""
