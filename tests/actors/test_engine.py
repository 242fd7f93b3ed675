"""The engine, real: vLLM on CPU with a model of random weights, held against a transformers forward in float32."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.generation.engine import Engine
from actors.weights.buckets import WeightBucket, checksum
from rstar_ray.errors import DeadlineExceeded, EngineError, RStarError
from rstar_ray.trajectory import UNMODIFIED, Completion
from scheduler.cost import placement_cost
from tests import derived
from tests.actors.unpacked import NamedArray, pack

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

EOS = 1
VOCABULARY = 96
TOLERANCE = 1e-5
MODEL_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "dtype": "float32",
}
ids = itertools.count()


def policy(seed: int) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**MODEL_SHAPE)).eval()


def weights(model: torch.nn.Module, max_bytes: int = 2**20) -> list[WeightBucket]:
    """Several buckets, as a learner publishes them."""
    return list(pack((NamedArray(n, p.detach().numpy()) for n, p in model.named_parameters()), max_bytes))


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """What the model itself gives the completion's tokens."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()


async def complete(engine: Engine, prompt: Sequence[int], *, seed: int = 0, max_tokens: int = 64) -> Completion:
    return await engine.generate(
        prompt, request_id=f"request-{next(ids)}", max_tokens=max_tokens, seed=seed, sampling=UNMODIFIED
    )


async def off_by(engine: Engine, model: torch.nn.Module) -> float:
    """The largest difference between log-probs of the engine's tokens and those of the model itself."""
    (prompt,) = prompts(1)
    completion = await complete(engine, prompt)
    expected = logprobs_of(model, prompt, completion.token_ids)
    return float(np.abs(expected - np.array(completion.logprobs)).max())


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what only the engine's statistics tell."""
    async with asyncio.timeout(600):
        while not holds():
            await asyncio.sleep(0.001)


