"""Signals to a process of the test: this one."""

import asyncio
import os
import signal
import time

import pytest

import actors.launch.stop_signals
from actors.launch.stop_signals import GRACE_OF_EVALUATION, SIGNALS, StopSignals, grace_of_run
from rstar_ray.errors import Stopped


@pytest.mark.parametrize("number", SIGNALS)
async def test_the_first_signal_asks_and_the_run_ends_by_itself(number: signal.Signals, logged: list[str]):
    stop = StopSignals(grace_of_run(60))
    with stop.handled():
        assert not stop.asked()
        os.kill(os.getpid(), number)
        while not stop.asked():
            await asyncio.sleep(0.001)
    assert logged[0].startswith(f"{number.name}: the run ends after the current step, with a checkpoint")


@pytest.mark.parametrize(("again", "after_s"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.1)])
async def test_another_signal_or_the_same_a_moment_later_ends_at_once(
    again: signal.Signals, after_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(actors.launch.stop_signals, "ECHO_S", 0.05)
    stop = StopSignals(grace_of_run(60))
    with pytest.raises(Stopped, match="in the middle of a step"), stop.handled():
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.asked():
            await asyncio.sleep(0.001)
        await asyncio.sleep(after_s)
        os.kill(os.getpid(), again)
        await asyncio.sleep(10)


async def test_a_signal_that_is_also_handed_on_is_one_even_where_the_loop_is_busy_meanwhile(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    monkeypatch.setattr(actors.launch.stop_signals, "ECHO_S", 1.0)
    stop = StopSignals(grace_of_run(60))
    with stop.handled():
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.asked():
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.2)
        await asyncio.sleep(0.1)
    assert len(logged) == 1 and logged[0].endswith("; a second one after 1 s ends it at once")


async def test_one_that_is_handed_on_to_what_closes_already_does_not_kill_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actors.launch.stop_signals, "ECHO_S", 1.0)
    with pytest.raises(Stopped), StopSignals(GRACE_OF_EVALUATION).handled():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)
    os.kill(os.getpid(), signal.SIGTERM)
    while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # one that comes then is another
        await asyncio.sleep(0.05)


async def test_when_grace_runs_out_it_ends_in_the_middle_of_a_step():
    with pytest.raises(Stopped, match="in the middle of a step"), StopSignals(grace_of_run(0.05)).handled():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)


async def test_an_evaluation_ends_at_the_first_signal_for_its_rows_are_kept(logged: list[str]):
    ended = "^stopped; finished problems are kept$"
    with pytest.raises(Stopped, match=ended), StopSignals(GRACE_OF_EVALUATION).handled():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)
    reason = "the evaluation ends here; finished problems are kept"
    assert logged == [f"SIGTERM: {reason}; a second one after 1 s ends it at once"]
