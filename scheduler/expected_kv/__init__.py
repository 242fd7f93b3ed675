"""Our placement rule: expected KV demand against capacity."""
