"""Is every process of a run alive and making progress? Heartbeats, the watchdog, the head and lost nodes."""
