"""`ray job stop` under a head of ours: a job that takes longer to end than Ray leaves one by itself."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors import cluster

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = """
import asyncio, sys
from recipes.ending import status_of
from recipes.stop import StopSignals, grace_of_run

async def run():
    stop = StopSignals(grace_of_run(60), lambda line: print(line, flush=True))
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
        give_up_s = time.monotonic() + 120  # on a machine with much else to do
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
        assert log.count("the run ends after the step under way") == 1
