"""Rules for when a silent process is given up; pure functions without a clock."""

from enum import Enum

from sandbox.processes import Channel

TICK_S = 0.25
SUSPECT_S = 1.0  # silence after which the number of a process's runs is recorded
SILENCE_S = 1.5  # a process that does not answer for this long is stuck ...
STARVING_S = 15.0  # ... unless it has run since or is runnable, and only lacks CPU time
PING_AFTER_S = 0.5
START_S = 60.0  # for the imports of a warm server on a busy machine
WORKER_START_S = 10.0


class ProcessHealth(Enum):
    """Action for a process."""

    HEALTHY = "nothing"
    PING = "ask it whether it lives"
    SUSPECT = "note how often it has run"
    LOOK = "it is lost unless it waits for a core, or has run"
    LOST = "end it"


def overslept(since_last_tick_s: float) -> bool:
    """Whether the supervisor itself was delayed, so that no silence counts."""
    return since_last_tick_s > 4 * TICK_S


def on_worker(silent_s: float, *, ready: bool, busy: bool, pinged: bool) -> ProcessHealth:
    """Action for a silent worker; a busy worker reports without a ping."""
    if not ready:
        return ProcessHealth.LOST if silent_s > WORKER_START_S else ProcessHealth.HEALTHY
    if busy or pinged:
        return _on_answer_due(silent_s)
    return ProcessHealth.PING if silent_s > PING_AFTER_S else ProcessHealth.HEALTHY


def on_server(silent_s: float, *, ready: bool, pinged: bool) -> ProcessHealth:
    """Action for a silent warm server; during its start, imports take long."""
    if not ready:
        return ProcessHealth.LOST if silent_s > START_S else ProcessHealth.HEALTHY
    if pinged:
        return _on_answer_due(silent_s)
    return ProcessHealth.PING if silent_s > PING_AFTER_S else ProcessHealth.HEALTHY


def is_lost(verdict: ProcessHealth, process: Channel) -> bool:
    """Whether to end a process; looks at the process if the verdict is LOOK.

    A process that has run since it was suspected is alive: after a second without a core it may sleep, waiting for its
    program, when we look. Unread data is checked last: while we waited for a core, the process may have run, answered
    and gone to sleep again.
    """
    if verdict is ProcessHealth.LOOK and (process.wants_to_run() or process.has_run()):
        return False
    return verdict in (ProcessHealth.LOOK, ProcessHealth.LOST) and not process.has_spoken()


def _on_answer_due(silent_s: float) -> ProcessHealth:
    if silent_s <= SILENCE_S:
        return ProcessHealth.HEALTHY if silent_s <= SUSPECT_S else ProcessHealth.SUSPECT
    return ProcessHealth.LOST if silent_s > STARVING_S else ProcessHealth.LOOK
