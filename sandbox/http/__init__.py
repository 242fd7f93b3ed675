"""The sandbox over HTTP: server, client and wire formats."""
