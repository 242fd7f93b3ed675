"""When a process that says nothing is given up: the rules, without a clock or a process."""

from enum import Enum

from sandbox.processes import Channel

TICK_S = 0.25
SUSPECT_S = 1.0  # after so long it is noted how often a silent process has run
SILENCE_S = 1.5  # a process that says nothing for so long, although asked, is wedged ...
STARVING_S = 15.0  # ... unless it has run since, or is ready to, and merely gets too little of a core
PING_AFTER_S = 0.5
START_S = 60.0  # for a warm server to import everything on a busy machine
CELL_START_S = 10.0


class ProcessHealth(Enum):
    """What to do about a process."""

    HEALTHY = "nothing"
    PING = "ask it whether it lives"
    SUSPECT = "note how often it has run"
    LOOK = "it is lost unless it waits for a core, or has run"
    LOST = "end it"


def overslept(since_last_tick_s: float) -> bool:
    """True where the supervisor itself did not run: then nobody's silence counts."""
    return since_last_tick_s > 4 * TICK_S


def on_cell(silent_s: float, *, ready: bool, busy: bool, pinged: bool) -> ProcessHealth:
    """What the silence of a cell means; a busy one reports unasked."""
    if not ready:
        return ProcessHealth.LOST if silent_s > CELL_START_S else ProcessHealth.HEALTHY
    if busy or pinged:
        return _on_answer_due(silent_s)
    return ProcessHealth.PING if silent_s > PING_AFTER_S else ProcessHealth.HEALTHY


def on_server(silent_s: float, *, ready: bool, pinged: bool) -> ProcessHealth:
    """What the silence of a warm server means; while it starts it imports, which takes its time."""
    if not ready:
        return ProcessHealth.LOST if silent_s > START_S else ProcessHealth.HEALTHY
    if pinged:
        return _on_answer_due(silent_s)
    return ProcessHealth.PING if silent_s > PING_AFTER_S else ProcessHealth.HEALTHY


def is_lost(verdict: ProcessHealth, process: Channel) -> bool:
    """Whether to end a process, after a look at it where the verdict asks for one.

    One that has run since it was suspected is alive: after a second without a core it may be asleep for a moment,
    waiting for its program, when we look. What we have not read yet is looked for last: while we waited for a core
    ourselves, it may have run, spoken and gone to sleep again.
    """
    if verdict is ProcessHealth.LOOK and (process.wants_to_run() or process.has_run()):
        return False
    return verdict in (ProcessHealth.LOOK, ProcessHealth.LOST) and not process.has_spoken()


def _on_answer_due(silent_s: float) -> ProcessHealth:
    if silent_s <= SILENCE_S:
        return ProcessHealth.HEALTHY if silent_s <= SUSPECT_S else ProcessHealth.SUSPECT
    return ProcessHealth.LOST if silent_s > STARVING_S else ProcessHealth.LOOK
