"""What a policy gains where another is not always right."""

import json
import random
from pathlib import Path

import pytest

from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.gain import gain_on_unsolved, main, rates_of


def test_only_what_is_not_always_solved_counts_and_by_other_rollouts_than_those_that_chose_it():
    gain = gain_on_unsolved(
        {"a": 1.0, "b": 0.5, "c": 0.0}, {"a": 0.0, "b": 1.0, "c": 0.25}, {"a": 1.0, "b": 1.0, "c": 1.0}
    )
    assert (gain.num_problems, gain.before, gain.after, gain.gain) == (2, 0.625, 1.0, 0.375)
    assert gain.interval[0] <= 0.375 <= gain.interval[1]


def test_the_same_policy_gains_nothing_however_lucky_it_was():
    rng = random.Random(0)
    draw = lambda: {str(n): sum(rng.random() < 0.8 for _ in range(8)) / 8 for n in range(2_000)}  # noqa: E731
    choosing = draw()
    assert abs(gain_on_unsolved(choosing, draw(), draw()).gain) < 0.02
    assert gain_on_unsolved(choosing, choosing, draw()).gain > 0.03  # chosen by what it is measured by


def test_rows_of_other_problems_or_of_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="of different problems"):
        gain_on_unsolved({"a": 0.5}, {"b": 0.5}, {"a": 0.5})
    with pytest.raises(ConfigError, match="always solved"):
        gain_on_unsolved({"a": 1.0}, {"a": 0.5}, {"a": 0.5})
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"id": "a", "num_correct": 3, "k": 4}) + "\n")
    assert rates_of(file) == {"a": 0.75}
    main([str(file)] * 3)
    assert json.loads(capsys.readouterr().out)["gain"] == 0.0
    for text in ("", '{"id": 1}\n', "no json\n"):
        (tmp_path / "none.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"none\.jsonl"):
            rates_of(tmp_path / "none.jsonl")
    with pytest.raises(SystemExit) as ended:
        main([str(file), str(file), str(tmp_path / "none.jsonl")])
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err
