"""Where the settings of engines, learner and actors are seen to arrive: the real classes, with fakes in place of vLLM,
DeepSpeed, PEFT and Ray, and a clock that does not make anybody wait."""

import ast
import asyncio
import os
import re
import selectors
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from actors import system, watch
from actors.generation import vllm_process, vllm_start
from actors.generation.engine import Engine
from actors.generation.settings import EngineSettings, engine_settings
from actors.learner import deepspeed_start, gang, optimizer_step
from actors.learner.calls import CalledRank
from actors.learner.policy import RankFacts
from actors.learner.settings import LearnerSettings, learner_settings
from actors.weights.transfer import EngineSeat
from rstar_ray.algorithm.batch import TokenRow
from rstar_ray.config import RunConfig
from rstar_ray.errors import LearnerError, RStarError
from rstar_ray.rollouts import TrajectoryRef
from rstar_ray.train_loop import TrainingRow
from rstar_ray.trajectory import MODELS_OWN

# ---------------------------------------------------------------- a clock that makes nobody wait


class _Hasty(selectors.DefaultSelector):
    """Where all wait, the time until the first of them is due has passed at once."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or timeout is None:
            return ready or super().select(None)
        self.passed_s += max(0.0, timeout)
        return ready


class HastyLoop(asyncio.SelectorEventLoop):
    """Its clock jumps over what nobody but a clock ends: a deadline of an hour is met at once."""

    def __init__(self) -> None:
        self._hasty = _Hasty()
        super().__init__(self._hasty)

    def time(self) -> float:
        return self._hasty.passed_s


def seconds_until_given_up(work: Callable[[], Awaitable[Any]]) -> float:
    """How long this waits until it raises one of our errors, by a clock that jumps [s]."""

    async def measured() -> float:
        loop = asyncio.get_running_loop()
        try:
            await work()
        except RStarError:
            return round(loop.time(), 1)
        raise AssertionError("it was not given up")

    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        return runner.run(measured())


@contextmanager
def jumping(module: Any):  # type: ignore[no-untyped-def]
    """The module's clock is that of the running loop."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    with mock.patch.object(module, "time", clock):
        yield


# ---------------------------------------------------------------- engines


@cache
def vllm_argument_names() -> frozenset[str]:
    """Of vLLM's `AsyncEngineArgs`, read from its source: importing it takes seconds."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text("utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    fields = [item for one in classes if one.name in ("EngineArgs", "AsyncEngineArgs") for item in one.body]
    return frozenset(
        item.target.id for item in fields if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )


def _fake_vllm(started: list[Any]) -> dict[str, ModuleType]:
    """What `start_vllm` imports; `AsyncEngineArgs` takes what vLLM's takes."""

    known = vllm_argument_names()  # before others take their place

    def arguments(**given: Any) -> dict[str, Any]:
        assert given.keys() <= known, given.keys() - known
        return given

    class AsyncLLM:
        @staticmethod
        def from_engine_args(given: dict[str, Any], stat_loggers: list[Any]) -> None:
            started.append((given, len(stat_loggers)))

    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.weight_transfer": {"WeightTransferConfig": lambda backend: backend},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": arguments},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.metrics": {"ray_wrappers": SimpleNamespace(RayPrometheusStatLogger=object)},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": object},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, content in contents.items():
        vars(modules[name]).update(content)
    return modules


def vllm(config: RunConfig, folder: Path) -> Any:
    """What vLLM is started with, by its arguments and its environment."""
    (folder / "config.json").write_text(
        '{"num_attention_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "hidden_size": 16}'
    )
    started: list[Any] = []
    on_cpu = config.engine.gpus_per_replica == 0
    with ExitStack() as fakes:
        fakes.enter_context(mock.patch.dict(os.environ))
        fakes.enter_context(mock.patch.dict(sys.modules, _fake_vllm(started)))
        fakes.enter_context(mock.patch.object(vllm_start, "_on_cpu", lambda: on_cpu))
        settings = engine_settings(config, folder)
        vllm_start.start_vllm(settings, lambda *_: None)
        return started, {name: os.environ[name] for name in vllm_start.engine_environment(settings)}


class SilentLlm:
    """vLLM's front as it is when it is up and its process has stopped: it takes questions and answers none."""

    errored = False
    output_handler = None
    engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=None))
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=9, block_size=16), model_config=SimpleNamespace(max_model_len=64)
    )

    def __init__(self, *, from_the_start: bool = False) -> None:
        self._mute = from_the_start

    async def update_weight_version(self, version: str) -> None:
        if self._mute:
            await asyncio.Event().wait()

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    def shutdown(self, timeout: float) -> None: ...


class _NoFolder:
    def note_shared(self, pids: Any) -> None: ...
    def remove(self) -> None: ...


