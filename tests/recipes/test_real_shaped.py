"""The way that a 14B takes, from a base checkpoint to a served agent, walked by a small model of the same shape.

By the commands that a person gives. It learns by heart what little it is shown: the way is the point, not where it
leads.
"""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp.test_utils import TestServer

from actors.talk.talker import OwnTalker, TalkConfig, Talker, chat_in, own_talker, server_talker
from examples.real_shaped import TEN_MILLION, TOOLS, Shape, write_all
from recipes.prepare import main as prepare
from recipes.serve import AgentAnswers, ServeOptions, Server
from rstar_ray.chat.instructions import opened, system_text
from rstar_ray.config import ChatConfig, ToolsConfig
from rstar_ray.run_dir.durable import read_json, read_rows
from rstar_ray.tools.loader import tool_specs
from rstar_ray.trajectory import Problem, Sampling

pytestmark = [pytest.mark.real, pytest.mark.journey]

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
"""Of one command, on a machine that has other things to do; alone each takes a small part of it."""
SFT_AND_STAGE_1 = (
    "from actors.launch.run import launch; from recipes.sft import SFT; from recipes.stage1 import STAGE_1"
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of it."""

    shape: Shape
    sft_steps: int
    steps: int
    problems: int
    options: str


SHORT = Size(
    shape=Shape(vocabulary=2_048, hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_dim=32),
    sft_steps=72,  # so many that it calls and answers in the form it was shown, so few that rollouts still differ
    steps=8,  # of half a second: a stop that is asked for in the first comes before the last
    problems=60,
    options="--learner.ranks 1 --learner.zero 3",
)
LONG = Size(
    shape=TEN_MILLION,
    sft_steps=60,
    steps=4,
    problems=400,
    options="--learner.ranks 2 --learner.zero 3 --learner.dtype bfloat16 --engine.dtype bfloat16"
    " --sft.learning-rate 1e-3",
)
"""10.5M weights, in bfloat16 from end to end."""
OPTIONS = """
    --scale tiny --rollout.instruct --engine.replicas 1 --engine.max-context-tokens 1024 --engine.kv-tokens 16384
    --rollout.max-response-tokens 160 --evaluate.max-response-tokens 160 --evaluate.samples 2 --sandbox.deadline-s 60
    --learner.activation-checkpointing --optimizer.learning-rate 1e-5 --sft.batch-size 4 --sft.max-left-out 0.2
    --prompts-per-step 3 --algorithm.rollouts-per-prompt 4 --algorithm.keep 2 --algorithm.least-failures 1
    --reward.name own:graded
    --detector.silent-s 120 --detector.learner-silent-s 240 --detector.engine-step-s 120
"""


class Journey:
    """The files of one, and the commands on them."""

    def __init__(self, root: Path, size: Size) -> None:
        self.root, self.size = root, size
        self.own, self.base = root / "own", root / "model"
        self.run_dir, self.log = root / "run", root / "log"
        write_all(root, size.shape, problems=size.problems)

    def command(self, *arguments: str) -> list[str]:
        tools = ["--tools.use", *TOOLS, "--own-folder", str(self.own)]
        options = shlex.split(OPTIONS + self.size.options)
        return [sys.executable, *arguments, "--run-dir", str(self.run_dir), *options, *tools]

    def training(self, *arguments: str) -> list[str]:
        data = ["--data.train", str(self.root / "train.jsonl"), "--data.heldout", str(self.root / "exam.jsonl")]
        return self.command(*arguments, *data, "--steps", str(self.size.steps))

    @contextmanager
    def started(self, command: Sequence[str], **environment: str) -> "Generator[subprocess.Popen[bytes]]":
        self.log.write_bytes(b"")
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )
        try:
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait()
            for one in family:  # vLLM's engine does not notice that its server is gone
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    def done(self, command: Sequence[str], *, status: int = 0) -> str:
        with self.started(command) as process:
            assert process.wait(DEADLINE_S) == status, self.said()
        return self.log.read_text()

    def until(self, text: str, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.log.read_text():
            assert process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.said()}"
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text()[-3_000:]

    @property
    def policy(self) -> Path:
        return self.run_dir / "checkpoints" / f"stage1-step-{self.size.steps:06d}" / "model"


# ---------------------------------------------------------------- the way, part by part


def problems_are_prepared(journey: Journey) -> None:
    root = journey.root
    raw, out, against = (str(root / f"{name}.jsonl") for name in ("problems", "train", "exam"))
    prepare([raw, "--out", out, "--integer-answers", "--against", against])
    dropped = read_json(root / "train.jsonl.counts.json")["dropped"]
    assert dropped["exact duplicate"] >= journey.size.problems // 20
    assert dropped["answer is not an integer"] > 0 and dropped["shares 8 words in a row with exam"] == 1


def is_stopped_by_sigterm_and_continues(journey: Journey, command: list[str]) -> None:
    """In its first RL step; the same command ends the stage."""
    with journey.started(command) as process:
        journey.until("stage1 1/", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 130, journey.said()
    assert "with a checkpoint; the same command resumes it" in journey.log.read_text(), journey.said()
    assert "stage1: resuming after step" in journey.done(command)
    rows = read_rows(journey.run_dir / "metrics.jsonl")
    stage1 = [row for row in rows if row["stage"] == "stage1"]
    assert [row["step"] for row in stage1] == list(range(1, journey.size.steps + 1))
    trained = [row for row in stage1 if row["groups_kept"]]  # so small a policy has steps of equal rewards
    assert trained and all(row["loss"] is not None for row in trained), stage1
    sft = [row["loss"] for row in rows if row["stage"] == "sft"]
    assert len(sft) == journey.size.sft_steps and sft[-1] < 0.3 * sft[0]


def is_evaluated(journey: Journey) -> None:
    exam_set = str(journey.root / "exam.jsonl")
    said = journey.done(journey.command("recipes/evaluate.py", "--evaluate.files", exam_set))
    assert "evaluate exam: avg@2" in said
    (row,) = (row for row in read_rows(journey.run_dir / "evaluations.jsonl") if row["set"] == "exam")
    assert (row["num_problems"], row["k"], row["num_unjudged"]) == (3, 2, 0)


def the_exported_folder_is_a_hugging_face_folder(journey: Journey) -> None:
    """With the stop token of its turns, which the base had not, and weights that have moved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(journey.policy)
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")}
    assert set(read_json(journey.policy / "generation_config.json")["eos_token_id"]) == ends
    policy, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (journey.policy, journey.base))
    theirs = dict(base.named_parameters())
    moved = [name for name, value in policy.named_parameters() if not torch.equal(value, theirs[name].to(value.dtype))]
    assert len(moved) == len(theirs)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text.startswith("<|im_start|>user\nx<|im_end|>")


