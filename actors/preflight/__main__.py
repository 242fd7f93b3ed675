"""Check this machine, or every node of the cluster if run inside a Ray job, and show how to fix each problem.

python -m actors.preflight --run-dir /shared/runs/first --model /shared/Qwen3-14B-Base

Exit status: 0 no problems, 1 problems found or the check failed, 2 invalid options.
"""

import os
import platform
import secrets
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actors.launch.run_paths import run_path
from actors.preflight.cluster_checks import check_cluster
from actors.preflight.facts import Finding, NodeFacts, PreflightOptions, Verdict
from actors.preflight.node_checks import check_node
from actors.preflight.read_facts import read_facts
from rstar_ray.config import RunConfig
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError
from rstar_ray.exit_status import exit_status_of

WIDTH = 118
WORST_FIRST = (Verdict.WRONG, Verdict.WARNING, Verdict.OK, Verdict.NOT_HERE)


def table(findings: Sequence[Finding]) -> str:
    """Findings grouped by check, the most severe first within a check; a hint follows its finding."""
    nodes = list(dict.fromkeys(finding.node for finding in findings))
    lines = [f"{'check':<15}{'':<9}{'nodes':<16}what"]
    for check in dict.fromkeys(finding.check for finding in findings):
        of_check = [finding for finding in findings if finding.check == check]
        kinds = dict.fromkeys((finding.verdict, finding.message, finding.hint) for finding in of_check)
        for verdict, message, hint in sorted(kinds, key=lambda kind: WORST_FIRST.index(kind[0])):
            where = [f.node for f in of_check if (f.verdict, f.message, f.hint) == (verdict, message, hint)]
            lines += _wrapped(f"{check:<15}{verdict:<9}{_named(where, nodes):<16}", message)
            lines += _wrapped(" " * 40 + "-> ", hint) if hint else []
    return "\n".join([*lines, "", _summary(findings, len(nodes))])


def _named(where: Sequence[str], nodes: Sequence[str]) -> str:
    if len(where) == len(nodes):
        return "all" if len(nodes) > 1 else where[0][:15]
    return where[0][:15] if len(where) == 1 else f"{where[0][:9]} +{len(where) - 1}"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * 43, break_long_words=False)


def _summary(findings: Sequence[Finding], nodes: int) -> str:
    wrong = sum(finding.verdict is Verdict.WRONG for finding in findings)
    warnings = sum(finding.verdict is Verdict.WARNING for finding in findings)
    looked = f"{nodes} node{'s' if nodes != 1 else ''}"
    if not wrong:
        return f"{looked}: nothing is wrong" + (f", {warnings} warnings" if warnings else "")
    return f"{looked}: {wrong} things are wrong" if wrong > 1 else f"{looked}: 1 thing is wrong"


def parse(argv: Sequence[str] | None = None) -> PreflightOptions:
    default = PreflightOptions(run_dir=os.environ.get("RSTAR_RAY_RUNS", ""), mark=f".preflight-{secrets.token_hex(8)}")
    return options_of(PreflightOptions, argv, default=default, description=__doc__)


def of_run(options: PreflightOptions, config: RunConfig) -> PreflightOptions:
    """`options` with the run's folders, isolation level, GPU memory share and number of checkpoints."""
    return replace(
        options,
        run_dir=str(run_path(config)),
        model=config.model if Path(config.model).is_absolute() else options.model,
        level=config.sandbox.level,
        gpu_memory_share=config.engine.gpu_memory_share,
        checkpoints=config.checkpoint.keep + 1,
    )


def settings_findings(config: RunConfig, node: str) -> list[Finding]:
    """Results of a run's start-up checks of its settings; stops at the first problem."""
    from actors.launch.checks import check_files

    found: list[Finding] = []
    for check, refused in check_files(config):
        if refused is not None:
            message = f"{refused.field}: {refused.problem}"
            return [Finding(check=check, node=node, verdict=Verdict.WRONG, message=message, hint=refused.hint)]
        found.append(Finding(check=check, node=node, verdict=Verdict.OK, message="as a run would have it"))
    return found


def findings(nodes: Sequence[NodeFacts], options: PreflightOptions) -> list[Finding]:
    """Findings of each node, then of the nodes compared with each other."""
    of_nodes = [finding for facts in nodes for finding in check_node(facts, options)]
    return [*of_nodes, *check_cluster(nodes, options)]


def look(options: PreflightOptions) -> list[Finding]:
    """Check every node while a mark file in the run directory shows whether all nodes see the same folder."""
    mark = Path(options.run_dir) / options.mark
    try:
        if options.run_dir:
            _write(mark)
        if os.environ.get("RAY_ADDRESS"):
            from actors.preflight.nodes import every_node

            return findings(every_node(options), options)
        return findings([read_facts(options, platform.node())], options)
    finally:
        if options.run_dir:
            mark.unlink(missing_ok=True)


def _write(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(mark.name)
    except OSError as error:
        raise ConfigError("--run-dir", f"{mark.parent}: {error.strerror}", "give a folder to write to") from error


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status_of(lambda: show_findings(parse(argv)))


def show_findings(options: PreflightOptions) -> int:
    """Print the table; returns 1 if a problem was found, else 0."""
    config = None
    if options.run_config:
        from actors.launch.command_line import config_in

        config = config_in(options.run_config)
        options = of_run(options, config)
    found = look(options)
    if config is not None:
        found += settings_findings(config, found[0].node)
    print(table(found))
    return int(any(finding.verdict is Verdict.WRONG for finding in found))


if __name__ == "__main__":
    sys.exit(main())
