"""Runs untrusted Python programs in kernel cages on one machine; importing it starts nothing."""