def prompts(count: int, length: int = 70, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(2, VOCABULARY, (count, length)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    policy(seed=0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """The folder for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", path)
        yield Path(path)


@pytest.fixture(scope="module")
async def engine(folder: Path, temporary: Path) -> AsyncIterator[Engine]:
    running = Engine(derived.engine(max_context_tokens=1024, kv_tokens=32_000), folder)
    assert (await running.start()).cost is None
    yield running
    await running.close()


async def test_log_probs_equal_the_learners_over_several_publishes_and_turns(engine: Engine):
    """The same first prompts in every round, so that a stale prefix block would show."""
    differences: list[float] = []
    for version in (1, 2, 3):
        model = policy(seed=version)
        buckets = weights(model)
        update = await engine.weights.update(version, buckets)
        assert (engine.policy_version, update.checksum) == (version, checksum(buckets))
        contexts = prompts(8)
        for turn in range(3):
            turns = [complete(engine, context, seed=100 * turn + i) for i, context in enumerate(contexts)]
            completions = await asyncio.gather(*turns)
            assert {sampled_by for c in completions for sampled_by in c.policy_versions} == {version}
            for context, completion in zip(contexts, completions, strict=True):
                expected = logprobs_of(model, context, completion.token_ids)
                differences.append(float(np.abs(expected - np.array(completion.logprobs)).max()))
            tool_text = prompts(8, length=20, seed=turn + 1)
            contexts = [c + d.token_ids + t for c, d, t in zip(contexts, completions, tool_text, strict=True)]
    assert engine.policy_version == 3
    assert max(differences) <= TOLERANCE


async def test_a_request_under_way_continues_under_the_new_weights(engine: Engine):
    """Each of its log-probs is the old policy's up to one token and the new one's from there on."""
    old, new = policy(seed=10), policy(seed=11)
    await engine.weights.update(10, weights(old))
    started = [asyncio.create_task(complete(engine, p, seed=i, max_tokens=900)) for i, p in enumerate(prompts(24))]
    await until(lambda: engine.load().running == 24)
    under_way = engine.load()
    await engine.weights.update(11, weights(new))
    completions = await asyncio.gather(*started)
    assert under_way.running > 0 and under_way.kv_used_tokens > 0
    crossed = 0
    for prompt, completion in zip(prompts(24), completions, strict=True):
        seen = np.array(completion.logprobs)
        by_old = np.abs(seen - logprobs_of(old, prompt, completion.token_ids)) <= TOLERANCE
        by_new = np.abs(seen - logprobs_of(new, prompt, completion.token_ids)) <= TOLERANCE
        switch = len(seen) if by_old.all() else int(np.argmin(by_old))
        assert by_new[switch:].all()
        named = completion.policy_versions.count(10)
        assert completion.policy_versions == [10] * named + [11] * (len(seen) - named)
        assert named == switch
        crossed += 0 < switch < len(seen)
    assert crossed > 0
    assert engine.load().preemptions == 0  # what a swap puts back in the queue is not want of room


async def test_an_engine_measures_what_its_steps_cost(engine: Engine):
    cost = await engine.measure_cost()
    assert 1e-5 < cost.fixed_s < 1.0 and 1e-8 < cost.per_prefill_s < 0.01
    assert 0.0 <= cost.per_sequence_s < 0.1 and 0.0 <= cost.per_context_s < 1e-3
    assert placement_cost(cost, kv_tokens=32_000, max_running=64, context_tokens=200).preemption_steps < 100
    assert engine.load().preemptions == 0 and engine.load().running == 0
    again = await engine.measure_cost()
    assert again.per_prefill_s > cost.per_prefill_s / 5, "a prompt that is cached costs nothing"


async def test_a_seed_decides_a_completion_whatever_runs_beside_it(engine: Engine):
    prompt = prompts(1)[0]
    alone = await complete(engine, prompt, seed=5)
    together = await asyncio.gather(*(complete(engine, prompt, seed=seed) for seed in (5, 6, 7, 8)))
    assert together[0].token_ids == alone.token_ids
    assert len({tuple(completion.token_ids) for completion in together}) == 4


async def test_a_completion_ends_with_the_end_of_turn_token_or_is_cut(engine: Engine):
    completions = await asyncio.gather(*(complete(engine, p, seed=i, max_tokens=80) for i, p in enumerate(prompts(48))))
    ended = [completion for completion in completions if completion.ended]
    cut = [completion for completion in completions if not completion.ended]
    assert ended and cut
    assert all(c.token_ids[-1] == EOS and c.token_ids.count(EOS) == 1 for c in ended)
    assert all(len(c.token_ids) == 80 and EOS not in c.token_ids for c in cut)
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions)


async def test_a_request_that_can_never_run_is_refused(engine: Engine):
    with pytest.raises(ValueError, match="leave nothing to sample"):
        await complete(engine, [2] * 1024)


async def test_a_request_that_vllm_itself_refuses_ends_nothing_but_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    assert engine._facts is not None
    with monkeypatch.context() as unaware:  # of how much there is room for
        unaware.setattr(engine, "_facts", replace(engine._facts, max_model_len=10**6))
        with pytest.raises(ValueError, match=r"the engine refused to complete request-\d+: .*1024"):
            await complete(engine, [2] * 1500)
    assert (await complete(engine, prompts(1)[0])).token_ids


async def test_a_completion_that_exceeds_its_deadline_ends_nothing_but_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as hurried:
        hurried.setattr(engine, "config", SimpleNamespace(completion_deadline_s=0.001))  # a run's minimum is 1 s
        with pytest.raises(RStarError, match=r"waited 0\.001 s for vLLM") as late:
            await complete(engine, prompts(1)[0], max_tokens=900)
    assert not isinstance(late.value, DeadlineExceeded)  # which ends the worker
    await until(lambda: engine.load().running == 0)
    assert (await complete(engine, prompts(1)[0])).token_ids


async def test_weights_of_another_model_are_refused_and_the_old_ones_serve_on(engine: Engine):
    model = policy(seed=20)
    before = engine.policy_version
    renamed = list(pack((NamedArray(f"other.{n}", p.detach().numpy()) for n, p in model.named_parameters()), 2**20))
    with pytest.raises(EngineError, match=r"missing \[model\.embed_tokens\.weight.*unknown \[other\."):
        await engine.weights.update(20, renamed)
    assert engine.policy_version == before
    assert set((await complete(engine, prompts(1)[0])).policy_versions) == {before}


async def test_a_cancelled_request_leaves_the_engine(engine: Engine):
    """Of eight: whatever the weights, one of them samples for a while."""
    eight = [asyncio.create_task(complete(engine, prompts(1)[0], max_tokens=900, seed=seed)) for seed in range(8)]
    await until(lambda: engine.load().running > 0)
    cancelled = [one for one in eight if one.cancel()]
    ended = await asyncio.gather(*eight, return_exceptions=True)
    assert cancelled and sum(isinstance(one, asyncio.CancelledError) for one in ended) == len(cancelled)
    await complete(engine, prompts(1)[0], max_tokens=4)
    assert engine.load().running == 0


async def test_a_scarce_kv_cache_preempts_and_a_killed_process_is_an_engine_error(folder: Path):
    scarce = Engine(derived.engine(max_context_tokens=512, kv_tokens=640, max_running=16), folder)
    facts = await scarce.start()
    (core,) = scarce._vllm.processes
    assert facts.kv_capacity_tokens == 640

    completions = await asyncio.gather(
        *(complete(scarce, p, seed=i, max_tokens=200) for i, p in enumerate(prompts(12, length=40)))
    )
    assert scarce.load().preemptions > 0
    model = policy(seed=0)
    for prompt, completion in zip(prompts(12, length=40), completions, strict=True):
        seen, expected = np.array(completion.logprobs), logprobs_of(model, prompt, completion.token_ids)
        assert np.abs(seen - expected).max() <= TOLERANCE

    under_way = asyncio.create_task(complete(scarce, prompts(1, length=40)[0], max_tokens=400, seed=1))
    await until(lambda: scarce.load().running == 1)
    core.kill()
    with pytest.raises(EngineError, match=r"died|does not serve|could not complete"):
        await under_way
    with pytest.raises(EngineError, match="does not serve"):
        await complete(scarce, prompts(1)[0])
    await scarce.close()
    await scarce.close()
    assert not core.is_running()


async def test_an_engine_keeps_its_temporary_files_in_a_separate_folder(engine: Engine, temporary: Path):
    (own,) = temporary.iterdir()
    assert os.environ["TMPDIR"] == os.environ["VLLM_RPC_BASE_PATH"] == tempfile.gettempdir() == str(own)
    assert any(own.glob("vllm_dist_*"))  # or vLLM leaves nothing any more, and the folder is needless


async def test_a_closed_engine_leaves_neither_process_nor_file_behind(engine: Engine, temporary: Path):
    """Last in this file: it closes the engine the others share."""
    (core,) = engine._vllm.processes
    assert core.is_running()
    await engine.close()
    assert not core.is_running()
    assert list(temporary.iterdir()) == []
    assert "VLLM_RPC_BASE_PATH" not in os.environ
    with pytest.raises(EngineError, match="closed"):
        await complete(engine, prompts(1)[0])


async def test_a_tied_head_saved_beside_its_embeddings_is_published_to_like_any_other(tmp_path: Path):
    """As some folders of small models are: lm_head in the file, tie_word_embeddings in config.json."""
    from safetensors.torch import load_file, save_file

    policy(seed=0).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"].clone()
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    twice = Engine(derived.engine(max_context_tokens=256, kv_tokens=4_096), tmp_path)
    await twice.start()
    try:
        model = policy(seed=1)
        update = await twice.weights.update(1, weights(model))
        assert update.checksum == checksum(weights(model))
        assert await off_by(twice, model) <= TOLERANCE
    finally:
        await twice.close()
