"""Checks whether machines can run training, and prints one table of problems with fixes: `python -m actors.preflight`.

`facts.py` defines the facts about a node; `read_facts.py` and `pair.py` collect them; `node_checks.py` and
`cluster_checks.py` judge them. The checks are pure functions, so tests cover nodes with faulty drivers.
"""
