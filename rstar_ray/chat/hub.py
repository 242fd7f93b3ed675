"""Downloads a model from the Hugging Face hub once, and returns its folder."""

import re
from pathlib import Path

from rstar_ray.errors import ConfigError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
OTHER = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
REACH_S = 10.0
"""Longest wait for the hub's answer on whether it has a newer version."""


def local_folder(model: str, *, weights: bool = True) -> Path:
    """The folder of a model given by path or by hub id; a model that is not cached is downloaded.

    Raises `ConfigError` in one line where no such folder or model exists, or where there is no network to
    download it.
    """
    folder = Path(model).expanduser()
    if folder.exists() or not HUB_ID.fullmatch(model):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*OTHER, *(WEIGHTS if weights else ())]
    try:
        here = Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
        if not weights or any(here.glob("*.safetensors")):
            return here
    except LocalEntryNotFoundError:
        pass
    return _fetched(model, patterns)


def _fetched(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=patterns, etag_timeout=REACH_S))
    except GatedRepoError as gated:
        raise ConfigError("--model", f"{model} is gated: its owner has to grant access", "see its page") from gated
    except RepositoryNotFoundError as missing:
        raise ConfigError(
            "--model", f"{model} is not a folder, and the hub has no such model", "check the name"
        ) from missing
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as failed:
        raise ConfigError(
            "--model",
            f"{model} is not a folder, it was not fetched before, and the hub cannot be reached "
            f"({type(failed).__name__})",
            "give a folder, or fetch it where there is a network",
        ) from failed
