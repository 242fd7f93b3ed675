"""Rollouts through a command of the user, isolated and not, against a fake engine."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.agents.agent_command import CommandAgent
from rstar_ray.errors import ToolError
from rstar_ray.trajectory import Completion, RolloutLimits, StopReason
from sandbox.command import read_command, running
from tests.actors.test_agents import CHAT, Policy, host_of, judged, played, start
from tests.fakes import adding_problems, answer

pytestmark = pytest.mark.isolated

MINI_SWE = Path(__file__).resolve().parents[2] / "examples" / "command_agent" / "venv-swe"
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


ASKS = """
import json, os, subprocess, sys, time, urllib.request

def ask(text, path="/chat/completions", key=os.environ["OPENAI_API_KEY"]):
    body = {"model": os.environ["RSTAR_MODEL"], "max_tokens": 50, "messages": [{"role": "user", "content": text}]}
    headers = {"x-api-key": key, "Content-Type": "application/json"}
    base = os.environ["ANTHROPIC_BASE_URL" if path == "/v1/messages" else "OPENAI_BASE_URL"]
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)

problem = json.loads(os.environ["RSTAR_PROBLEM"])
ask(problem["problem"])
print("a line", file=sys.stderr)
"""


def agent(folder: Path, code: str, *, confined: bool = True) -> CommandAgent:
    folder.chmod(0o755)
    (folder / "agent.py").write_text(ASKS + code)
    command = f"{sys.executable} agent.py"
    read = read_command(command, str(folder), memory_mb=512, confined=confined)
    return CommandAgent(read)


def held_here() -> set[Any]:
    """This process's children and open files. An earlier test's may still be closed meanwhile: look for new ones."""
    held: set[Any] = set(psutil.Process().children())
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            held.add((entry.name, entry.readlink()))
    return held


def alive_in(folder: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("confined", [True, False])
@pytest.mark.parametrize(
    ("code", "reason", "reward"),
    [
        ("print(json.dumps({'reward': 0.25}))\nprint('done')", StopReason.ANSWERED, 0.25),
        ("print(3)", StopReason.ANSWERED, 1.0),  # the configured reward
        ("ask('again', '/v1/messages')", StopReason.ANSWERED, 1.0),
        ("sys.exit(3)", StopReason.AGENT_FAILED, 0.0),
        ("os.kill(os.getpid(), 9)", StopReason.AGENT_FAILED, 0.0),
        ("time.sleep(1000)", StopReason.AGENT_TIMEOUT, 0.0),
        (
            "for _ in range(3): subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
            "print(json.dumps({'reward': 2}))",
            StopReason.ANSWERED,
            2.0,
        ),
    ],
)
async def test_every_end_of_a_command_has_its_name_and_leaves_no_process(
    tmp_path: Path, code: str, reason: StopReason, reward: float, confined: bool
):
    deadline_s = 10.0 if reason is StopReason.AGENT_TIMEOUT else 300.0
    async with host_of(agent(tmp_path, code, confined=confined), deadline_s=deadline_s) as host:
        right = answer(adding_problems(1)[0].answer)
        trajectory = await judged(await played(host, start(), Policy(right, right)))
        assert (trajectory.summary.stop_reason, trajectory.summary.reward) == (reason, reward)
        await host.end("r", "worker")
        async with asyncio.timeout(20):
            while alive_in(tmp_path):
                await asyncio.sleep(0.05)


async def test_an_unconfined_command_has_the_proxy_of_our_network_and_reaches_the_endpoint_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "a.example", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    code = (
        "print(json.dumps({'reward': os.environ['HTTP_PROXY'].endswith(':9') "
        "and urllib.request.proxy_bypass('a.example')}))"
    )
    async with host_of(agent(tmp_path, code, confined=False)) as host:
        state = await played(host, start(), Policy(answer("3")))
    assert (state.stop_reason, state.reward) == (StopReason.ANSWERED, 1.0)


@pytest.mark.parametrize("code", ['print(\'{"reward": "much"}\')', "print('{\"reward\": NaN}')"])
async def test_a_reward_that_is_not_a_number_is_not_trained_on(tmp_path: Path, code: str):
    async with host_of(agent(tmp_path, code)) as host:
        with pytest.raises(ToolError, match="its reward is"):
            await played(host, start(), Policy(answer("3")))


async def test_an_isolated_command_reaches_the_endpoint_and_its_folder_alone(tmp_path: Path):
    code = """
