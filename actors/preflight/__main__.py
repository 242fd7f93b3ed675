"""What is wrong with this machine, or inside a Ray job with every node of the cluster, and how to mend it.

python -m actors.preflight --run-dir /shared/runs/first --model /shared/Qwen3-14B-Base

Exit status: 0 nothing is wrong, 1 something is, 2 refused.
"""

import os
import platform
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actors.launch.run_paths import run_path
from actors.preflight.cluster_checks import check_cluster
from actors.preflight.facts import Asked, Finding, NodeFacts, Verdict
from actors.preflight.node_checks import check_node
from actors.preflight.read_facts import read_facts
from actors.preflight.table import table
from rstar_ray.config import RunConfig
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError


def parse(argv: Sequence[str] | None = None) -> Asked:
    default = Asked(run_dir=os.environ.get("RSTAR_RAY_RUNS", ""), mark=f".preflight-{secrets.token_hex(8)}")
    return options_of(Asked, argv, default=default, description=__doc__)


def of_run(asked: Asked, config: RunConfig) -> Asked:
    """With the folders, the isolation and the number of checkpoints of a run."""
    return replace(
        asked,
        run_dir=str(run_path(config)),
        model=config.model if Path(config.model).is_absolute() else asked.model,
        level=config.sandbox.level,
        checkpoints=config.checkpoint.keep + 1,
    )


def settings_findings(config: RunConfig, node: str) -> list[Finding]:
    """What the start-up checks of a run say of its settings."""
    from actors.launch.checks import check_files

    found: list[Finding] = []
    for check, refused in check_files(config):
        if refused is not None:
            said = f"{refused.field}: {refused.problem}"
            return [Finding(check=check, node=node, verdict=Verdict.WRONG, said=said, mend=refused.hint)]
        found.append(Finding(check=check, node=node, verdict=Verdict.OK, said="as a run would have it"))
    return found


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


def main(argv: Sequence[str] | None = None) -> int:
    try:
        asked, config = parse(argv), None
        if asked.run_config:
            from actors.launch.command_line import config_in

            config = config_in(asked.run_config)
            asked = of_run(asked, config)
        found = look(asked)
        if config is not None:
            found += settings_findings(config, found[0].node)
    except ConfigError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    print(table(found))
    return int(any(finding.verdict is Verdict.WRONG for finding in found))


if __name__ == "__main__":
    sys.exit(main())
