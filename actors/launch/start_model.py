"""The initial model of a run: a folder that the user names, the previous stage's, or at scale tiny a new one."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.generation.vllm_calls import VllmCalls
from actors.launch.datasets import require_tiny
from rstar_ray.chat.hub import local_folder
from rstar_ray.chat.load_chat import configured_chat, load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import RunConfig, with_values
from rstar_ray.errors import ConfigError
from rstar_ray.tiny.tiny_model import CONTEXT_TOKENS, TINY, make_tiny_model
from rstar_ray.tools.spec import ToolSpec
from scheduler.planner.model_shape import heads_split


def with_local_model(config: RunConfig, *, weights: bool = True) -> RunConfig:
    """The config with the model as an absolute folder, since learner ranks start in other folders; a hub id is
    downloaded, with `weights` its weights too.
    """
    if not config.model:
        return config
    return with_values(config, {"model": str(local_folder(config.model, weights=weights).absolute())})


def start_chat(config: RunConfig, folder: Path, tools: Sequence[ToolSpec]) -> TokenizerChat:
    """The chat of the model in `folder`, or the tiny model's if the folder does not exist yet.

    Raises `ConfigError` if the chat template cannot be used.
    """
    if not (folder / "config.json").is_file():
        from rstar_ray.tiny.tokenizer import make_tokenizer

        instruct = config.rollout.instruct
        return configured_chat(
            make_tokenizer(), config.chat, generation={}, instruct=instruct, tools=tools, syntax_of=VllmCalls
        )
    return load_chat(folder, config.chat, instruct=config.rollout.instruct, tools=tools, syntax_of=VllmCalls)


def start_model(config: RunConfig, run_path: Path, finished: Path | None) -> Path:
    """The Hugging Face folder whose architecture and tokenizer the run uses; made if needed at scale tiny."""
    folder = start_folder(config, run_path, finished)
    own = not config.model and finished is None
    if own and not (folder / "config.json").exists():
        _make_atomically(folder, config.seed)
    return folder


def _make_atomically(folder: Path, seed: int) -> None:
    """Make the model in a temporary folder, then rename it: a killed run must not leave an incomplete model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".tmp-{folder.name}-", dir=folder.parent) as partial:
        made = make_tiny_model(Path(partial) / folder.name, seed)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # otherwise another process has made the same model
                raise


def start_folder(config: RunConfig, run_path: Path, finished: Path | None) -> Path:
    """The folder where `start_model` finds or makes the model."""
    if config.model:
        return Path(config.model)
    if finished is not None:
        return finished / "model"
    require_tiny(config, "--model", "give a Hugging Face model folder, or run the stage before")
    return run_path / "start-model"


def check_context(config: RunConfig, folder: Path) -> None:
    """Raises `ConfigError` if --engine.max-context-tokens exceeds the positions of the model in `folder`.

    `folder`: from `start_folder`; the tiny model may not exist yet.
    """
    path, asked = folder / "config.json", config.engine.max_context_tokens
    limit = model_context_tokens(path) if path.is_file() else CONTEXT_TOKENS
    if limit is not None and asked > limit:
        raise ConfigError(
            "--engine.max-context-tokens",
            f"{asked} is above the {limit} of the model in {folder}",
            f"give at most {limit}, and response budgets below it",
        )


def check_heads(config: RunConfig, folder: Path) -> None:
    """Raises `ConfigError` if the attention heads of the model in `folder` cannot be split evenly over GPUs.

    `folder` as for `check_context`.
    """
    path, parts = folder / "config.json", config.engine.tensor_parallel
    sizes = _text_model(path) if path.is_file() else TINY
    heads = sizes.get("num_attention_heads")
    kv_heads = sizes.get("num_key_value_heads") or heads
    if isinstance(heads, int) and isinstance(kv_heads, int) and not heads_split(heads, kv_heads, parts):
        good = [str(number) for number in range(1, heads + 1) if heads_split(heads, kv_heads, number)]
        raise ConfigError(
            "--engine.tensor-parallel",
            f"vLLM cannot split the {heads} attention heads and {kv_heads} KV heads of the model in {folder} over "
            f"{parts} GPUs",
            f"give one of {', '.join(good)}",
        )


def _text_model(path: Path) -> dict[str, Any]:
    """A config.json, or its `text_config`. Raises `ConfigError` if it cannot be read."""
    try:
        config = json.loads(path.read_bytes())
        return dict(config.get("text_config") or config)
    except (OSError, ValueError, TypeError, AttributeError) as broken:
        raise ConfigError("--model", f"{path} cannot be read ({broken})", "give a complete model folder") from broken


def model_context_tokens(path: Path) -> int | None:
    """Number of positions of a config.json, computed as vLLM does; None if it has no such entry."""
    config = _text_model(path)
    positions = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(positions, int):
        return None
    # Other types already include the factor in max_position_embeddings.
    stretched = rope.get("rope_type", rope.get("type")) in ("linear", "dynamic")
    return int(positions * (rope.get("factor") or 1)) if stretched else positions