import socket
seen = []
for name, attempt in {
    "another key": lambda: ask("hi", key="x"),
    "network": lambda: socket.create_connection(("1.1.1.1", 80), 2),
    "another port": lambda: socket.create_connection(("127.0.0.1", 22), 2),
    "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW),
    "netlink": lambda: socket.socket(socket.AF_NETLINK),
    "passwords": lambda: open("/etc/shadow"),
    "a folder beside": lambda: os.listdir("../beside"),
    "own folder": lambda: open("agent.py", "a"),
    "namespace": lambda: subprocess.run(["unshare", "-Ur", "true"], check=True, stderr=subprocess.DEVNULL),
    "large": lambda: bytearray(700 << 20),
}.items():
    try:
        attempt()
        seen.append(name)
    except (OSError, subprocess.SubprocessError, MemoryError):
        pass
open(os.path.expanduser("~/mine"), "w").write("x")
subprocess.run(["/bin/sh", "-c", "ls | wc -l"], check=True, start_new_session=True)
print(json.dumps({"reward": -1 if seen or len(os.environ) > 15 else 1, "seen": seen}), file=sys.stdout)
if seen: print(seen, list(os.environ), file=sys.stderr); sys.exit(1)
"""
    for name in ("own", "beside"):
        (tmp_path / name).mkdir()
    async with host_of(agent(tmp_path / "own", code)) as host:
        state = await played(host, start(), Policy(answer("3")))
    assert (state.stop_reason, state.reward) == (StopReason.ANSWERED, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(not MINI_SWE.exists(), reason="not installed: examples/command_agent/mini_swe.py says how")
async def test_mini_swe_agent_runs_unmodified():
    """Two results, a message without a call, and the submission: an isolated agent with its packages beside it."""
    words = ("echo $((98+50)); pwd", None, "cat /etc/shadow", f"echo {SUBMIT}; echo {adding_problems(1)[0].answer}")
    policy = Policy(*(bash(command) if command else "I do not know." for command in words))
    read = read_command(
        "venv-swe/bin/python mini_swe.py",
        str(MINI_SWE.parent),
        memory_mb=1_024,
        confined=True,
    )
    limits = RolloutLimits(max_response_tokens=4_000, max_turns=8, max_context_tokens=8_000, max_calls_per_turn=4)
    async with host_of(CommandAgent(read)) as host:
        trajectory = await judged(await played(host, start(limits=limits), policy))
    text = CHAT.tokenizer.decode(trajectory.response_ids)
    assert trajectory.summary.reward == 1.0
    assert "148\n/home/tool\n" in text and "cat: /etc/shadow: No such file" in text
    assert len(trajectory.summary.lines) == 2  # it takes a message without a call out of the conversation


async def test_a_command_whose_process_is_lost_is_started_again_and_loses_no_completion(tmp_path: Path):
    class Kills(Policy):
        async def __call__(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
            if len(self.prompts) == 1:
                for process in alive_in(tmp_path):
                    os.kill(process.ppid(), signal.SIGKILL)  # the first process of its jail
            return await super().__call__(prompt_ids, **asked)

    code = "ask('again'); ask('and again'); print(json.dumps({'reward': 1}))"
    async with host_of(agent(tmp_path, code)) as host:
        policy = Kills("one", "two", "three")
        state = await played(host, start(), policy)
    assert (state.stop_reason, state.reward) == (StopReason.ANSWERED, 1.0)
    assert len(policy.prompts) == len(state.turns) == 3


@pytest.mark.parametrize("confined", [True, False])
async def test_a_command_that_is_cancelled_again_while_it_ends_leaves_nothing_open(tmp_path: Path, confined: bool):
    tmp_path.chmod(0o755)
    command = read_command("/bin/sleep 1000", str(tmp_path), memory_mb=512, confined=confined)
    started = asyncio.Event()

    async def run() -> None:
        async with running(command, {}):
            started.set()
            await asyncio.sleep(1000)

    before = held_here()
    task = asyncio.create_task(run())
    await asyncio.wait([task, asyncio.ensure_future(started.wait())], return_when="FIRST_COMPLETED")
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive_in(tmp_path)
    assert not held_here() - before
