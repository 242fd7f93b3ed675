import pytest

from benchmarks import bandit
from benchmarks.bandit import FORMS, learn, telling_share


def test_where_nearly_all_is_right_the_papers_rule_loses_the_signal_that_one_kept_failure_gives():
    paper, least = (telling_share(0.95, FORMS[name], draws=300) for name in ("paper", "paper, least failures 1"))
    assert paper < 0.12 and 0.25 < least < 0.45


def test_coins_learn_to_be_right_and_resampling_alone_drives_failed_calls_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bandit, "RATE", 1.0)
    monkeypatch.setattr(bandit, "STEPS", 15)
    plain, paper = ([learn(FORMS[name], seed) for seed in range(3)] for name in ("plain GRPO", "paper"))
    assert all(course.right > 0.8 for course in (*plain, *paper))
    assert sum(course.fails for course in paper) < 0.8 * sum(course.fails for course in plain)
