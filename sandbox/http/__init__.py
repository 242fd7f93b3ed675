"""The sandbox's front door: server, client, and what they speak."""
