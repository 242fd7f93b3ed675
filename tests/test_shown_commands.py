"""Every command that README and docs show is run by a test, stands on a page that says what it needs, or is named."""

import re
import shlex
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
RUN_BY = {
    "cd examples/command_agent": ("examples/test_own_code.py", "command_agent"),
    "make train": ("recipes/test_train_real.py", "recipes/train.py"),
    "make experiment": ("benchmarks/test_evidence.py", "main("),
    "-m benchmarks.parity": ("benchmarks/test_parity.py", "main("),
    "make cluster-up": ("deploy/test_dashboards_real.py", "cluster.up()"),
    "make cluster-down": ("deploy/test_dashboards_real.py", "cluster.down()"),
    "make dashboards": ("deploy/test_dashboards_real.py", "dashboards.up("),
    "recipes/stage1.py": ("deploy/test_dashboards_real.py", "recipes/stage1.py"),
    "recipes/replay.py": ("recipes/test_train_real.py", "recipes/replay.py"),
    "recipes/watch.py": ("recipes/test_watch_recipe.py", "recipes.watch"),
    "recipes/plan.py": ("scheduler/test_plan.py", "recipes.plan"),
    "recipes/rehearse.py": ("recipes/test_rehearse.py", "recipes/rehearse.py"),
    "make gpu-first-hour": ("benchmarks/test_gpu_first_hour.py", "gpu_first_hour"),
    "make gpu-smoke": ("gpu/test_on_a_gpu.py", "make gpu-smoke"),
    "recipes/prepare.py": ("recipes/test_prepare_recipe.py", "recipes.prepare import main"),
    "recipes/sft.py": ("recipes/test_real_shaped.py", "recipes/sft"),
    "recipes/evaluate.py": ("recipes/test_train_real.py", "recipes/evaluate.py"),
    "recipes/chat.py": ("recipes/test_real_shaped.py", "recipes/chat"),
    "recipes/serve.py": ("recipes/test_real_shaped.py", "recipes/serve"),
    "-m examples.real_shaped": ("recipes/test_real_shaped.py", "write_all("),
    "--agent.run examples.train_agent": ("actors/test_agents_real.py", "examples.train_agent:solve"),
    "--agent.command": ("examples/test_own_code.py", "--agent.command"),
    "-m examples.tool_agent": ("actors/test_policy_answers.py", "tool_agent.solve("),
    "curl ": ("recipes/test_real_shaped.py", "/chat/completions"),
    "rstar export": ("recipes/test_export.py", "recipes.export import main"),
    "-m rstar_ray.report": ("rstar_ray/test_damaged_run.py", "report.__main__ import main"),
    "-m rstar_ray.run_dir verify": ("rstar_ray/test_run_dir.py", "verify("),
    "-m rstar_ray.chat": ("rstar_ray/chat/test_chat_command.py", "main("),
    "-m actors.preflight": ("actors/test_preflight.py", "main("),
}
"""What of a command is looked for, the test that runs it, and where it does."""
THIS = ("make test", "export ", "source .venv/bin/activate")
"""Runs this test; sets variables of the shell."""
BY_HAND = ("ray job submit", "ray job stop", "tensorboard ")
"""Ray's and TensorBoard's own, which no test runs; what they are given to run is looked for below."""
ELSEWHERE = {"docker build": "container", "ssh ": "another machine", "--scale gpu": "GPU", "--scale mi300x": "GPU"}
"""What needs more than a machine like this, and the word of its page that says so."""


def shown() -> list[tuple[str, str]]:
    """Page and command, of every block of shell."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            lines = (" ".join(shlex.split(line, comments=True)) for line in block.replace("\\\n", " ").splitlines())
            found += [(page.name, line) for line in lines if line]
    return found


@pytest.mark.parametrize(("page", "command"), shown())
def test_a_command_that_is_shown_is_run_by_a_test_or_says_what_it_needs(page: str, command: str):
    if command.startswith(THIS):
        return
    (text,) = (one.read_text() for one in PAGES if one.name == page)
    needs = [word for part, word in ELSEWHERE.items() if part in command]
    assert all(word in text for word in needs)
    tests = [place for part, place in RUN_BY.items() if part in command]
    assert tests or needs or any(part in command for part in BY_HAND), "no test runs it"
    for name, does in tests:
        assert does in (REPOSITORY / "tests" / name).read_text(), f"{name} does not run it any more"
