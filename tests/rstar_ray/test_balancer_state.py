"""What the balancer has learned, in a checkpoint and given back from it; none of it is worth a run."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rstar_ray.checkpointing import BALANCER_STATE
from rstar_ray.config import RunConfig
from rstar_ray.errors import Stopped
from rstar_ray.run_dir.durable import read_json
from rstar_ray.run_dir.manifest import MANIFEST, write_manifest
from rstar_ray.run_dir.verify_run import faults
from tests.fakes import Published, SkilledPolicy, fake_context
from tests.rstar_ray.test_stages import stage, train

pytestmark = pytest.mark.usefixtures("without_fsync")
CONFIG = stage("stage1", steps=4, checkpoint__every_steps=2)
KNOWN = {"versions": 3, "share": 0.1 + 0.2}  # after two steps: versions 0, 1 and 2


class Life:
    """A driver's, with a balancer that has learned how many versions were published."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.published = list[Published]()
        self.loaded: list[tuple[int, Mapping[str, object]]] = []  # and the version that was published by then
        self.fault: Exception | None = None  # when it is asked
        self.context = fake_context(
            SkilledPolicy(),
            published=self.published,
            services={"balancer_state": self.learned, "load_balancer_state": self.load},
        )

    async def learned(self) -> Mapping[str, object] | None:
        if self.fault is not None:
            raise self.fault
        return {"versions": len(self.published), "share": 0.1 + 0.2}

    async def load(self, saved: Mapping[str, object]) -> None:
        if "nonsense" in saved:
            raise ValueError("deaths_B has 3 bins, not 48")
        self.loaded.append((self.published[-1][0], saved))

    async def run(self, config: RunConfig = CONFIG) -> None:
        await train(config, self.path, self.context)

    async def stopped_after(self, steps: int) -> None:
        self.context = replace(self.context, stop_requested=lambda: len(self.published) > steps)
        with pytest.raises(Stopped):
            await self.run()


def left_out(logged: list[str]) -> list[str]:
    return [line for line in logged if "is skipped" in line]


def folder(path: Path, step: int) -> Path:
    return path / "checkpoints" / f"stage1-step-{step:06d}"


async def test_a_run_that_continues_loads_what_its_checkpoint_had_once_its_version_is_published(
    tmp_path: Path, logged: list[str]
):
    first, second = Life(tmp_path), Life(tmp_path)
    await first.stopped_after(2)
    assert first.loaded == [] and read_json(folder(tmp_path, 2) / BALANCER_STATE) == KNOWN
    assert BALANCER_STATE in read_json(folder(tmp_path, 2) / MANIFEST)["files"]
    await second.run()
    assert second.loaded == [(2, KNOWN)] and left_out(logged) == []
    assert faults(tmp_path) == []


async def test_a_stage_loads_what_the_one_before_it_had_learned_unless_its_policy_is_from_elsewhere(
    tmp_path: Path,
):
    await Life(tmp_path).run()
    after, elsewhere = Life(tmp_path), Life(tmp_path)
    await after.run(replace(CONFIG, stage="stage2"))
    await elsewhere.run(replace(CONFIG, stage="stage3", model=str(folder(tmp_path, 4))))
    assert [version for version, _ in after.loaded] == [4] and elsewhere.loaded == []


async def test_a_balancer_that_cannot_say_what_it_has_learned_costs_a_line_and_the_next_start_loads_nothing(
    tmp_path: Path, logged: list[str]
):
    first, second = Life(tmp_path), Life(tmp_path)
    first.fault = OSError("the balancer is away")
    await first.stopped_after(2)
    assert left_out(logged) == [
        f"{BALANCER_STATE} of the checkpoint after step 2 is skipped: OSError: the balancer is away"
    ]
    assert not (folder(tmp_path, 2) / BALANCER_STATE).exists() and faults(tmp_path) == []
    logged.clear()
    await second.run()
    assert second.loaded == [] and left_out(logged) == [] and (folder(tmp_path, 4) / BALANCER_STATE).exists()


@pytest.mark.parametrize(
    ("learned", "said"),
    [
        (json.dumps({"nonsense": 1}).encode(), "ValueError: deaths_B has 3 bins, not 48"),
        (b"{torn", "ConfigError: "),
        (b"[]", "ConfigError: "),
        (b"\xff\xfe", "ConfigError: "),
    ],
)
async def test_a_whole_file_of_nonsense_is_a_line_and_the_run_continues_without_it(
    learned: bytes, said: str, tmp_path: Path, logged: list[str]
):
    first, second = Life(tmp_path), Life(tmp_path)
    await first.stopped_after(2)
    (folder(tmp_path, 2) / BALANCER_STATE).write_bytes(learned)
    (folder(tmp_path, 2) / MANIFEST).unlink()
    write_manifest(folder(tmp_path, 2), stage="stage1", step=2)
    await second.run()
    (line,) = left_out(logged)
    assert line.startswith(f"{BALANCER_STATE} of stage1-step-000002 is skipped: {said}") and second.loaded == []
    assert read_json(tmp_path / "finished" / "stage1.json")["step"] == 4
