"""Cases on one run: injects a fault and checks how the run reacts.

A fault is over when every part is running again and a step takes no longer than before the fault; one that is not over
in time is a hang.
"""

import itertools
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.ledger import LEDGER
from tests.chaos.faults import Kind, NotPutIn, Undo
from tests.chaos.run import Run

START_S = 1_800.0
OVER_S = 300.0
"""Default limit until full speed: a run ends 90 s after its head has stopped and takes 60 s to start again; on a busy
machine both take several times as long."""
UNDO_S = 30.0
"""A fault is removed after this time, which is also the limit until it must be detected."""
CALM_STEPS = 4
SLOW = 1.6
"""Factor of the median time of calm steps: a step that takes longer is not at full speed ..."""
ENOUGH_STEPS = 3
"""... unless it is the third after every part is running: then the machine is busy with other work."""
LOST_WORDS = re.compile(r"was lost|died| is killed|silent for|no step for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The result of one fault."""

    fault: str
    seed: int
    outcome: str  # continues, continues when started again, ended by itself, hang, not put in
    notice_s: float | None = None  # until the run logged the loss
    full_speed_s: float | None = None  # until the first step at full speed began, with all parts running
    dropped: int = 0  # rollouts that this fault ended, by their reason
    lost: int = 0  # rollouts that ended for another internal reason
    twice: int = 0
    named: bool = True
    late: bool = False  # it was detected too late
    steps: int = 0

    @property
    def passed(self) -> bool:
        return self.outcome.startswith("continues") and self.named and not (self.lost or self.twice or self.late)


class Campaign:
    """Cases on one run, which continues from one to the next."""

    def __init__(self, run: Run, over_s: float) -> None:
        self._run = run
        self._over_within_s = over_s
        self._calm_s = 0.0
        self._parts: set[str] = set()

    def begin(self) -> None:
        """Start the run, and measure steps without faults. Raises `TimeoutError`."""
        run = self._run
        run.start()
        if not run.wait(lambda: not run.keep_up() and len(run.rows()) > CALM_STEPS, START_S):
            raise TimeoutError("the run did not start")
        self._calm_s = statistics.median(row["step_s"] for row in self._run.rows()[1:])
        self._parts = set(self._run.recorded())
        print(f"a calm step takes {self._calm_s:.1f} s; parts: {', '.join(sorted(self._parts))}", flush=True)

    def play(self, kind: Kind, seed: int) -> Case:
        """Inject one fault, and wait until it is over."""
        run, delay_s = self._run, random.Random(f"{kind.name} {seed}").uniform(0.0, self._calm_s)
        first_line, first_status, first_step = len(run.said), len(run.statuses), run.steps()
        time.sleep(delay_s)
        run.came_to_phase_s, began_s = None, time.monotonic()
        try:
            undo = kind.fault(run)
        except NotPutIn as reason:
            return Case(fault=kind.name, seed=seed, outcome=f"not put in: {reason}")
        put_in_s, began_s = time.monotonic(), run.came_to_phase_s or began_s
        over_s = self._wait_until_over(
            put_in_s,
            undo,
            lambda: self._said(kind, first_line) and (not kind.ends or len(run.statuses) > first_status),
            patience_s=self._over_within_s if kind.ends else UNDO_S,
            parts=self._parts - set(kind.without),
        )
        outcome = "hang" if over_s is None else "continues"
        if len(run.statuses) > first_status:
            status = run.statuses[-1][1]
            outcome = f"continues when started again ({status})" if kind.ends and over_s else outcome
            outcome = f"ended by itself ({status})" if not kind.ends else outcome
        lines = run.said[first_line:]
        noticed = [line.at_s for line in lines if any(word in line.line for word in kind.says)]
        named = all(any(word in line.line for line in lines) for word in kind.says)
        if kind.harmless or (kind.may_pass and not noticed):
            named = not any(LOST_WORDS.search(line.line) for line in lines)
        dropped, lost = self._dropped(first_step, kind.drops)
        notice_s = max(0.0, noticed[0] - began_s) if noticed else None
        case = Case(
            fault=kind.name,
            seed=seed,
            outcome=outcome,
            notice_s=None if notice_s is None else round(notice_s, 1),
            full_speed_s=round(over_s, 1) if over_s is not None else None,
            dropped=dropped,
            lost=lost,
            twice=self._twice(),
            named=named,
            late=notice_s is not None and notice_s > kind.noticed_within_s,
            steps=run.steps() - first_step,
        )
        if over_s is None:
            self._after_hang(kind, seed)
        return case

    def _said(self, kind: Kind, first_line: int) -> bool:
        lines = self._run.said[first_line:]
        return not kind.says or any(word in line.line for line in lines for word in kind.says)

    def _wait_until_over(
        self, put_in_s: float, undo: Undo | None, logged: Callable[[], bool], *, patience_s: float, parts: set[str]
    ) -> float | None:
        """Seconds until the first step at full speed began; None for a hang.

        A fault that must be logged is not over before that, for up to `patience_s`: it may affect no rollout of a
        short step, or be detected in the next.
        """
        run, known = self._run, len(self._run.rows())
        seen: dict[int, float] = {}
        complete_s: float | None = None
        whole_steps = 0
        while time.monotonic() < put_in_s + self._over_within_s:
            if run.keep_up():
                complete_s, undo = None, None
            run.note_family()
            now = time.monotonic()
            if run.missing(parts):
                complete_s = None
            elif complete_s is None:
                complete_s = now
            rows = run.rows()
            known = min(known, len(rows))  # the stage resumed from a checkpoint
            for position in range(known, len(rows)):
                step_s = rows[position]["step_s"]
                began_s = now - step_s
                if seen.setdefault(position, now) != now:
                    continue
                whole = (
                    complete_s is not None and began_s >= complete_s - 1.0 and (logged() or now > put_in_s + patience_s)
                )
                whole_steps = whole_steps + 1 if whole else 0
                if whole and (step_s <= SLOW * self._calm_s + 0.5 or whole_steps >= ENOUGH_STEPS):
                    if undo is not None:
                        undo()
                    return max(0.0, began_s - put_in_s)
            if undo is not None and now > put_in_s + UNDO_S:
                undo()
                undo = None
            time.sleep(0.1)
        return None

    def _after_hang(self, kind: Kind, seed: int) -> None:
        tail = "\n".join(line.line for line in self._run.said[-30:])
        (self._run.folder / f"hang {kind.name} {seed}".replace("/", "-")).write_text(tail)
        self._run.end()
        self._run.start()
        self._run.wait(lambda: not self._run.missing(self._parts - set(kind.without)), START_S)

    def _dropped(self, after_step: int, expected: str) -> tuple[int, int]:
        """Numbers of rollouts dropped since that step: for the expected reason, and for others."""
        reasons = [
            row["reasons"][rollout_id]
            for row in read_rows(self._run.path / LEDGER)
            for rollout_id in row["ids"]["dropped"]
            if row["step"] > after_step
        ]
        rightly = sum(expected != "" and expected in reason for reason in reasons)
        return rightly, len(reasons) - rightly

    def _twice(self) -> int:
        """Number of steps that the log has twice, or that skip a policy version."""
        rows = self._run.rows()
        twice = len(rows) - len({row["step"] for row in rows})
        for before, after in itertools.pairwise(rows):
            twice += after["policy_version"] - before["policy_version"] > 1
        return twice


def summary(cases: Sequence[Case]) -> dict[str, int]:
    return {
        "cases": len(cases),
        "kinds": len({case.fault for case in cases}),
        "hangs": sum(case.outcome == "hang" for case in cases),
        "ended": sum(case.outcome.startswith("ended") for case in cases),
        "not put in": sum(case.outcome.startswith("not put in") for case in cases),
        "lost": sum(case.lost for case in cases),
        "twice": sum(case.twice for case in cases),
        "unnamed": sum(not case.named for case in cases),
        "late": sum(case.late for case in cases),
    }
