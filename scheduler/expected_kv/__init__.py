"""The placement rule `expected_kv`: expected KV demand against capacity."""
