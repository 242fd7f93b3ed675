"""What a run tells of itself while it goes: every metric by name, and how it is set. Knows no Ray, no Prometheus."""
