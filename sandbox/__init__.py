"""Runs untrusted Python programs in kernel jails on one machine; importing it starts nothing."""