def engine_waits(config: RunConfig, folder: Path) -> dict[str, float]:
    """How long an engine waits for what never comes, by what it is."""
    settings = replace(engine_settings(config, folder), measure_cost=False)
    never = 1e9

    async def started(settings: EngineSettings, llm: SilentLlm) -> Engine:
        vllm_process.start_vllm = lambda *_: llm  # put back below
        engine = Engine(settings, stop_token_ids=[1])
        engine._sampling_params = lambda *_: SimpleNamespace()  # type: ignore[method-assign,return-value]
        await engine.start()
        return engine

    async def start() -> None:
        held = threading.Event()
        vllm_process.start_vllm = lambda *_: held.wait(30)  # type: ignore[assignment]
        try:
            await Engine(settings, stop_token_ids=[1]).start()
        finally:
            held.set()

    async def complete(settings: EngineSettings) -> None:
        engine = await started(settings, SilentLlm())
        await engine.generate([5], request_id="r", max_tokens=4, seed=0, sampling=MODELS_OWN)

    waits: dict[str, Callable[[], Awaitable[Any]]] = {
        "start": start,
        "answer": lambda: started(settings, SilentLlm(from_the_start=True)),
        "completion": lambda: complete(replace(settings, step_limit_s=never)),
        "step": lambda: complete(replace(settings, generate_deadline_s=never)),
    }
    fakes = mock.patch.multiple(vllm_process, start_vllm=None, EngineFolder=_NoFolder)
    with fakes, jumping(vllm_process):
        return {name: seconds_until_given_up(wait) for name, wait in waits.items()}


# ---------------------------------------------------------------- the learner


def deterministic(config: RunConfig, folder: Path) -> Any:
    """What torch is told for a rank's whole process, what its libraries find in their environment, and what vLLM is."""
    settings = learner_settings(config, folder)
    with mock.patch.object(torch, "use_deterministic_algorithms") as told:  # which would import Dynamo, for seconds
        deepspeed_start.compute_deterministically(settings)
    return told.call_args_list, settings.environment, vllm(config, folder)


class _Model(nn.Module):
    """A causal LM as far as a rank handles one before its first step."""

    def __init__(self, folder: str, told: list[Any]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        self.config = SimpleNamespace(name=folder)
        self._told = told

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, head: Any) -> None:
        self._told.append(("logits at a time", head.chunk_tokens))
        self.head = head

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self._told.append(("recomputes", options))


def started_rank(config: RunConfig, folder: Path) -> Any:
    """What torch, PEFT and the model are told when a rank starts, and which folders are loaded."""
    from actors.learner import rank

    told: list[Any] = []
    kernels = torch.backends.cuda
    peft, state = ModuleType("peft"), ModuleType("actors.learner.state")
    vars(peft).update(
        LoraConfig=lambda **given: given, inject_adapter_in_model=lambda given, *_, **__: told.append(given)
    )
    vars(state).update(LearnerState=lambda *_: None)
    engine = SimpleNamespace(device="cpu", train=lambda: None)

    def load(name: str, settings: LearnerSettings) -> _Model:
        told.append(("loads", name, settings.attention))
        return _Model(name, told)

    before = torch.get_num_threads()
    with ExitStack() as fakes:
        fakes.enter_context(mock.patch.dict(os.environ))
        fakes.enter_context(mock.patch.dict(sys.modules, {"peft": peft, "actors.learner.state": state}))
        fakes.enter_context(mock.patch.object(rank, "load_language_model", load))
        fakes.enter_context(mock.patch.object(rank, "refuse_changed_logits"))
        fakes.enter_context(mock.patch.object(deepspeed_start, "start_deepspeed", lambda *_: (engine, None)))
        join = fakes.enter_context(mock.patch.object(deepspeed_start.dist, "init_process_group"))
        fakes.enter_context(mock.patch.object(deepspeed_start.dist, "is_initialized", lambda: False))
        fakes.enter_context(torch.random.fork_rng())
        random = np.random.get_state()
        try:
            one = rank.LearnerRank(learner_settings(config, folder))
            if config.learner.ranks > 1:
                one.open_store("127.0.0.1")
                told.append(("meets within", one._store.timeout))
            one.start()
            told += [
                ("answers within", join.call_args.kwargs["timeout"]),
                ("threads", torch.get_num_threads(), one.settings.environment["OMP_NUM_THREADS"]),
                ("kernels", kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled()),
            ]
        finally:
            np.random.set_state(random)
            torch.set_num_threads(before)
            rank.attention_kernels.choose("fused", torch.device("cpu"))
    return told


class _Asked(Exception):
    """As far as a load goes here."""


