"""Benchmarks of the real parts; the product imports nothing from here."""
