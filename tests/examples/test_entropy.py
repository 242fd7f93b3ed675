import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributions import Categorical

from examples.entropy.__main__ import main
from examples.entropy.measure import Entropies
from examples.entropy.read_run import sampled_turns
from examples.entropy.zones import SampledTurn, Zone
from rstar_ray.chat.call_syntax import HERMES, SYNTAXES, CallSyntax
from rstar_ray.outcome import Outcome
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.trajectory import Problem
from tests.rstar_ray.chat.families import FAMILIES, tokenizer_of
from tests.rstar_ray.fabricate import run_directory, trajectory


def turn(count: int, answered: Outcome | None, *, call: int = 0, answer: int = 0) -> SampledTurn:
    """`count` tokens of prose, then `call` inside a call, then `answer` inside an answer."""
    return SampledTurn(
        tuple(range(count + call + answer)),
        (False,) * count + (True,) * call + (False,) * answer,
        (False,) * (count + call) + (True,) * answer,
        answered,
    )


WORDS = ["<tool_call>", "print(a)", "</tool_call>", "<", "answer>", "7", "</answer>", "so"]


def pieces(ids: list[int]) -> list[str]:
    return [WORDS[token_id] for token_id in ids]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1_000])
@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=lambda syntax: syntax.name)
def test_zones_are_found_however_the_text_falls_into_tokens_and_whatever_marks_a_call(syntax: CallSyntax, size: int):
    """Byte-level BPE has tokens such as `>\\` and none that ends where a tag does."""
    thought = "" if syntax.name == "llama_json" else "Let me see. "  # there a turn that calls is a call alone
    written = [thought + syntax.write("python", {"code": "print(6 * 7)"}), "So <answer>\\boxed{42}</answer>."]
    cut = [[text[at : at + size] for at in range(0, len(text), size)] for text in written]
    turns = [
        {"completion_ids": [*range(1_000 * n, 1_000 * n + len(texts)), 9_999], "outcomes": ["ok"][n:]}
        for n, texts in enumerate(cut)
    ]

    def pieces(ids: Sequence[int]) -> list[str]:
        return ["<|im_end|>" if token_id == 9_999 else cut[token_id // 1_000][token_id % 1_000] for token_id in ids]

    calling, answering = sampled_turns({"turns": turns}, pieces, syntax=syntax, stops=[9_999])
    assert_zone(written[0], "print(6 * 7)", thought[: -size or None], cut[0], calling.in_call)
    assert_zone(written[1], "\\boxed{42}", "So "[:-size], cut[1], answering.in_answer)
    assert not any(calling.in_answer) and not any(answering.in_call)
    assert not calling.in_call[-1] and not answering.in_answer[-1]  # what ends the turn is part of neither


def assert_zone(text: str, inside: str, outside: str, texts: list[str], flags: Sequence[bool]) -> None:
    """Every token with a character of `inside` is flagged, and none that lies in `outside`, which begins the text."""
    start, end = text.index(inside), text.index(inside) + len(inside)
    position = 0
    for piece, flag in zip(texts, flags, strict=False):
        if position < end and position + len(piece) > start:
            assert flag, piece
        if position + len(piece) <= len(outside):
            assert not flag, piece
        position += len(piece)


@pytest.mark.usefixtures("without_fsync")
def test_a_run_of_a_model_whose_tokens_are_bytes_has_code_and_answers(tmp_path: Path):
    tokenizer = tokenizer_of(replace(FAMILIES["rstar2"], tags=()))  # tags are spelled, too

    def spelled(ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.array([tokenizer.encode(chr(one), add_special_tokens=False)[0] for one in ids], np.int32)

    path = run_directory(tmp_path / "run", stages={"stage1": 3})
    with RunDir(path).write_checkpoint("stage1", 3) as folder:
        model = make_tiny_model(folder / "model", seed=0)
        for tiny in [*model.glob("token*"), *model.glob("*.jinja")]:
            tiny.unlink()
        tokenizer.save_pretrained(model)
    call = HERMES.write("python", {"code": "print(6 * 7)"})
    turns = [(call, "42", Outcome.OK), ("So <answer>\\boxed{42}</answer>", "", None)]
    one = trajectory(Problem(id="p", problem="6 * 7?", answer="42"), turns, reward=1.0)
    one = replace(one, prompt_ids=spelled(one.prompt_ids), response_ids=spelled(one.response_ids))
    held_out = path / "trajectories" / "stage1-held-out.jsonl"
    write_trajectories(held_out, [one], tokenizer.decode, stage="stage1", step=3)
    assert main([str(path)]) == 0
    (found,) = json.loads((path / "analysis.json").read_text())
    tokens = {count["zone"]: count["tokens"] for count in found["counts"]}
    assert tokens[Zone.CODE] >= len("print(6 * 7)") and tokens[Zone.ANSWER] == len("\\boxed{42}")


def test_entropies_are_those_of_the_distributions_the_tokens_were_drawn_from(tmp_path: Path):
    model = Entropies(make_tiny_model(tmp_path, seed=0))
    ids, sampled = [5, 9, 3, 8, 2], [False, False, True, False, True]
    logits = model._model(torch.tensor([ids])).logits[0]
    expected = Categorical(logits=logits.double()).entropy()[[1, 3]]
    assert model.of(ids, sampled) == pytest.approx(expected.detach().numpy(), rel=1e-5)