def loaded(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """What transformers is asked to load a policy with."""
    import transformers

    from actors.learner import policy

    told: list[dict[str, Any]] = []

    def from_pretrained(name: str, **asked: Any) -> None:
        told.append(asked)
        raise _Asked

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").touch()
    models = transformers.AutoModelForCausalLM
    with (
        mock.patch.object(policy, "refuse_misfit"),
        mock.patch.object(models, "from_pretrained", from_pretrained),
        suppress(_Asked),
    ):
        policy.load_language_model(str(folder), learner_settings(config, folder))
    return told


def anchored(config: RunConfig, folder: Path) -> list[int]:
    """In which of a rank's first updates the old log-probs are computed by a pass of their own."""
    from actors.learner import rank

    one = rank.LearnerRank(learner_settings(config, folder))
    one.reference, one.engine, one.policy = None, None, None  # type: ignore[assignment]
    passes: list[int] = []
    one._collate = lambda rows: rows  # type: ignore[method-assign,assignment,return-value]
    one._logprobs = lambda *_: passes.append(one.calls)  # type: ignore[method-assign,assignment,return-value]
    one._all_max = lambda value: value  # type: ignore[method-assign]

    def take(update: Any, batches: Any, loss: Any, lr: float) -> Any:
        loss.seen += [(None, None)] * len(update)
        return SimpleNamespace(kl=None)

    one._steps = SimpleNamespace(take=take)  # type: ignore[assignment]
    with mock.patch.multiple(rank, replace=lambda one, **_: one, combined=lambda results: results[0]):
        for _ in range(12):  # of one micro batch each
            one.train_rl([[["row"]]] * config.optimizer.updates_per_step, 0.1)  # type: ignore[list-item]
    return passes


def refused_updates(config: RunConfig, folder: Path) -> Any:
    """How many updates in a row may be bad before a rank gives up, and which files it leaves of them."""
    with mock.patch.object(optimizer_step, "dist"), mock.patch.object(Path, "cwd", lambda: folder):
        settings = learner_settings(config, folder)
        if settings.save_bad_updates:
            settings = replace(settings, save_bad_updates=str(folder / settings.save_bad_updates))
        steps = optimizer_step.OptimizerSteps(settings, 0, SimpleNamespace(device="cpu"), None)  # type: ignore[arg-type]
        row = TokenRow("row", np.arange(4, dtype=np.int32), np.ones(4, np.bool_), 1.0, np.zeros(4, np.float32))
        for count in range(1, 100):
            try:
                steps._bad_update([[row]], [torch.tensor(float("nan"))], float("nan"), 1.0)
            except LearnerError:
                return count, sorted(str(path.relative_to(folder)) for path in folder.rglob("*.npz"))
    raise AssertionError("it never gives up")


def buckets(config: RunConfig, folder: Path) -> Any:
    """How many weights there are in each of the buckets that a rank's weights go out in."""
    from actors.learner.rank import LearnerRank
    from actors.weights.buckets import WeightEntry

    one = LearnerRank(learner_settings(config, folder))
    entries = [WeightEntry(f"weight-{n}", (1024, 256), "float32", 0) for n in range(8)]  # of a MiB each
    one.state = SimpleNamespace(served_entries=lambda: entries)  # type: ignore[assignment]
    return [len(bucket) for bucket in one.served_weights().plan]


class _Rank:
    """A rank's handle: it answers at once, or never; writes down what it is asked."""

    def __init__(self, asked: list[Any], *, mute: bool) -> None:
        self.call = self
        self.probe = SimpleNamespace(remote=lambda: _given(SimpleNamespace(life="life")))
        self._asked, self._mute = asked, mute

    def options(self, **_: Any) -> "_Rank":
        return self

    def remote(self, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        self._asked.append((method, arguments))
        return self._answer(method)

    async def _answer(self, method: str) -> Any:
        if self._mute:
            await asyncio.Event().wait()
        raise LearnerError("that will do")


def gang_calls(config: RunConfig, folder: Path) -> Any:
    """What the ranks are asked for one update and one publish, and how long their answers are waited for."""
    settings = learner_settings(config, folder)
    ref = TrajectoryRef(batch=None, index=0)
    rows = [
        TrainingRow(rollout_id=str(n), group_id="g", ref=ref, advantage=1.0, num_tokens=40, num_sampled_tokens=9)
        for n in range(6)
    ]
    seats = [EngineSeat(name="generation/0", life="l", ranks=1, sender=0)]
    asked: list[Any] = []

    def learner(*, mute: bool) -> gang.Learner:
        made = gang.Learner(settings, silent_s=0)
        made._facts = RankFacts(num_parameters=1, max_context_tokens=512, attention_tokens=1e4)
        ranks = [_Rank(asked, mute=mute) for _ in range(settings.world_size)]
        made._ranks = [CalledRank(rank, f"learner/{number}", "driver") for number, rank in enumerate(ranks)]
        return made

    async def start() -> None:
        await gang.Learner(settings, silent_s=0).start()

    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: _Rank([], mute=True)))
    with mock.patch.object(gang.ray, "kill"), mock.patch.object(gang, "LearnerActor", options):
        ended = [
            seconds_until_given_up(lambda: learner(mute=False).train_rl(rows, 0.1)),
            seconds_until_given_up(lambda: learner(mute=False).publish(1, seats)),
        ]
        assert ended == [0, 0] or max(ended) < 60
        return (
            [(method, _shape(arguments)) for method, arguments in asked[: 2 * settings.world_size]],
            seconds_until_given_up(lambda: learner(mute=True).train_rl(rows, 0.1)),
            seconds_until_given_up(start),
        )


