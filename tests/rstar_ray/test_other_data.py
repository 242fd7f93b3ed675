"""A stage continues with what it was begun on, or not at all: its position is one in that."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from rstar_ray.algorithm.update import SftExample
from rstar_ray.config import RunConfig, with_values
from rstar_ray.data.order import digest_of_problems, digest_of_rows
from rstar_ray.errors import ConfigError, Stopped
from rstar_ray.run_dir.durable import read_json, write_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stage_progress import StageProgress, refuse_other_data
from rstar_ray.stages import run_sft
from tests.fakes import SkilledPolicy, adding_problems, fake_context, in_run
from tests.rstar_ray.test_stages import stage, train

pytestmark = pytest.mark.usefixtures("without_fsync")
SMALL = stage(
    "stage1", steps=4, prompts_per_step=3, algorithm__rollouts_per_prompt=6, algorithm__keep=3,
    algorithm__least_failures=1, checkpoint__every_steps=1, sft__steps=4, sft__batch_size=2,
    data__train="mine.jsonl", sft__data="said.jsonl",
)  # fmt: skip
PROBLEMS = adding_problems(8)


OTHERS = {
    "edited": [replace(PROBLEMS[0], problem="1+1"), *PROBLEMS[1:]],
    "with another answer": [*PROBLEMS[:-1], replace(PROBLEMS[-1], answer="7")],
    "appended to": [*PROBLEMS, replace(PROBLEMS[0], id="more")],
    "shorter": PROBLEMS[:-1],
    "in another order": PROBLEMS[::-1],
}


@pytest.mark.parametrize("what", OTHERS)
async def test_a_stage_does_not_continue_with_other_problems(what: str, tmp_path: Path):
    with pytest.raises(Stopped):
        await train(SMALL, tmp_path, problems=PROBLEMS, stops_after=2)
    before = read_json(tmp_path / "checkpoints" / "stage1-step-000002" / "progress.json")
    with pytest.raises(ConfigError, match=r"--data\.train: stage1 reached step 2 with other problems than mine.jsonl"):
        await train(SMALL, tmp_path, problems=OTHERS[what])
    await train(SMALL, tmp_path, problems=[replace(problem) for problem in PROBLEMS])
    ended = read_json(tmp_path / "checkpoints" / "stage1-step-000004" / "progress.json")
    assert ended["data"] == before["data"] == digest_of_problems(PROBLEMS)


async def test_a_hard_set_continues_where_only_what_was_not_chosen_changed(tmp_path: Path):
    config = with_values(SMALL, {"stage": "stage3", "drop_solved": True})
    with pytest.raises(Stopped):
        await train(config, tmp_path, problems=PROBLEMS, stops_after=2)
    chosen = set(read_json(tmp_path / "stage3-problems.json"))
    write_json(tmp_path / "stage3-problems.json", sorted(chosen - {"add-7"}))  # as if it was always solved
    with pytest.raises(ConfigError, match="stage3 reached step 2 with other problems"):
        await train(config, tmp_path, problems=PROBLEMS)
    write_json(tmp_path / "stage3-problems.json", sorted(chosen))
    (kept,) = [problem for problem in PROBLEMS if problem.id == min(chosen)]
    edited = [replace(problem, problem="1+1") if problem == kept else problem for problem in PROBLEMS]
    with pytest.raises(ConfigError, match="stage3 reached step 2 with other problems"):
        await train(config, tmp_path, problems=edited)
    others = [problem for problem in PROBLEMS if problem.id in chosen]
    await train(config, tmp_path, problems=[*others, replace(kept, id="more")])


async def test_sft_does_not_continue_with_other_conversations(tmp_path: Path):
    config = with_values(SMALL, {"stage": "sft"})
    rows = [SftExample(np.arange(9), np.ones(9, dtype=bool), name=f"said.jsonl:{n}") for n in range(1, 8)]

    async def run_on(train: Sequence[SftExample], source: str, *, stops: bool = False) -> None:
        context = replace(fake_context(SkilledPolicy()), stop_requested=lambda: stops)
        with RunDir.open(tmp_path, "sft", asdict(config)) as run_dir:
            await run_sft(config, train, [], in_run(context, run_dir), source=source)

    with pytest.raises(Stopped):
        await run_on(rows, "a", stops=True)
    for others, source in ((rows[1:], "a"), (rows, "b"), ([*rows, replace(rows[0], name="said.jsonl:8")], "a")):
        with pytest.raises(ConfigError, match=r"--sft\.data: sft reached step 1 with other conversations than said"):
            await run_on(others, source)
    await run_on([replace(row, token_ids=np.arange(9) + 1) for row in rows], "a")  # as on another day
    assert read_json(tmp_path / "checkpoints" / "sft-step-000004" / "progress.json")["data"] == digest_of_rows(
        rows, "a"
    )


async def test_a_position_that_does_not_say_what_it_is_in_is_refused_with_its_file(tmp_path: Path):
    with pytest.raises(Stopped):
        await train(SMALL, tmp_path, problems=PROBLEMS, stops_after=2)
    note = tmp_path / "checkpoints" / "stage1-step-000002" / "progress.json"
    saved = read_json(note)
    for unsaid in ("data", "signs"):
        write_json(note, {name: value for name, value in saved.items() if name != unsaid})
        with pytest.raises(ConfigError, match=rf"progress\.json: no object with .*{unsaid}"):
            StageProgress.read(note.parent)
    with pytest.raises(ConfigError, match="than scale tiny has now"):
        refuse_other_data(RunConfig(), StageProgress(step=3), "a")
    refuse_other_data(RunConfig(), StageProgress(), "a")  # of nothing yet
