"""Log-probs of a reference model that a vLLM server holds, of a pretended server and of a real one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.cluster.__main__ import free_port
from actors.learner import served_reference
from actors.learner.served_reference import ServedReference, refuse_unfit, served_model
from rstar_ray.algorithm.batch import TokenRow, collate
from rstar_ray.errors import ConfigError, LearnerError
from tests.actors.policies import draw_rows, save_policy
from tests.actors.pretended_teacher import Server, serving, wanted

ROWS = draw_rows(5)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(served_reference, "PAUSE_S", 0.01)
    monkeypatch.setattr(Server, "failures", 0)
    with serving() as address:
        yield address


def test_the_first_token_of_a_row_has_no_log_prob(address: str):
    row = TokenRow("r", np.array([5, 6, 7], np.int32), np.ones(3, np.bool_))
    assert ServedReference(address).ahead([[row]])(0, collate([row])).tolist() == pytest.approx(wanted([row]))


@pytest.mark.parametrize("packed", [False, True])
def test_the_log_probs_of_sampled_tokens_come_in_the_order_of_a_micro_batch(packed: bool, address: str):
    parts = [ROWS[:2], [], ROWS[2:]]
    given = ServedReference(address).ahead(parts)
    for index, rows in enumerate(parts):
        found = given(index, collate(rows, packed=packed))
        assert found.dtype == torch.float32 and found.tolist() == pytest.approx(wanted(list(rows)))


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_ends_the_update(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    reference = ServedReference(address)
    monkeypatch.setattr(Server, "failures", 3)
    assert len(reference.ahead([ROWS])(0, collate(ROWS))) == len(wanted(ROWS))
    monkeypatch.setattr(Server, "wrong", "the prompt is too long")
    with pytest.raises(LearnerError, match=rf"{address}: .*HTTPError.*the prompt is too long"):
        reference.ahead([ROWS])(0, collate(ROWS))


def test_a_server_that_does_not_fit_is_refused_in_one_line(address: str):
    refuse_unfit(address, context=2_048, token_ids=lambda text: list(text.encode()))
    with pytest.raises(ConfigError, match=r"2049 tokens, and rows have up to 4096. Hint: .*--max-model-len 4097"):
        refuse_unfit(address, context=4_096, token_ids=lambda text: list(text.encode()))
    with pytest.raises(ConfigError, match=r"teacher at .* has another tokenizer than --model"):
        refuse_unfit(address, context=2_048, token_ids=lambda text: [1, 2])
    for wrong in ("http://127.0.0.1:9", "http://127.0.0.1:port"):
        with pytest.raises(ConfigError, match=f"no model is served at {wrong} .*examples/distillation.py") as refused:
            served_model(wrong)
        assert "\n" not in str(refused.value)


@pytest.mark.real
def test_vllm_gives_the_log_probs_of_the_model_that_it_serves(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    teacher = save_policy(tmp_path / "teacher")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(teacher), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
    command += ["--skip-tokenizer-init"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with subprocess.Popen(command, env=environment) as server:
        try:
            reference = ServedReference(_once_it_answers(f"http://127.0.0.1:{port}"))
            found = reference.ahead([ROWS])(0, collate(ROWS))
        finally:
            server.terminate()
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    want: list[torch.Tensor] = []
    for row in ROWS:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        want.append(logprobs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])])
    torch.testing.assert_close(found, torch.cat(want).detach(), atol=1e-4, rtol=1e-4)


def _once_it_answers(address: str, deadline_s: float = 300.0) -> str:
    until = time.monotonic() + deadline_s
    while True:
        try:
            assert served_model(address).max_model_len == 128
            return address
        except ConfigError:
            assert time.monotonic() < until
            time.sleep(1)
