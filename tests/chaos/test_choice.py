"""Which faults are chosen, before a run is started for them."""

import pytest

from tests.chaos import __main__ as chaos


@pytest.mark.parametrize("said", [["--kinds", "no such fault"], ["--seeds", "0"]])
def test_a_choice_of_no_fault_is_refused(
    said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["chaos", *said])
    with pytest.raises(SystemExit, match="2"):
        chaos.main()
    assert "no fault is chosen" in capsys.readouterr().err


def test_those_that_a_choice_has_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["chaos", "--list", "--kinds", "SIGKILL sandbox"])
    assert chaos.main() == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed and all("SIGKILL sandbox" in name for name in listed)
