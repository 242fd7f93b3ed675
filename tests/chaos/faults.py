"""The kinds of faults: how each is injected, what the run must log, and what it may lose."""

import contextlib
import math
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import psutil

from tests.chaos.run import Run

Undo = Callable[[], None]
Fault = Callable[[Run], Undo | None]
"""Injects a fault; the returned function removes it when the run has detected it."""

FOUND_S = 30.0
PHASE_S = 60.0
STOPPED_S = 3.0
ALL_STOPPED_S = 10.0
DAY_S = 86_400.0
DEATH_S = 10.0
"""Limit for the detection of a death ..."""
WEDGE_S = 22.5
"""... and of a hung process: one and a half times its limit at scale tiny."""


class NotPutIn(Exception):
    """The run did not reach the phase or state that the fault needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault, and the expected reaction."""

    name: str
    fault: Fault
    says: tuple[str, ...] = ()  # texts of which each must be in a line of the log; empty if nothing is lost
    ends: bool = False  # the command ends, and resumes when it is started again
    drops: str = ""  # text in the reasons of rollouts that this fault may end
    harmless: bool = False  # the run must kill nothing
    may_pass: bool = False  # it may have no effect: then nothing is logged or lost
    without: tuple[str, ...] = ()  # parts that the run continues without
    noticed_within_s: float = math.inf


def found(run: Run, name: str) -> psutil.Process:
    processes: list[psutil.Process] = []

    def there() -> bool:
        process = run.process(name)
        processes.extend([process] if process else [])
        return process is not None

    if not run.wait(there, FOUND_S):
        raise NotPutIn(f"{name} is not among the run's processes")
    return processes[0]


def send(number: signal.Signals, *names: str) -> Fault:
    def fault(run: Run) -> None:
        for process in [found(run, name) for name in names]:
            process.send_signal(number)

    return fault


def stopped_for(seconds: float, *names: str) -> Fault:
    """Stop processes, and continue them before their limit."""

    def fault(run: Run) -> None:
        _stop([found(run, name) for name in names], seconds)

    return fault


def all_stopped(run: Run) -> None:
    _stop(run.note_family(), ALL_STOPPED_S)


