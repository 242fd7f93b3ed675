"""Benchmarks and their traces. The product imports nothing from here, and the wheel does not contain it."""