def _shape(arguments: tuple[Any, ...]) -> Any:
    """Of a call: how many updates its rows are dealt to, or by which way weights go."""
    work = arguments[0]
    return len(work) if isinstance(work, list) else arguments[1]


# ---------------------------------------------------------------- the actors of a run


def actors(config: RunConfig, folder: Path) -> Any:
    """What each part of a run is made with, who is probed with which patience, and what Ray reserves for it."""
    made: list[Any] = []

    def maker(name: str) -> Any:
        def make(*arguments: Any, **named: Any) -> Any:
            made.append((name, _plain(arguments), _plain(tuple(sorted(named.items())))))
            return SimpleNamespace(
                start=_done if name == "Learner" else lambda: None,
                add=lambda *given, **named: made.append(("add", _plain(given[:1]), sorted(named.items()))),
                settings=SimpleNamespace(weight_way="object_store"),
                rollouts=None,
            )

        return make

    def actor(name: str) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=maker(f"{name} {_plain(options)}")))

    async def run() -> None:
        fake_ray = mock.Mock(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}, "NodeID": "n"}])
        fake_ray.remote = lambda kind: actor(kind.__name__)
        with ExitStack() as fakes:
            for name, fake in {
                "ray": fake_ray, "ray_meter": lambda *_: mock.Mock(run="run"), "place": _given, "seated": _seated,
                "on_node": lambda *_, **__: {}, "in_bundle": lambda *_: {}, "nodes_in_order": list,
                "executor_nodes": lambda nodes, count: nodes * count, "refuse_misfit": lambda *_: None,
                "BalancerActor": actor("BalancerActor"), "Replicas": maker("Replicas"), "Learner": maker("Learner"),
                "SandboxClient": maker("SandboxClient"), "Watch": lambda *_, **__: None,
                "start_hosts": lambda *_, **__: {},
            }.items():  # fmt: skip
                fakes.enter_context(mock.patch.object(system, name, fake))
            whole = system.TrainingActors(config, folder, chat=None, show=lambda line: None)  # type: ignore[arg-type]
            whole.watch = SimpleNamespace(  # type: ignore[assignment]
                start=lambda: None,
                follow=lambda name, handle, **patience: made.append((name, sorted(patience.items()))),
                follow_start=lambda name, handle, **patience: made.append((name, sorted(patience.items()))),
            )
            whole._executors_up = lambda: _given(["process"])  # type: ignore[method-assign]
            whole._replicas = None
            await whole.start()

    asyncio.run(run())
    return made


def _plain(value: Any) -> str:
    """Without what differs from one object to the next."""
    return re.sub(r" at 0x[0-9a-f]+|id='\d+'", "", repr(value))


async def _done(*_: Any) -> None: ...


async def _given(value: Any) -> Any:
    return value


async def _seated(group: Any, layout: Any) -> Any:
    return layout


def watched(config: RunConfig, _: Path) -> Any:
    """How often the detector looks, and when a run ends in which nothing gets on."""
    ticks: list[float] = []

    async def wait() -> None:
        one = watch.Watch(config.detector, show=lambda line: None)
        tick = one.tick
        one.tick = lambda: (ticks.append(asyncio.get_running_loop().time()), tick())[1]  # type: ignore[method-assign]
        one.start()
        try:
            await one.guard(asyncio.Event().wait())
        finally:
            await one.close()

    with jumping(watch):
        return seconds_until_given_up(wait), ticks[1] - ticks[0]


def stop_grace(config: RunConfig, folder: Path) -> Any:
    """How long a run that is asked to stop goes on."""
    import recipes.session as session

    class Enough(Exception): ...

    found: list[float] = []

    def signals(grace_s: float, show: Any) -> None:
        found.append(grace_s)
        raise Enough

    with ExitStack() as fakes:
        fakes.enter_context(mock.patch.object(session, "StopSignals", signals))
        for name in ("start_model", "load_chat", "tools_of"):
            fakes.enter_context(mock.patch.object(session, name))
        try:
            asyncio.run(session._run_stages([config], {}, [], folder, None))
        except Enough:
            return found
    raise AssertionError("nobody listens for signals")
