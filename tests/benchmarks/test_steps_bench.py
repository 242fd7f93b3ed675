"""The table of simulated steps with a staleness, on a fleet of one."""

import pytest

from benchmarks.steps import PARTS, asked, simulate, summary, without
from scheduler.expected_kv import caution, rule

SMALL = "--replicas 1 --groups 1 --siblings 8 --kinds bimodal --demand 1.5 --steps 4 --synchronous-steps 2"


def test_each_part_is_left_out_and_put_back_and_each_rule_has_a_row_for_each_staleness():
    before = rule.PROBES, caution.Caution.weigh
    args = asked([*SMALL.split(), "--without", "all", "--rules", "expected_kv", "least_sessions"])
    rows = list(simulate(args, "bimodal"))
    found = [(row["rule"], row["without"], row["staleness"]) for row in rows]
    ours = [("expected_kv", part, staleness) for part in ("", *PARTS) for staleness in (0, 1)]
    assert found == [*ours, ("least_sessions", "", 0), ("least_sessions", "", 1)]
    assert len({row["learn_s"] for row in rows}) == 1 and all(row["step_s"] > row["learn_s"] for row in rows)
    assert (rule.PROBES, caution.Caution.weigh) == before
    said = summary(rows)
    assert sum(any(f"without {part} " in line for part in PARTS) for line in said) == 3 * len(PARTS)


def test_a_part_is_put_back_behind_an_error():
    with pytest.raises(ValueError, match="stop"), without("probes"):
        assert rule.PROBES == 0
        raise ValueError("stop")
    assert rule.PROBES > 0


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("--replicas 0", "--replicas: 0 is too small; give at least 1"),
        ("--learner-share 1", "--learner-share: 1.0 is not in [0, 1)"),
        ("--kinds bimodal:7", "--kinds: 'bimodal:7' is none of"),
    ],
)
def test_what_cannot_be_simulated_is_refused(said: str, line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        asked(said.split())
    assert line in capsys.readouterr().err
