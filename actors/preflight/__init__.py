"""What would stop a run on these machines, and how to fix it, in one table: `python -m actors.preflight`.

`facts.py` says what is read of a node, `read.py` and `probe.py` read it, `node_checks.py` and `cluster_checks.py` judge
what was read, `table.py` shows it. Judgements are pure: what a node with wrong drivers looks like is a test.
"""
