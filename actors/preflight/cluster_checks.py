"""Checks of nodes against each other: versions, clocks, shared folders."""

from collections import Counter
from collections.abc import Callable, Sequence

from actors.preflight.facts import Finding, Folder, NodeFacts, PreflightOptions, Verdict
from rstar_ray.config import EngineConfig

CLOCK_S = 2.0
"""Maximum clock offset: logs of several nodes are compared, and deadlines use the time of day."""
START_S = EngineConfig().start_deadline_s
READ_SHARE = 0.3  # of START_S, for reading the model; a learner's rank reads it before an engine does
MUST_AGREE = ("python", "ray", "torch", "vllm", "deepspeed", "transformers", "rstar_ray")


def check_cluster(nodes: Sequence[NodeFacts], options: PreflightOptions) -> list[Finding]:
    """Findings of all cluster checks, for every node."""
    return [*versions(nodes), *clocks(nodes), *run_dirs(nodes, options), *models(nodes, options)]


def versions(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Report nodes whose versions differ from the most common ones; on a tie the first node's count."""
    common = {name: _most(nodes, name) for name in MUST_AGREE}
    common["torch build"] = Counter(facts.torch_build for facts in nodes).most_common(1)[0][0]
    found: list[Finding] = []
    for facts in nodes:
        here = {**{name: facts.versions.get(name, "") for name in MUST_AGREE}, "torch build": facts.torch_build}
        other = [
            f"{name} {here[name] or 'none'} instead of {common[name]}" for name in here if here[name] != common[name]
        ]
        hint = "the same image, or the same repository and lock, on every node" if other else ""
        message = ", ".join(other) or "as on the other nodes"
        found.append(_found("versions", facts, not other, message, hint))
    return found


def clocks(nodes: Sequence[NodeFacts]) -> list[Finding]:
    return [
        _found(
            "clock",
            facts,
            abs(facts.clock_offset_s) <= CLOCK_S,
            f"{facts.clock_offset_s:+.2f} s",
            "start chrony or systemd-timesyncd there",
        )
        for facts in nodes
    ]


def run_dirs(nodes: Sequence[NodeFacts], options: PreflightOptions) -> list[Finding]:
    """Every node must see the same folder, because ranks of all nodes write checkpoints into it."""
    hint = "a folder on storage that all nodes mount, under the same path"
    return _folders("run directory", nodes, options.run_dir, lambda facts: facts.run_dir, hint, options.mark)


def models(nodes: Sequence[NodeFacts], options: PreflightOptions) -> list[Finding]:
    hint = "the same model folder on every node, under the same path"
    found = _folders("model", nodes, options.model, lambda facts: facts.model, hint, "")
    return [*found, *(slow for facts in nodes if (slow := _slow_model(facts)) is not None)]


def _slow_model(facts: NodeFacts) -> Finding | None:
    """A warning if a node's first read of the model takes too much of a start; later reads are cached."""
    model = facts.model
    if model is None or (seconds := model.weight_bytes / model.read_bytes_s) <= READ_SHARE * START_S:
        return None
    rate = f"{model.read_bytes_s / 1e9:.2g} GB/s"
    message = f"{model.weight_bytes / 1e9:.0f} GB at {rate} take {seconds:.0f} s of the {START_S:.0f} s of a start"
    hint = "a copy on the node's own disk, or a longer --engine.start-deadline-s and --learner.start-deadline-s"
    return Finding(check="model", node=facts.node, verdict=Verdict.WARNING, message=message, hint=hint)


def _folders(
    check: str,
    nodes: Sequence[NodeFacts],
    path: str,
    seen: Callable[[NodeFacts], Folder | None],
    hint: str,
    mark: str,
) -> list[Finding]:
    contents = Counter(folder.content for facts in nodes if (folder := seen(facts)) is not None)
    found: list[Finding] = []
    for facts in nodes:
        folder = seen(facts)
        if not path or folder is None:
            message = f"not named; --{check.replace('directory', 'dir').replace(' ', '-')}"
            found.append(Finding(check=check, node=facts.node, verdict=Verdict.NOT_HERE, message=message))
        elif folder.problem:
            found.append(_found(check, facts, False, folder.problem, hint))
        elif folder.mark != mark:
            message = f"{path} here is not the folder that the first node wrote to"
            found.append(_found(check, facts, False, message, hint))
        elif folder.content != contents.most_common(1)[0][0]:
            found.append(_found(check, facts, False, f"{path} here differs from the other nodes'", hint))
        else:
            found.append(_found(check, facts, True, path))
    return found


def _most(nodes: Sequence[NodeFacts], name: str) -> str:
    return Counter(facts.versions.get(name, "") for facts in nodes).most_common(1)[0][0]


def _found(check: str, facts: NodeFacts, right: bool, message: str, hint: str = "") -> Finding:
    verdict = Verdict.OK if right else Verdict.WRONG
    return Finding(check=check, node=facts.node, verdict=verdict, message=message, hint="" if right else hint)