def talk_config(journey: Journey) -> TalkConfig:
    tools = ToolsConfig(use=TOOLS)
    return TalkConfig(temperature=0.0, max_tokens=200, max_turns=4, own_folder=str(journey.own), tools=tools)


QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is 12 * 34?"}]


async def asked(talker: Talker) -> None:
    """A question that SFT had: a program is called, its result comes back, and there is an answer."""
    heard = [one async for one in talker.answer(QUESTION)]
    assert heard[-1].text == "answered", heard
    last = max((number for number, one in enumerate(heard) if one.kind == "result"), default=-1)
    said = "".join(one.text for one in heard[last + 1 :] if one.kind == "said")
    assert [one.kind for one in heard if one.kind in ("call", "result")] == ["call", "result"], heard
    call, result = (one.text.strip() for one in heard if one.kind in ("call", "result"))
    is_called_and_answered(call, result, said)


def is_called_and_answered(call: str, result: str, said: str) -> None:
    """In the form it was shown; so small a model may take figures of another question that it had."""
    shown = re.fullmatch(r"print\((\d+) \* (\d+)\)", call.strip())
    assert shown, call
    assert result.strip() == str(int(shown[1]) * int(shown[2]))
    assert re.fullmatch(r"<answer>\\boxed\{\d+\}</answer>", said.strip()), said


async def one_talks_with_it_and_others_do_over_http(journey: Journey) -> list[int]:
    """The tokens of the question's prompt."""
    async with own_talker(str(journey.policy), talk_config(journey)) as talker:
        await asked(talker)
        options = ServeOptions(model=str(journey.policy))
        async with TestServer(
            Server(
                AgentAnswers(talker, Sampling(temperature=talker.config.temperature, top_p=talker.config.top_p)),
                options,
                "secret",
            ).app()
        ) as server:
            await answers_over_http(str(server.make_url("/v1")), tokens_of_the_prompt(talker))
        return talker.chat.conversation_ids(QUESTION)


async def answers_over_http(url: str, prompt_tokens: int | None = None) -> None:
    """Whole and streamed."""
    question = {"messages": [{"role": "user", "content": "What is 7 * 8?"}], "temperature": 0}
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
        async with session.post(f"{url}/chat/completions", json=question) as response:
            answer = await response.json()
            assert response.status == 200, answer
        streamed = {**question, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(f"{url}/chat/completions", json=streamed) as response:
            lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    run = re.search(r"```python\n(.*?)\n```\n```\n(.*?)\n```", choice["message"]["reasoning_content"], re.DOTALL)
    assert run, choice
    is_called_and_answered(run[1], run[2], choice["message"]["content"])
    events = [json.loads(line) for line in lines[:-1]]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]]
    assert "".join(pieces) == choice["message"]["content"] and len([piece for piece in pieces if piece]) > 2
    assert events[-1]["usage"] == answer["usage"]
    assert prompt_tokens in (None, answer["usage"]["prompt_tokens"])


def tokens_of_the_prompt(talker: OwnTalker) -> int:
    return len(talker.chat.prompt_ids(Problem(id="", problem="What is 7 * 8?", answer="")))


