"""An evaluation from its command to its end, with fakes in place of actors: who may write, and how it ends."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.health.watchdog import Watchdog
from actors.launch import checks, evaluation
from actors.launch.checks import Start
from actors.launch.evaluation import launch_evaluation
from actors.weights import model_parameters
from recipes.evaluate import EVALUATE
from rstar_ray.config import RunConfig
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.request_digest import plugin_digest
from rstar_ray.rollouts import DroppedRollout, FinishedRollout
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.trajectory import RolloutRequest
from tests.fakes import LocalRollouts, SkilledPolicy, adding_problems, enough, fake_context
from tests.rstar_ray.fabricate import write_rows

pytestmark = pytest.mark.usefixtures("without_fsync")
PROBLEMS = adding_problems(6)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of an evaluation of a folder's policy, which has neither weights nor a tokenizer."""

    def none(*_: object, **__: object) -> None: ...

    for name in ("check_context", "check_heads", "start_chat", "log_too_long"):
        monkeypatch.setattr(checks, name, none)
    for name in ("refuse_misfit", "refuse_unpacked"):
        monkeypatch.setattr(model_parameters, name, none)
    monkeypatch.setattr(evaluation, "load_chat", none)
    model, exam = tmp_path / "model", tmp_path / "exam.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    rows = ({"id": one.id, "problem": one.problem, "answer": one.answer} for one in PROBLEMS)
    write_rows(exam, *rows)
    place = ["--scale", "tiny", "--run-dir", str(tmp_path / "run"), "--model", str(model)]
    return [*place, "--evaluate.files", str(exam), "--evaluate.samples", "2"]


class Rollouts(LocalRollouts):
    """What happens after its fifth rollout is a test's to say; after that none ends."""

    def __init__(self, actors: "FakeActors") -> None:
        super().__init__(SkilledPolicy())
        self._actors = actors

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        FakeActors.asked.append(len(requests))
        ended = 0
        async for end in super().run(requests):
            yield end
            ended += 1
            if ended == 5 and FakeActors.after_five is not None:
                FakeActors.after_five(self._actors)
                await asyncio.Event().wait()


class FakeActors:
    """In place of all actors of an evaluation, but for what watches them."""

    after_five: Any = None
    asked: list[int]  # rollouts, at each start
    closed: int
    journals: set[Path]

    def __init__(self, config: Any, model: Path, *, chat: Any, tools: Any, journal: Path) -> None:
        journal.mkdir(parents=True, exist_ok=True)
        self.journals.add(journal)
        self.watchdog = Watchdog(config.detector)
        self._context = replace(
            fake_context(SkilledPolicy()), rollouts=Rollouts(self), plugin_digest=plugin_digest(config, tools)
        )

    async def start(self, *, learner: bool) -> None:
        assert not learner
        self.watchdog.start()

    async def serving(self) -> None: ...

    def context(self, run_dir: RunDir, stop_requested: Any) -> Any:
        return replace(self._context, run_dir=run_dir)

    async def close(self) -> None:
        FakeActors.closed += 1
        await self.watchdog.close()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeActors, "asked", [], raising=False)
    monkeypatch.setattr(FakeActors, "closed", 0, raising=False)
    monkeypatch.setattr(FakeActors, "journals", set(), raising=False)
    monkeypatch.setattr("actors.system.TrainingActors", FakeActors)
    monkeypatch.setattr(evaluation, "connect", lambda: None)
    monkeypatch.setattr("actors.preflight.nodes.refuse_unseen", lambda *paths: None)


def ended_with(status: int, options: list[str], after_five: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FakeActors, "after_five", staticmethod(after_five))
        with pytest.raises(SystemExit, match=str(status)):
            launch_evaluation(EVALUATE, options)
    assert FakeActors.closed == 1


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_evaluation_that_is_asked_to_stop_closes_and_the_same_command_continues(
    number: signal.Signals,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    ended_with(130, options, lambda actors: os.kill(os.getpid(), number), monkeypatch)
    out, err = capsys.readouterr()
    assert f"{number.name}: the evaluation ends here; finished problems are kept;" in out
    assert "stopped; finished problems are kept; the same command resumes it" in out and err == ""
    (rows,) = (tmp_path / "run" / "evaluations").iterdir()
    finished = len(read_rows(rows))
    (journal,) = FakeActors.journals
    assert journal.parent == tmp_path / "run" / "journal" and journal.exists()
    launch_evaluation(EVALUATE, options)
    assert FakeActors.journals == {journal} and not journal.exists()
    assert FakeActors.asked == [12, 12 - 2 * finished] and finished
    (row,) = read_rows(tmp_path / "run" / "evaluations.jsonl")
    assert (row["stage"], row["set"], row["num_problems"]) == ("evaluate", "exam", 6)


def test_where_a_node_does_not_see_the_directory_nothing_is_kept_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    def unseen(path: Path) -> None:
        raise ConfigError(
            "--run-dir", f"node-1 do not see {path} (there is none)", "give a folder that all nodes mount"
        )

    monkeypatch.setattr("actors.preflight.nodes.refuse_unseen", unseen)
    assert evaluation._journal(Start(asked=[RunConfig(run_dir=str(tmp_path))]), "evaluate-1f") is None
    rest = "rollouts of a lost worker restart from their prompts"
    assert logged == [f"node-1 do not see {tmp_path} (there is none): {rest}"]


def test_two_that_ask_the_same_never_write_the_same_rows_and_any_other_may_be_beside(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    statuses: list[int] = []

    def beside() -> None:
        """While the first has begun."""
        monkeypatch.setattr(evaluation, "connect", enough)
        for more in ([], ["--evaluate.temperature", "0.3"]):
            with pytest.raises(SystemExit) as ended:
                launch_evaluation(EVALUATE, [*options, *more])
            statuses.append(ended.value.code)  # type: ignore[arg-type]
        enough()

    monkeypatch.setattr(evaluation, "connect", beside)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with RunDir(tmp_path / "run").held(), pytest.raises(SystemExit, match="1"):  # by a run that trains
        launch_evaluation(EVALUATE, options)
    assert statuses == [2, 1]
    refused, *_ = capsys.readouterr().err.splitlines()
    assert refused.startswith(f"error: --run-dir: {tmp_path / 'run' / 'evaluations' / 'exam-'}")
    written = " is being written by another evaluation with the same requests"
    assert refused.endswith(f"{written}. Hint: wait for it to end or name another directory")