def _stop(processes: Sequence[psutil.Process], seconds: float) -> None:
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        for process in reversed(processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def to_driver(number: signal.Signals) -> Fault:
    def fault(run: Run) -> None:
        assert run.driver is not None
        run.note_family()
        run.driver.send_signal(number)

    return fault


def driver_stopped(run: Run) -> None:
    """Stop only the driver for a while."""
    assert run.driver is not None
    _stop([psutil.Process(run.driver.pid)], ALL_STOPPED_S)


def to_ray(program: str, number: signal.Signals) -> Fault:
    """Signal one of Ray's processes, a child of the driver that the harness started."""

    def fault(run: Run) -> None:
        for process in run.note_family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == program:
                    process.send_signal(number)
                    return
        raise NotPutIn(f"the driver has no {program}")

    return fault


def during(phase: str, fault: Fault) -> Fault:
    """Inject a fault as soon as the run is in this phase."""

    def put_in(run: Run) -> Undo | None:
        if not run.wait(lambda: run.phase == phase, PHASE_S, every_s=0.002):
            raise NotPutIn(f"the run did not come to its {phase}")
        run.came_to_phase_s = time.monotonic()
        return fault(run)

    return put_in


def held(phase: str, fault: Fault) -> Fault:
    """Inject a fault in this phase, which does not continue before that."""

    def put_in(run: Run) -> Undo | None:
        hold = run.control / f"hold {phase}"
        hold.touch()
        try:
            return during(phase, fault)(run)
        finally:
            hold.unlink()

    return put_in


def in_its_start(number: signal.Signals, run: Run) -> None:
    """Kill a worker, and signal it again while its engine starts."""
    (run.control / "starting").unlink(missing_ok=True)
    found(run, "generation/1").kill()
    if not run.wait(lambda: run.starting() is not None, PHASE_S, every_s=0.05):
        raise NotPutIn("the worker did not start again")
    time.sleep(2.0)
    process = run.starting()
    if process is None:
        raise NotPutIn("the worker's start was over")
    process.send_signal(number)


def driver_in_its_start(run: Run) -> None:
    """Kill the driver, and again while its actors start."""
    to_driver(signal.SIGKILL)(run)
    assert run.driver is not None
    run.driver.wait(20)
    run.keep_up()
    time.sleep(8.0)
    to_driver(signal.SIGKILL)(run)


def damaged(pattern: str, change: Callable[[bytes], bytes | None]) -> Fault:
    """Kill the driver, and then damage or remove a file of the run directory."""

    def fault(run: Run) -> None:
        to_driver(signal.SIGKILL)(run)
        assert run.driver is not None
        run.driver.wait(20)
        files = sorted(run.path.glob(pattern), key=lambda path: path.stat().st_mtime)
        if not files:
            raise NotPutIn(f"there is no {pattern}")
        changed = change(files[-1].read_bytes())
        if changed is None:
            files[-1].unlink()
        else:
            files[-1].write_bytes(changed)

    return fault


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def file(name: str, text: str, seconds: float = 60.0, *, says: str = "") -> Fault:
    """Create a file in the folder of faults (see `tests.chaos.seams`) for two steps, at most for `seconds`.

    It stays longer if the run has not logged `says`: a fault of some rollouts may affect none in two steps.
    """

    def fault(run: Run) -> None:
        path, reached, first_line = run.control / name, run.steps(), len(run.said)
        (run.control / "group").unlink(missing_ok=True)
        path.write_text(text)
        try:
            run.wait(
                lambda: run.steps() >= reached + 2 and any(says in line.line for line in run.said[first_line:]), seconds
            )
        finally:
            path.unlink()

    return fault


def limited(name: str, limit: int, value: int) -> Fault:
    """Limit a resource of a process, such as disk or memory; the limit is removed if the process survives."""

    def fault(run: Run) -> Undo:
        process = found(run, name)
        soft, hard = process.rlimit(limit)
        wanted = value if limit != resource.RLIMIT_AS else process.memory_info().vms + value
        process.rlimit(limit, (wanted, hard))

        def undo() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(limit, (soft, hard))

        return undo

    return fault


def silent_child(run: Run) -> None:
    """Stop a warm server of the sandbox's pool."""
    found(run, "sandbox/0 child").send_signal(signal.SIGSTOP)


NEWEST = "checkpoints/stage1-step-*"
PARTS = ("generation/0", "sandbox/0", "balancer", "learner/rank-0", "learner/rank-1", "tools/own:echo/0")
AGENTS = "agents/0"
CHILDREN = {"generation/1 engine": "generation/1", "sandbox/0 child": "sandbox/0"}
HARD = signal.SIGKILL
PAIRS = (
    ("generation/0", "generation/1"), ("generation/0", "learner/rank-1"), ("balancer", "sandbox/0"),
    ("generation/1 engine", "balancer"), ("learner/rank-0", "learner/rank-1"), ("sandbox/0", "generation/0 engine"),
    ("balancer", "learner/rank-0"),
)  # fmt: skip
PHASES = {
    "resampling": ("generation/0", "learner/rank-0"),
    "publish": ("generation/0", "learner/rank-0", "balancer"),
    "update": ("learner/rank-1",),
    "checkpoint": ("learner/rank-0", "learner/rank-1"),
    "evaluation": ("generation/0", "sandbox/0", "balancer", "learner/rank-0"),
}
STOPPED_IN = {
    "publish": ("generation/0", "learner/rank-0"),
    "checkpoint": ("learner/rank-1",),
    "evaluation": ("generation/1 engine", "sandbox/0"),
}


REWARDS = {
    "reward raises": ("raises of a few", "a reward check that raises"),
    "reward raises, a whole group": ("raises of a group", "a reward check that raises"),
    "reward hangs": ("hangs of a few", "no answer within 3 s"),
    "reward's process ends": ("ends of a few", "ended without an answer"),
    "reward is not a number": ("gives nothing of a few", "not a finite number"),
}
"""The behaviour of the run's reward (`tests.chaos.own`), and what the run must log."""


def _in_phase(phase: str, fault: Fault) -> Fault:
    """Inject a fault in a phase; resampling is held because it is too short to detect."""
    return (held if phase == "resampling" else during)(phase, fault)


def _actor(name: str) -> str:
    return name.partition(" ")[0]


def _said_of(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Texts that name the loss of these parts; for several ranks one name is enough, as its loss ends all ranks."""
    ranks = [part for part in parts if part.startswith("learner/")]
    return ("learner/rank-",) if len(ranks) == len(parts) > 1 else tuple(map(_actor, parts))


def _kinds() -> list[Kind]:
    parts = (*PARTS, *CHILDREN)
    kinds = [
        Kind(name=f"SIGKILL {part}", fault=send(HARD, part), says=(_actor(part),), noticed_within_s=DEATH_S)
        for part in parts
    ]
    kinds += [
        Kind(name=f"SIGSTOP {part}", fault=send(signal.SIGSTOP, part), says=(_actor(part),), noticed_within_s=WEDGE_S)
        for part in parts
    ]
    kinds += [
        Kind(name=f"SIGSTOP, SIGCONT {part}", fault=stopped_for(STOPPED_S, part), harmless=True)
        for part in (*PARTS, "generation/1 engine")
    ]
    kinds += [
        Kind(name=f"SIGKILL {' and '.join(pair)}", fault=send(HARD, *pair), says=_said_of(pair)) for pair in PAIRS
    ]
    kinds += [
        Kind(name=f"SIGKILL {part} in {phase}", fault=_in_phase(phase, send(HARD, part)), says=(part,))
        for phase, parts in PHASES.items()
        for part in parts
    ]
    kinds += [
        Kind(
            name=f"SIGSTOP {part} in {phase}",
            fault=_in_phase(phase, send(signal.SIGSTOP, part)),
            says=(_actor(part),),
        )
        for phase, parts in STOPPED_IN.items()
        for part in parts
    ]
    return kinds + _of_the_driver() + _of_answers() + _of_the_machine()


def _of_the_driver() -> list[Kind]:
    again = ("resuming after step",)
    return [
        Kind(name="SIGKILL driver", fault=to_driver(HARD), says=again, ends=True),
        Kind(name="SIGTERM driver", fault=to_driver(signal.SIGTERM), says=again, ends=True),
        Kind(name="SIGINT driver", fault=to_driver(signal.SIGINT), says=again, ends=True),
        *(
            Kind(name=f"SIGKILL driver in {phase}", fault=_in_phase(phase, to_driver(HARD)), says=again, ends=True)
            for phase in PHASES
        ),
        Kind(name="SIGSTOP, SIGCONT driver", fault=driver_stopped, harmless=True),
        Kind(name="SIGKILL driver in its start", fault=driver_in_its_start, says=again, ends=True),
        Kind(name="SIGKILL generation/1 in its start", fault=partial(in_its_start, HARD), says=("generation/1",)),
        Kind(
            name="SIGSTOP generation/1 in its start",
            fault=partial(in_its_start, signal.SIGSTOP), says=("generation/1 was silent",),
        ),
        Kind(
            name="SIGKILL driver, a flipped byte in a checkpoint",
            fault=damaged(f"{NEWEST}/state-*.safetensors", flipped), says=("is damaged", *again), ends=True,
        ),
        Kind(
            name="SIGKILL driver, a torn checkpoint",
            fault=damaged(f"{NEWEST}/state-*.safetensors", half), says=("is damaged", *again), ends=True,
        ),
        Kind(
            name="SIGKILL driver, a rank's part of a checkpoint missing",
            fault=damaged(f"{NEWEST}/state-00001.safetensors", lambda data: None), says=("is damaged", *again),
            ends=True,
        ),
        Kind(
            name="SIGKILL driver, a torn manifest",
            fault=damaged(f"{NEWEST}/manifest.json", half), says=("is damaged", *again), ends=True,
        ),
        Kind(
            name="SIGKILL driver, a torn journal",
            fault=damaged("journal/*/*.turns", lambda data: data[:-3]), says=again, ends=True,
        ),
        Kind(
            name="SIGKILL driver, a torn row of the ledger",
            fault=damaged("ledger.jsonl", lambda data: data[:-9]), says=("the row is missing", *again), ends=True,
        ),
    ]  # fmt: skip


def _of_answers() -> list[Kind]:
    return [
        Kind(name="sandbox answers twice", fault=file("answers", "twice"), harmless=True),
        Kind(name="sandbox answers what nobody asked", fault=file("answers", "strange"), harmless=True),
        Kind(name="sandbox answers garbage", fault=file("answers", "garbage", says="no answer but"),
             says=("sandbox/0",), drops="sandbox"),
        Kind(name="sandbox answers another question", fault=file("answers", "swapped", says="no answer but"),
             says=("sandbox/0",), drops="sandbox"),
        Kind(name="sandbox does not answer", fault=file("answers", "none", 3.0), says=("sandbox/0",), drops="sandbox"),
        Kind(name="a tool that never returns", fault=file("program", "while True: pass"), harmless=True),
        Kind(name="a tool that sleeps for ever", fault=file("program", "import time; time.sleep(1e9)"), harmless=True),
        Kind(name="a tool that eats memory", fault=file("program", "x = [bytes(10**8) for _ in range(99)]"),
             harmless=True),
        Kind(name="a tool that kills its process", fault=file("program", "import os; os.kill(os.getpid(), 9)"),
             harmless=True),
        Kind(name="a tool that prints without end", fault=file("program", "while True: print('x' * 10**6)"),
             harmless=True),
        *(
            Kind(name=name, fault=file("reward", text, says=said), says=(said,), drops="reward")
            for name, (text, said) in REWARDS.items()
        ),
        Kind(name="prompts too long", fault=file("long prompt", "all"), harmless=True),
    ]  # fmt: skip


def _of_the_machine() -> list[Kind]:
    full = during("checkpoint", limited("learner/rank-0", resource.RLIMIT_FSIZE, 65_536))
    kinds = [
        Kind(
            name=f"out of memory {part}",
            fault=limited(part, resource.RLIMIT_AS, 0),
            says=(_actor(part),),
            may_pass=True,
        )
        for part in ("generation/0", "sandbox/0", "learner/rank-1", "balancer", "tools/own:echo/0", *CHILDREN)
    ]
    return [
        *kinds,
        Kind(name="disk full in checkpoint", fault=full, says=("File too large",), ends=True),
        Kind(name="object store full", fault=file("fill", "256"), harmless=True),
        Kind(name="clock a day ahead", fault=file("clock", str(DAY_S)), harmless=True),
        Kind(name="clock an hour back", fault=file("clock", "-3600"), harmless=True),
        Kind(name="all processes stopped for 10 s", fault=all_stopped, harmless=True),
        Kind(name="SIGKILL raylet", fault=to_ray("raylet", HARD), says=("resuming after step",), ends=True),
        Kind(
            name="SIGKILL GCS",
            fault=to_ray("gcs_server", HARD),
            says=("head has not answered", "resuming after step"),
            ends=True,
        ),
        Kind(
            name="SIGSTOP GCS",
            fault=to_ray("gcs_server", signal.SIGSTOP),
            says=("head has not answered", "resuming after step"),
            ends=True,
        ),
        Kind(name="SIGSTOP, SIGCONT raylet", fault=_ray_stopped("raylet"), harmless=True),
        Kind(name="SIGSTOP, SIGCONT GCS", fault=_ray_stopped("gcs_server"), harmless=True),
    ]


def _ray_stopped(program: str) -> Fault:
    def fault(run: Run) -> None:
        to_ray(program, signal.SIGSTOP)(run)
        time.sleep(STOPPED_S)
        to_ray(program, signal.SIGCONT)(run)

    return fault


KINDS: dict[str, Kind] = {kind.name: kind for kind in _kinds()}
AGENT_KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="SIGKILL agents/0", fault=send(HARD, AGENTS), says=(AGENTS,), noticed_within_s=DEATH_S),
        Kind(name="SIGSTOP agents/0", fault=send(signal.SIGSTOP, AGENTS), says=(AGENTS,), noticed_within_s=WEDGE_S),
        Kind(name="SIGSTOP, SIGCONT agents/0", fault=stopped_for(STOPPED_S, AGENTS), harmless=True),
        Kind(name="SIGKILL agents/0 and generation/0", fault=send(HARD, AGENTS, "generation/0"), says=(AGENTS,)),
    )
}
"""Faults of a run whose rollouts go through an agent (`--agent.run`)."""