async def is_up(url: str, process: "subprocess.Popen[bytes]", journey: Journey) -> None:
    deadline = time.monotonic() + DEADLINE_S
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, journey.said()
            try:
                async with session.get(f"{url}/models") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@asynccontextmanager
async def vllms_own_server(journey: Journey) -> AsyncGenerator[Callable[[], Awaitable[str]]]:
    """On the exported folder, being started; call what it gives to wait for its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(journey.policy)]
    command += shlex.split(
        f"--host 127.0.0.1 --port {port} --enable-auto-tool-choice --tool-call-parser hermes --max-model-len 1024"
        " --enforce-eager --max-num-seqs 8 --dtype float32"
    )
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    with (
        tempfile.TemporaryDirectory() as left,
        journey.started(command, **environment, TMPDIR=left, VLLM_RPC_BASE_PATH=left) as process,
    ):  # its sockets stay behind there

        async def address() -> str:
            await is_up(url, process, journey)
            return url

        yield address
        process.terminate()
        process.wait(60)


async def it_answers_as_ours_does(url: str, journey: Journey, ours: Sequence[int]) -> None:
    """From the very tokens that ours answers from; calls are found by its parser, and run here."""
    async with server_talker(url, "", talk_config(journey)) as talker:
        specs = talker.tools.specs
        messages = opened(QUESTION, system_text(ChatConfig(), specs, instruct=True), "")
        asks = {"messages": messages, "tools": [spec.as_schema() for spec in specs]}
        async with talker.session.post(f"{url.removesuffix('/v1')}/tokenize", json=asks) as response:
            assert (await response.json())["tokens"] == ours
        await asked(talker)


# ---------------------------------------------------------------- short and long


def test_a_base_model_becomes_an_agent_that_others_can_serve(tmp_path: Path):
    journey = Journey(tmp_path, SHORT)
    problems_are_prepared(journey)
    both = journey.training("-c", f"{SFT_AND_STAGE_1}; launch([SFT, STAGE_1])", "--model", str(journey.base))
    conversations_file = str(journey.root / "conversations.jsonl")
    is_stopped_by_sigterm_and_continues(
        journey, [*both, "--sft.data", conversations_file, "--sft.steps", str(SHORT.sft_steps)]
    )
    evaluated = {row["stage"]: row for row in read_rows(journey.run_dir / "evaluations.jsonl")}
    assert {(row["num_problems"], row["k"], row["num_unjudged"]) for row in evaluated.values()} == {(3, 2, 0)}
    assert evaluated.keys() == {"sft", "stage1"}
    the_exported_folder_is_a_hugging_face_folder(journey)

    async def talked_with() -> None:
        async with vllms_own_server(journey) as theirs:  # starts beside ours
            ours = await one_talks_with_it_and_others_do_over_http(journey)
            await it_answers_as_ours_does(await theirs(), journey, ours)

    asyncio.run(talked_with())


@pytest.mark.slow
def test_the_same_at_10_to_30_million_weights_recipe_by_recipe(tmp_path: Path):
    journey = Journey(tmp_path, LONG)
    problems_are_prepared(journey)
    sft = ["recipes/sft.py", "--model", str(journey.base), "--sft.data", str(tmp_path / "conversations.jsonl")]
    said = journey.done(journey.training(*sft, "--sft.steps", str(LONG.sft_steps)))
    assert "sft: excluded 1" in said and "sft held-out: avg@2" in said
    is_stopped_by_sigterm_and_continues(journey, journey.training("recipes/stage1.py"))
    is_evaluated(journey)
    the_exported_folder_is_a_hugging_face_folder(journey)
    talking = ["--model", str(journey.policy), "--temperature", "0", "--tools.use", *TOOLS]
    talking += ["--own-folder", str(journey.own)]
    said = journey.done([sys.executable, "recipes/chat.py", *talking, "--prompt", "What is 12 * 34?"])
    assert re.search(r"print\(\d+ \* \d+\)", said) and "─ result ─" in said and "<answer>\\boxed{" in said
    port = free_port()
    serving = [sys.executable, "recipes/serve.py", *talking, "--run-tools", "--port", str(port)]
    with journey.started(serving, RSTAR_RAY_TOKEN="secret") as process:

        async def over_http() -> None:
            await is_up(f"http://127.0.0.1:{port}/v1", process, journey)
            await answers_over_http(f"http://127.0.0.1:{port}/v1")

        asyncio.run(over_http())
        process.send_signal(signal.SIGINT)
        process.wait(60)

    async def by_vllm() -> None:
        specs = tool_specs(TOOLS, str(journey.own))
        ours = chat_in(journey.policy, ChatConfig(), specs).conversation_ids(QUESTION)
        async with vllms_own_server(journey) as theirs:
            await it_answers_as_ours_does(await theirs(), journey, ours)

    asyncio.run(by_vllm())
