"""`ray job stop` under a head of ours: a job that takes longer to end than Ray leaves it by itself, and a stage."""

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from actors.cluster import __main__ as cluster
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.verify_run import faults
from rstar_ray.tiny.tiny_model import make_tiny_model

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = """
import asyncio, sys
from actors.launch.exit_status import status_of
from actors.launch.stop_signals import StopSignals, grace_of_run

async def run():
    stop = StopSignals(grace_of_run(60))
    with stop.handled():
        with open(sys.argv[1], "a") as lives:
            lives.write("began, ")
        while not stop.asked():
            await asyncio.sleep(0.05)
        await asyncio.sleep(5)  # a checkpoint; Ray leaves a job 3 s
        with open(sys.argv[1], "a") as lives:
            lives.write("saved")

sys.exit(status_of(lambda: asyncio.run(run())))
"""

REWARD = """
import zlib

async def reward(completion, problem):
    return float(zlib.crc32(completion.encode()) % 2)  # groups differ, whatever the policy has learned
"""
STEPS = 10
STAGE = (
    f"--scale tiny --steps {STEPS} --prompts-per-step 2 --max-empty-steps 1000 --checkpoint.every-steps 1000"
    " --rollout.max-response-tokens 96 --data.num-train 64 --reward.name own:reward --engine.cpus-per-replica 0.4"
    " --evaluate.num-problems 2 --evaluate.samples 1 --evaluate.max-response-tokens 32"
)
LEFT_S = 20.0
CACHES = "torchinductor_"  # torch's, for later runs


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a head as `make cluster-up` starts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cluster"))
        patch.setattr(cluster, "DASHBOARD_PORT", cluster.free_port())
        patch.delenv(cluster.STOP_WAIT, raising=False)
        cluster.up()
        try:
            yield f"http://{cluster.HOST}:{cluster.DASHBOARD_PORT}"
        finally:
            cluster.down()


def test_a_job_that_is_stopped_ends_in_its_own_time_also_one_that_is_started_again(dashboard: str, tmp_path: Path):
    from ray.job_submission import JobStatus, JobSubmissionClient

    def until(claim: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 600  # on a machine with much else to do
        while not claim():
            assert time.monotonic() < give_up_s, [jobs.get_job_logs(name) for name in starts]
            time.sleep(0.1)

    jobs = JobSubmissionClient(dashboard)
    (tmp_path / "job.py").write_text(JOB)
    starts = {"alone": [], "again": [str(REPOSITORY / "recipes/again.py")]}
    for name, words in starts.items():
        command = [sys.executable, *words, str(tmp_path / "job.py"), str(tmp_path / name)]
        jobs.submit_job(entrypoint=shlex.join(command), submission_id=name)
    until(lambda: all((tmp_path / name).exists() for name in starts))
    for name in starts:
        jobs.stop_job(name)
    until(lambda: all(jobs.get_job_status(name) == JobStatus.STOPPED for name in starts))
    for name in starts:
        log = jobs.get_job_logs(name)
        assert (tmp_path / name).read_text() == "began, saved", log
        assert log.count("the run ends after the current step") == 1


@pytest.mark.slow
def test_a_stage_that_is_stopped_in_a_step_keeps_it_leaves_nothing_and_continues_to_its_end(
    dashboard: str, tmp_path: Path
):
    from ray.job_submission import JobStatus, JobSubmissionClient

    jobs, run = JobSubmissionClient(dashboard), RunDir(tmp_path / "run")
    policy = make_tiny_model(tmp_path / "policy", seed=0)
    (tmp_path / "own.py").write_text(REWARD)
    words = [sys.executable, str(REPOSITORY / "recipes/stage1.py"), "--run-dir", str(run.path), "--model", str(policy)]
    command = shlex.join([*words, "--own-folder", str(tmp_path), *STAGE.split()])

    def until(claim: Callable[[], bool], name: str, seconds: float = 600) -> None:
        give_up_s = time.monotonic() + seconds
        while not claim():
            assert time.monotonic() < give_up_s, jobs.get_job_logs(name)
            time.sleep(0.2)

    def steps() -> list[int]:
        path = run.path / "metrics.jsonl"
        return [row["step"] for row in read_rows(path)] if path.exists() else []

    temporary = Path(tempfile.mkdtemp(prefix="stop-"))  # short: there are sockets in it
    its_own = {"env_vars": {"TMPDIR": str(temporary)}}
    jobs.submit_job(entrypoint=command, submission_id="stopped", runtime_env=its_own)
    until(lambda: len(steps()) >= 2, "stopped")
    ours = [psutil.Process(one["pid"]) for one in json.loads(run.processes_path.read_text()).values()]
    jobs.stop_job("stopped")
    until(lambda: jobs.get_job_status("stopped") == JobStatus.STOPPED, "stopped")
    log, reached = jobs.get_job_logs("stopped"), steps()[-1]
    assert log.count("the run ends after the current step") == 1
    checkpoint = run.newest_checkpoint("stage1")
    assert checkpoint is not None and 2 <= checkpoint.step == reached < STEPS, log
    until(lambda: not any(process.is_running() for process in ours), "stopped", LEFT_S)
    assert [path.name for path in temporary.iterdir() if not path.name.startswith(CACHES)] == []
    shutil.rmtree(temporary)

    jobs.submit_job(entrypoint=command, submission_id="resumed")
    until(lambda: jobs.get_job_status("resumed") in (JobStatus.SUCCEEDED, JobStatus.FAILED), "resumed")
    log = jobs.get_job_logs("resumed")
    assert jobs.get_job_status("resumed") == JobStatus.SUCCEEDED, log
    assert f"stage1: resuming after step {reached}" in log
    assert steps() == [*range(1, STEPS + 1)]
    assert not faults(run.path)
