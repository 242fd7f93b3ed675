"""Paths that a run's actors use on any node: made absolute; those that are read must hold the same as on the driver."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rstar_ray.chat.load_chat import load_tokenizer
from rstar_ray.config import RunConfig, own_entries, with_values
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_object
from rstar_ray.telemetry.traces import is_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """One path that every node must have."""

    option: str
    path: Path
    holds: Literal["model", "file", "code"]
    entries: tuple[str, ...] = ()  # for code: the `module:object` names that settings refer to


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make paths absolute, because Ray starts processes in other folders."""
    traces = config.telemetry.traces
    named = {
        "own_folder": config.own_folder or ".",
        "telemetry.traces": "" if is_address(traces) else traces,
        "chat.template": config.chat.template,
        "chat.tool_schema": config.chat.tool_schema,
        "optimizer.save_bad_updates": config.optimizer.save_bad_updates,
        "algorithm.reference_model": config.algorithm.loaded_reference,
    }
    return with_values(config, {name: str(_absolute(path)) for name, path in named.items() if path})


def needed_paths(config: RunConfig, model: Path) -> list[Needed]:
    """Paths that the run reads outside its run directory; problem files are excluded, only the driver reads them.

    `model`: the policy's folder, which may not exist yet. Raises `ConfigError` for a reference model with another
    vocabulary.
    """
    needed = [Needed(option="--model", path=_absolute(model), holds="model")]
    if reference := config.algorithm.loaded_reference:
        _refuse_other_vocabulary(config, _absolute(model), _absolute(reference))
        needed.append(Needed(option="--algorithm.reference-model", path=_absolute(reference), holds="model"))
    if template := config.chat.template:
        needed.append(Needed(option="--chat.template", path=_absolute(template), holds="file"))
    if schema := config.chat.tool_schema:
        needed.append(Needed(option="--chat.tool-schema", path=_absolute(schema), holds="file"))
    if own := own_entries(config):
        needed.append(Needed(option="--own-folder", path=_absolute(config.own_folder), holds="code", entries=own))
    return needed


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def _refuse_other_vocabulary(config: RunConfig, model: Path, reference: Path) -> None:
    """Raise `ConfigError` where the reference model numbers tokens differently: its log-probs would be those of other
    tokens. Compared by token where both folders have a tokenizer, otherwise by vocab_size; weights are not read. The
    reference model may have further tokens.
    """
    ours, theirs = _tokens(model, made=config.scale == "tiny"), _tokens(reference)
    if ours and theirs:
        differ = sorted(token for token, number in ours.items() if theirs.get(token) != number)
        if not differ:
            return
        there, here = theirs.get(differ[0], "absent"), ours[differ[0]]
        wrong = f"token {differ[0]!r} is {there} there, {here} in --model; differing tokens: {len(differ)}"
    else:
        size, other = _vocab_size(model) or len(ours), _vocab_size(reference) or len(theirs)
        if not size or not other or other >= size:
            return
        wrong = f"vocab_size is {other} there, {size} in --model"
    raise ConfigError(
        "--algorithm.reference-model",
        f"{config.algorithm.reference_model} has another vocabulary than {config.model or model} ({wrong})",
        "give a model with the tokenizer of --model",
    )


def _tokens(folder: Path, *, made: bool = False) -> dict[str, int]:
    """Ids by token; empty without a readable tokenizer. `made`: the run makes the tiny model if none exists."""
    if made and not (folder / "config.json").is_file():
        from rstar_ray.tiny.tokenizer import make_tokenizer

        return make_tokenizer().get_vocab()
    try:
        return load_tokenizer(folder).get_vocab()
    except ConfigError:
        return {}


def _vocab_size(folder: Path) -> int | None:
    """Of config.json; None where it is not known."""
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else None
