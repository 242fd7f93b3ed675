"""A command line is read by the branches that it names, and as a parser of all settings reads it."""

from dataclasses import dataclass, field
from typing import Literal
from unittest import mock

import pytest
import tyro

from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError

DEFAULT = with_values(RunConfig(), {"steps": 7, "rollout.max_turns": 3, "tools.use": ("python",), "sft.steps": 9})


@dataclass(frozen=True)
class Engine:
    """A branch."""

    seats: int = 4  # that it has
    kind: Literal["small", "large"] = "small"


@dataclass(frozen=True)
class Settings:
    """A tree of two branches."""

    names: tuple[str, ...] = ("a",)
    quick: bool = False
    engine: Engine = field(default_factory=Engine)

    def __post_init__(self) -> None:
        if len(self.names) > self.engine.seats:
            raise ConfigError("--names", f"{len(self.names)} are too many", "raise --engine.seats")


@pytest.mark.parametrize(
    "line",
    [
        "--seed 4 --seed=5 --steps 2 --rollout.max-turns 5 --rollout.max_response_tokens 99",
        "--rollout.instruct --rollout.no-instruct --tools.use python a:b",
        "--optimizer.learning-rate 1e-3 --model=-x --evaluate.files --run-dir a/b",
    ],
)
def test_what_is_asked_for_goes_over_the_default_as_a_parser_of_all_settings_has_it(line: str):
    whole = tyro.cli(RunConfig, default=DEFAULT, args=line.split())
    assert options_of(RunConfig, line.split(), default=DEFAULT) == whole != DEFAULT


@pytest.mark.parametrize(
    ("line", "quick"), [("", True), ("--no-quick", False), ("--no-quick --quick", True), ("--quick --no-quick", False)]
)
def test_the_last_word_on_a_switch_counts(line: str, quick: bool):
    assert options_of(Settings, line.split(), default=Settings(quick=True)).quick is quick


def test_only_the_branches_that_are_named_are_built():
    with mock.patch("tyro.cli", wraps=tyro.cli) as built:
        found = options_of(Settings, ["--engine.seats", "5", "--names", "b", "c"], default=Settings(quick=True))
    assert found == Settings(names=("b", "c"), quick=True, engine=Engine(seats=5))
    ((part,), _), = (built.call_args_list)  # fmt: skip
    assert set(part.__dataclass_fields__) == {"engine", "names"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--engine.seat 5", "--engine.seat: no such option; perhaps --engine.seats; --help lists all"),
        ("--names b --engin.seats 5", "--engin.seats: no such option; perhaps --engine.seats; --help lists all"),
        ("--names b c d e f", "--names: 5 are too many; raise --engine.seats"),
        ("--names b c --engine.seats 1", "--names: 2 are too many; raise --engine.seats"),
        ("--engine.kind huge", "--engine.kind: 'huge' is no choice"),
        ("--engine.seats many", "--engine.seats: "),
        ("--engine.seats", "--engine.seats: needs a value; see --help for its type"),
        ("stray --quick", "stray"),
    ],
)
def test_what_is_wrong_is_told_by_a_parser_that_knows_all_options(line: str, said: str):
    with pytest.raises(ConfigError) as refused:
        options_of(Settings, line.split(), default=Settings())
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("line", ["--help", "-h", "--names b --help", "--names b -h"])
def test_help_lists_all_options_and_what_they_are(line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        options_of(Settings, line.split(), default=Settings(), program="try", description="Of a test.")
    shown = capsys.readouterr()
    assert ended.value.code == 0 and shown.err == ""
    assert all(said in shown.out for said in ("try", "Of a test.", "--engine.seats", "--quick", "that it has"))
    assert shown.out.count("--engine.seats") == 1
