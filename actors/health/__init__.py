"""Health of a run's processes: heartbeats, the watchdog, Ray's head and lost nodes."""
