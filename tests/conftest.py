"""Set before anything imports Ray, vLLM or torch: a separate token, quiet, one thread each."""

import atexit
import functools
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from actors.cluster.auth import private_directory  # noqa: E402
from tests.logged import Logged, logged_lines  # noqa: E402

os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=secrets.token_hex(32),  # every Ray of this test run asks for it, and none touches the account's
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",  # Ray's default, 15, would leave its workers little beside any other process
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    PYTHONPATH=os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # Ray's link to its latest session is per directory
    of_run = f"{worker}-{os.environ['PYTEST_XDIST_TESTRUNUID'][:6]}"  # a user may run the tests twice at a time
    os.environ["RAY_TMPDIR"] = f"{os.environ.get('TMPDIR') or '/tmp'}/ray-{os.geteuid()}-{of_run}"
    atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)
private_directory()  # every Ray of this test run keeps its files there

# How long one example takes says something of the machine's other work, and nothing of what is tested.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

TOGETHER = {
    "sandbox": ("tests/sandbox/",),  # many of them measure time
    "transformers": (  # which takes seconds to import
        *("tests/rstar_ray/tiny/", "tests/rstar_ray/chat/", "tests/rstar_ray/test_sft.py"),
        *("tests/rstar_ray/test_talk.py",),
        *("tests/actors/test_model_folder.py", "tests/actors/test_base_model.py"),
    ),
}
LONGEST = (
    *("tests/recipes/test_real_shaped.py", "tests/recipes/test_train_real.py", "tests/chaos/test_chaos_real.py"),
    *("tests/actors/test_agents_real.py", "tests/actors/test_system.py", "tests/test_wheel.py"),
)
"""Files with few tests that take a minute or more each: first, so that no process waits for another at the end."""


@pytest.fixture
def logged() -> Iterator[Logged]:
    """The lines that the product logs meanwhile."""
    with logged_lines() as lines:
        yield lines


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, and not waited for until they lie on the disk: whole stages of a recipe write hundreds."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("real"):
        import ray

        if not hasattr(ray.init, "once"):
            ray.init = started_twice_if_slow(ray.init)


def started_twice_if_slow(once: Any) -> Any:
    """Ray gives its own processes 30 s to start, which a busy machine may take."""

    @functools.wraps(once)
    def started(*args: Any, **kwargs: Any) -> Any:
        try:
            return once(*args, **kwargs)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            import ray

            ray.shutdown()
            return once(*args, **kwargs)

    started.once = once  # type: ignore[attr-defined]
    return started


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In several processes, the tests of a file stay in one, whose imports and fixtures they share; some files do so
    with others. `loadgroup` needs an older pytest."""
    if config.getoption("dist") != "load":
        return None  # asked for something else
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((name for name, paths in TOGETHER.items() if file.startswith(paths)), file)

        def _assign_work_unit(self, node: Any) -> None:
            """Files with many tests come first otherwise."""
            if first := next((file for file in LONGEST if file in self.workqueue), None):
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return Together(config, log)
