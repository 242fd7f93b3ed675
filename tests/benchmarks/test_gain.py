"""What a policy gains where another is not always right."""

import json
from pathlib import Path

import pytest

from benchmarks.gain import gain_on_unsolved, main, rates_of
from rstar_ray.errors import ConfigError


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
    assert main([str(file), str(file), str(tmp_path / "none.jsonl")]) == 2
    assert "error: " in capsys.readouterr().err
