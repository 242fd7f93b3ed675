"""A checkpoint as a folder to publish: the model, and a model card written from the run directory.

rstar export runs/mine
rstar export runs/mine --hub me/my-model

Takes the checkpoint with the best held-out score of the newest stage, or its newest one where none was evaluated. With
--hub the folder is uploaded by the account that `hf auth login` or HF_TOKEN names; without such a token, the files that
would be uploaded are printed. The card's licence is a placeholder: edit README.md in the folder before you upload. A
folder with these weights that is there already is used as it is.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

from rstar_ray.chat.hub import HUB_ID
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError, one_line
from rstar_ray.evaluation.evaluator import best_checkpoint
from rstar_ray.report.model_card import model_card
from rstar_ray.report.run_record import read_run
from rstar_ray.run_dir.durable import read_json, write_text
from rstar_ray.run_dir.folder import Checkpoint, RunDir
from rstar_ray.run_dir.manifest import MANIFEST, checksum, damage
from rstar_ray.stages import STAGES


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""
    stage: str = ""
    """stage to export; empty is the newest with a checkpoint"""
    step: int | None = None
    """step of the checkpoint; None is the one with the best held-out score, or the newest without scores"""
    to: Path | None = None
    """folder to write; None is export/<stage>-step-<step> in the run directory"""
    hub: str = ""
    """repository on the Hugging Face hub, such as me/my-model, to upload to; created where missing; empty: none"""
    public: bool = False
    """create the repository public instead of private"""


def chosen(options: ExportOptions) -> Checkpoint:
    """The checkpoint to export. Raises `ConfigError` where there is none, or it is damaged."""
    run_dir = RunDir(options.run)
    stages = [options.stage] if options.stage else list(reversed(STAGES))
    found = next((kept for stage in stages if (kept := run_dir.checkpoints(stage))), [])
    if not found:
        of = f" of {options.stage}" if options.stage else ""
        raise ConfigError("run", f"{run_dir.path} has no undamaged checkpoint{of}", "give a run directory with one")
    if options.step is None:
        checkpoint = best_checkpoint(run_dir, found[0].stage) or found[-1]
    else:
        steps = {checkpoint.step: checkpoint for checkpoint in found}
        if options.step not in steps:
            kept = ", ".join(map(str, steps))
            raise ConfigError("--step", f"no checkpoint of {found[0].stage} (got {options.step})", f"choose {kept}")
        checkpoint = steps[options.step]
    if wrong := damage(checkpoint.path):
        raise ConfigError("--step", f"{checkpoint.path} is damaged: {wrong}", "choose another step")
    return checkpoint


def export(options: ExportOptions) -> Path:
    """Write the folder and return it; an existing one with the same weights is left as it is."""
    if options.hub and not HUB_ID.fullmatch(options.hub):
        raise ConfigError("--hub", f"not a repository (got {options.hub})", "give OWNER/NAME")
    run = read_run(options.run)
    checkpoint = chosen(options)
    folder = options.to or run.path / "export" / checkpoint.path.name
    if folder.exists():
        if not (folder / "README.md").is_file():
            raise ConfigError("--to", f"{folder} exists and is not an export", "name a new folder")
        if not _holds_weights_of(folder, checkpoint):
            problem = f"{folder} has other weights than {checkpoint.path.name}"
            raise ConfigError("--to", problem, "remove the folder, or name a new one")
        print(f"already exported, used as it is: {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as partial:
        made = shutil.copytree(checkpoint.path / "model", Path(partial) / "model")
        if (adapter := checkpoint.path / "adapter").is_dir():
            shutil.copytree(adapter, made / "adapter")
        write_text(made / "README.md", model_card(run, checkpoint))
        made.rename(folder)
    print(f"exported {checkpoint.path.name}: {folder}")
    return folder


def _holds_weights_of(folder: Path, checkpoint: Checkpoint) -> bool:
    listed = read_json(checkpoint.path / MANIFEST)["files"]
    weights = {name: entry for name, entry in listed.items() if re.fullmatch(r"model/.*\.safetensors", name)}
    copies = {folder / name.removeprefix("model/"): entry["sha256"] for name, entry in weights.items()}
    return all(path.is_file() and checksum(path) == sha256 for path, sha256 in copies.items())


def upload(folder: Path, repository: str, *, public: bool) -> None:
    """With a token, upload the folder; without one, print what would be uploaded."""
    from huggingface_hub import HfApi, get_token

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not get_token():
        print(f"no token (hf auth login, or HF_TOKEN); with one, this would be uploaded to {repository}:")
        for path in files:
            print(f"  {path.stat().st_size:>13,}  {path.relative_to(folder)}")
        return
    hub = HfApi()
    try:
        url = hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by rstar export")
    except Exception as failed:  # the hub's client raises many kinds, from no network to a wrong token
        raise ConfigError(
            "--hub", f"{repository}: {one_line(failed)}", "check the name, the token and the network"
        ) from failed
    print(f"uploaded {len(files)} files: {url}")


def _run(options: ExportOptions) -> None:
    folder = export(options)
    if options.hub:
        upload(folder, options.hub, public=options.public)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(ExportOptions, _run, argv, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
