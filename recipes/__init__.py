"""One run each: what differs, the wiring, and main()."""
