"""An adapter served beside a model's weights, real: vLLM on CPU against transformers with the two merged in float32."""

import asyncio
import copy
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.generation.engine import Engine
from actors.generation.served_adapter import adapter_to_serve
from actors.weights.adapter_folder import (
    AdapterSettings,
    adapter_beside,
    adapter_name,
    adapter_shapes,
    target_modules,
    write_adapter,
)
from actors.weights.buckets import WeightBucket, checksum
from actors.weights.model_parameters import linear_layers
from rstar_ray.errors import EngineError
from tests import derived
from tests.actors.policies import draw_rows, micro_batches, weighted
from tests.actors.test_engine import TOLERANCE, VOCABULARY, complete, logprobs_of, off_by, policy, prompts, until
from tests.actors.unpacked import NamedArray, pack

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

RANK, ALPHA = 4, 8


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save(policy(seed=0), path)
    return path


def adapted(folder: Path) -> AdapterSettings:
    return AdapterSettings(base=str(folder), rank=RANK, alpha=ALPHA)


@pytest.fixture(scope="module")
async def engine(folder: Path) -> AsyncIterator[Engine]:
    running = Engine(derived.engine(max_context_tokens=1024, kv_tokens=32_000), folder, adapter=adapted(folder))
    await running.start()
    yield running
    await running.close()


