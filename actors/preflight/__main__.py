"""What is wrong with this machine, or inside a Ray job with every node of the cluster, and how to mend it.

python -m actors.preflight --run-dir /shared/runs/first --model /shared/Qwen3-14B-Base

Exit status: 0 nothing is wrong, 1 something is, 2 refused.
"""

import argparse
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from actors.preflight.cluster_checks import check_cluster
from actors.preflight.facts import Asked, Finding, NodeFacts, Verdict
from actors.preflight.node_checks import check_node
from actors.preflight.read_facts import read_facts
from actors.preflight.table import table
from rstar_ray.errors import ConfigError


def parse(arguments: Sequence[str] | None = None) -> Asked:
    parser = argparse.ArgumentParser(
        prog="python -m actors.preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", default=os.environ.get("RSTAR_RAY_RUNS", ""), help="must be seen by every node")
    parser.add_argument("--model", default="", help="a Hugging Face folder that every node must read")
    parser.add_argument("--level", default=Asked().level, choices=["namespaces", "landlock", "process"])
    parser.add_argument(
        "--checkpoints", type=int, default=Asked().checkpoints, help="at once: --checkpoint.keep and one more"
    )
    parser.add_argument("--gpus", type=int, default=0, help="every node must show as many (default: what it has)")
    parser.add_argument("--no-probes", action="store_true", help="read only: no pair of processes, no sandbox")
    options = parser.parse_args(arguments)
    for name, least in (("checkpoints", 1), ("gpus", 0)):
        if (count := getattr(options, name)) < least:
            raise ConfigError(f"--{name}", f"{count} is too small", f"give at least {least}")
    for name in ("run_dir", "model"):
        if (path := getattr(options, name)) and not Path(path).is_absolute():
            raise ConfigError("--" + name.replace("_", "-"), f"{path!r} is relative", "give an absolute path")
    return Asked(
        run_dir=options.run_dir,
        model=options.model,
        level=options.level,
        checkpoints=options.checkpoints,
        gpus=options.gpus,
        probe=not options.no_probes,
        mark=f".preflight-{secrets.token_hex(8)}",
    )


def findings(nodes: Sequence[NodeFacts], asked: Asked) -> list[Finding]:
    """Each node by itself; with several, also against each other."""
    of_nodes = [finding for facts in nodes for finding in check_node(facts, asked)]
    return [*of_nodes, *check_cluster(nodes, asked)]


def look(asked: Asked) -> list[Finding]:
    """With the mark in the run directory as long as it takes."""
    mark = Path(asked.run_dir) / asked.mark
    try:
        if asked.run_dir:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(asked.mark)
        if os.environ.get("RAY_ADDRESS"):
            from actors.preflight.nodes import every_node

            return findings(every_node(asked), asked)
        return findings([read_facts(asked, platform.node())], asked)
    except OSError as error:
        raise ConfigError("--run-dir", f"{asked.run_dir}: {error.strerror}", "give a folder to write to") from error
    finally:
        if asked.run_dir:
            mark.unlink(missing_ok=True)


def main() -> int:
    try:
        found = look(parse())
    except ConfigError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    print(table(found))
    return int(any(finding.verdict is Verdict.WRONG for finding in found))


if __name__ == "__main__":
    sys.exit(main())