def adapter(folder: Path, seed: int, rank: int = RANK) -> dict[str, np.ndarray]:
    """One that moves every log-prob by far more than the tolerance."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in adapter_shapes(folder, rank).items()}


def buckets(*parameters: Mapping[str, np.ndarray]) -> list[WeightBucket]:
    """Several, as a learner publishes them."""
    return list(pack((NamedArray(n, a) for some in parameters for n, a in some.items()), 2**18))


def parameters_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def merged(model: torch.nn.Module, folder: Path, matrices: Mapping[str, np.ndarray]) -> torch.nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in linear_layers(folder):
            a, b = (torch.from_numpy(matrices[adapter_name(layer, matrix)]) for matrix in "AB")
            model.get_parameter(f"{layer}.weight").add_(ALPHA / RANK * b @ a)
    return model


async def test_log_probs_equal_those_of_the_merged_model_over_several_versions(engine: Engine, folder: Path):
    """The same prompt for every version, so that a stale prefix block would show."""
    base = policy(seed=0)
    assert await off_by(engine, base) <= TOLERANCE  # before the first version
    for version in (1, 2, 3):
        matrices = adapter(folder, seed=version)
        published = buckets(matrices)
        update = await engine.weights.update(version, published)
        assert (engine.policy_version, update.checksum) == (version, checksum(published))
        assert await off_by(engine, merged(base, folder, matrices)) <= TOLERANCE
        assert await off_by(engine, base) > 100 * TOLERANCE
    assert engine.policy_version == 3
    tokens = [token async for token in _stream(engine, prompts(1)[0])]
    assert tokens == (await complete(engine, prompts(1)[0], max_tokens=8)).token_ids


async def _stream(engine: Engine, prompt: list[int]) -> AsyncIterator[int]:
    from rstar_ray.trajectory import UNMODIFIED

    async for some in engine.stream(prompt, request_id="streamed", max_tokens=8, seed=0, sampling=UNMODIFIED):
        for token in some:
            yield token


async def test_a_request_under_way_continues_under_the_new_adapter(engine: Engine, folder: Path):
    """Each of its log-probs is the old version's up to one token and the new one's from there on."""
    versions = {number: adapter(folder, seed=number) for number in (10, 11)}
    await engine.weights.update(10, buckets(versions[10]))
    started = [asyncio.create_task(complete(engine, p, seed=i, max_tokens=600)) for i, p in enumerate(prompts(8))]
    await until(lambda: engine.load().running == 8)
    await engine.weights.update(11, buckets(versions[11]))
    completions = await asyncio.gather(*started)
    models = {number: merged(policy(seed=0), folder, matrices) for number, matrices in versions.items()}
    crossed = 0
    for prompt, completion in zip(prompts(8), completions, strict=True):
        by_version = {number: logprobs_of(model, prompt, completion.token_ids) for number, model in models.items()}
        expected = [by_version[version][at] for at, version in enumerate(completion.policy_versions)]
        assert np.abs(np.array(expected) - np.array(completion.logprobs)).max() <= TOLERANCE
        crossed += len(set(completion.policy_versions)) == 2
    assert crossed > 0


async def test_adapters_that_do_not_fit_are_refused_and_the_old_one_still_serves(engine: Engine, folder: Path):
    matrices = adapter(folder, seed=20)
    await engine.weights.update(20, buckets(matrices))
    lacking = dict(list(matrices.items())[1:])
    for wrong in (
        buckets(lacking),
        buckets(adapter(folder, seed=21, rank=RANK + 1)),
        buckets(parameters_of(policy(0))),
    ):
        with pytest.raises(EngineError, match="not the weights of"):
            await engine.weights.update(21, wrong)
    assert engine.policy_version == 20
    assert await off_by(engine, merged(policy(seed=0), folder, matrices)) <= TOLERANCE


async def test_the_models_weights_may_come_with_an_adapter_and_not_go_back(engine: Engine, folder: Path):
    """Of a policy whose adapter was trained beside other weights than those that the engine started from."""
    other, matrices = policy(seed=30), adapter(folder, seed=30)
    published = buckets(parameters_of(other), matrices)
    update = await engine.weights.update(30, published)
    assert update.checksum == checksum(published)
    assert await off_by(engine, merged(other, folder, matrices)) <= TOLERANCE
    with pytest.raises(EngineError, match="were replaced"):
        await engine.weights.update(31, buckets(adapter(folder, seed=31)))
    again = adapter(folder, seed=32)
    await engine.weights.update(32, buckets(parameters_of(other), again))
    assert await off_by(engine, merged(other, folder, again)) <= TOLERANCE


async def test_a_bfloat16_engine_serves_an_exported_model_by_its_adapter(folder: Path, tmp_path: Path):
    """Merged weights are for float32, and for an adapter whose base model is gone."""
    exported, base = tmp_path / "model", tmp_path / "base"
    shutil.copytree(folder, base)
    tensors = {name: torch.from_numpy(matrix) for name, matrix in adapter(folder, seed=40).items()}
    write_adapter(
        adapter_beside(exported), tensors, base=str(base), rank=RANK, alpha=ALPHA, targets=target_modules(folder)
    )
    of_trained = merged(policy(seed=0), folder, adapter(folder, seed=40))
    save(of_trained, exported)
    half = derived.small_config(engine__dtype="bfloat16")
    adapter_of_export = adapter_to_serve(half, exported, trained=False)
    assert adapter_of_export is not None and adapter_of_export.base == str(base)
    assert adapter_to_serve(derived.small_config(), exported, trained=False) is None
    engine = Engine(
        derived.engine(dtype="bfloat16", max_context_tokens=256, kv_tokens=8_192), exported, adapter=adapter_of_export
    )
    try:
        await engine.start()
        assert await mean_off_by(engine, of_trained) < 0.05 < await mean_off_by(engine, policy(seed=0))
    finally:
        await engine.close()
    shutil.rmtree(base)
    assert adapter_to_serve(half, exported, trained=False) is None


async def mean_off_by(engine: Engine, model: torch.nn.Module) -> float:
    (prompt,) = prompts(1)
    completion = await complete(engine, prompt)
    return float(np.abs(logprobs_of(model, prompt, completion.token_ids) - np.array(completion.logprobs)).mean())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_serves_what_a_bfloat16_learner_trained(tmp_path: Path, dtype: str):
    """Five updates at a learning rate whose changes are far below the steps of bfloat16 around a weight.

    A float32 engine shows how far its log-probs move; in bfloat16 that is less than the rounding of activations.
    """
    from transformers import AutoModelForCausalLM

    from actors.learner.rank import LearnerRank

    folder = tmp_path / "policy"
    save(policy(seed=0).to(torch.bfloat16), folder)
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    learner = LearnerRank(derived.learner(dtype="bfloat16", lora_rank=RANK, lora_alpha=ALPHA), folder)
    engine = Engine(
        derived.engine(dtype=dtype, max_context_tokens=256, kv_tokens=8_192), folder, adapter=adapted(folder)
    )
    learner.start()
    try:
        rows = [replace(row, token_ids=row.token_ids % VOCABULARY) for row in draw_rows(8)]
        for _ in range(5):
            assert learner.train_rl([micro_batches(weighted(rows), 512)], 1e-5).applied
        published = list(learner.served_weights().on_host())
        learner.export(tmp_path / "model")
        learner.written()
        trained: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
        await engine.start()
        await engine.weights.update(1, published)
        for prompt in prompts(4):
            completion = await complete(engine, prompt)
            seen = np.array(completion.logprobs)
            of_base, of_trained = (logprobs_of(model, prompt, completion.token_ids) for model in (base, trained))
            if dtype == "bfloat16":
                assert np.abs(seen - of_trained).mean() < 0.02
                continue
            move = of_trained - of_base
            assert ((seen - of_base) @ move) / (move @ move) > 0.9
            assert np.abs(seen - of_trained).max() < TOLERANCE
    finally:
        await engine.close()
        learner.release()
