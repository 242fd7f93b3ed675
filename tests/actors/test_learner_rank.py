"""One rank in this process: DeepSpeed's result against plain torch, and everything in and out."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.weights.buckets import checksum
from actors.weights.tensors import ServedWeights
from rstar_ray.algorithm.batch import TokenRow
from rstar_ray.errors import ConfigError
from tests import derived
from tests.actors.policies import draw_rows, micro_batches, num_sampled, save_policy, weighted
from tests.actors.pretended_teacher import serving, wanted
from tests.actors.unpacked import unpack

pytestmark = pytest.mark.real

ZERO = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """The rank names itself in the environment; nothing after these tests may see it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


Start = Callable[..., Any]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a rank with changed settings, and ends it with the test."""
    ranks: list[Any] = []

    def started(model: Path = folder, **changes: Any) -> Any:
        from actors.learner.rank import LearnerRank

        rank = LearnerRank(derived.learner(**{"grad_clip": 0.0, "zero": 0, **changes}), model)
        rank.start()
        ranks.append(rank)
        return rank

    yield started
    for rank in ranks:
        rank.release()


ROWS = draw_rows(12)


def update(rank: Any, rows: list[TokenRow] = ROWS, tokens: int = 512, lr: float = 1e-3) -> Any:
    return rank.train_rl([micro_batches(weighted(rows), tokens)], lr)


def gradients(rank: Any) -> dict[str, Any]:
    """Of the first update: Adam's first moment is (1 - beta1) times the gradient."""
    return {name: rank.state.get(name, "exp_avg").clone() / 0.1 for name in rank.state.shapes}


def weights(rank: Any) -> dict[str, Any]:
    return {name: rank.state.get(name).clone() for name in rank.state.shapes}


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def plain_gradients(folder: Path, rows: list[TokenRow]) -> dict[str, Any]:
    """Eq. 6 at ratio 1 by transformers and torch alone, row by row in float64."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (ratio * row.advantage)[torch.from_numpy(row.loss_mask[1:])].sum()
    (loss / num_sampled(rows)).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("zero", ZERO)
def test_the_gradient_is_that_of_plain_torch_in_float64(start: Start, folder: Path, zero: int):
    rank = start(zero=zero)
    assert update(rank).applied
    assert largest_difference(gradients(rank), plain_gradients(folder, ROWS)) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"tokens": 150},
        {"attention": "sdpa"},
        {"activation_checkpointing": True},
        {"logprob_chunk_tokens": 7},
        {"normalisation": "sequence"},
        {"normalisation": "group", "tokens": 150},
    ],
)
def test_the_gradient_does_not_depend_on_micro_batches_packing_checkpointing_or_chunks(
    start: Start, changes: dict[str, Any]
):
    tokens = changes.pop("tokens", 600)
    mode = changes.get("normalisation", "token")
    whole, other = start(normalisation=mode), start(**changes)
    rows = weighted(ROWS, mode)
    whole.train_rl([micro_batches(rows, 10_000)], 1e-3)
    other.train_rl([micro_batches(rows, tokens)], 1e-3)
    assert largest_difference(gradients(whole), gradients(other)) < 1e-6


def test_clipping_by_zero_and_by_us_agree(start: Start):
    norms = []
    results = []
    for zero in ZERO:
        rank = start(zero=zero, grad_clip=0.05)
        norms.append(update(rank).metrics["grad_norm"])
        results.append(gradients(rank))
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)
    assert norms[0] > 0.05
    length = math.sqrt(sum(float((gradient**2).sum()) for gradient in results[0].values()))
    assert length == pytest.approx(0.05, rel=1e-4)
    assert max(largest_difference(results[0], other) for other in results[1:]) < 1e-6


# ---------------------------------------------------------------- log-probs and the ratio


def test_a_model_that_would_carry_one_row_into_the_next_is_refused_where_rows_are_packed(start: Start, tmp_path: Path):
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--learner\.attention: rows packs rows .* Lfm2.*. Hint: give sdpa"):
        start(model=tmp_path, attention="rows")
    start(model=tmp_path, attention="sdpa")


def test_log_probs_are_those_of_transformers(start: Start, folder: Path):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    (got,) = start().logprobs([ROWS[:1]])
    ids = torch.from_numpy(ROWS[0].token_ids.astype(np.int64))
    want = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert float((got - want[torch.from_numpy(ROWS[0].loss_mask[1:])]).abs().max()) < 1e-5


def test_with_one_update_a_separate_pass_for_old_logprobs_finds_no_difference(start: Start):
    rank = start(check_old_logprobs_every=2)
    first, second = update(rank), update(rank)
    assert not {"old_logprobs_drift", "kl"} & first.metrics.keys()  # not compared, and no reference to compare with
    assert second.metrics["old_logprobs_drift"] < 1e-6
    assert (second.metrics["ratio_mean"], second.metrics["clip_frac"]) == (pytest.approx(1.0, abs=1e-6), 0.0)


def test_with_several_updates_the_ratio_is_taken_to_the_policy_before_the_first(start: Start):
    halves = [ROWS[::2], ROWS[1::2]]
    rank = start()
    together = rank.train_rl([micro_batches(weighted(half)) for half in halves], 1e-3)
    assert rank.step == together.step == 2
    assert together.metrics["ratio_max"] > 1.0
    assert together.metrics["trained_tokens"] == num_sampled(ROWS)


def test_of_several_updates_one_that_is_not_finite_is_distinguished_from_those_that_were_applied(start: Start):
    good, bad = ROWS[::2], [replace(ROWS[1], advantage=math.nan), *ROWS[3::2]]
    rank, alone = start(), start()
    both = rank.train_rl([micro_batches(weighted(good)), micro_batches(weighted(bad))], 1e-3)
    update(alone, good)
    assert (both.applied, both.refused, both.step, both.metrics["trained_tokens"]) == (True, (1,), 1, num_sampled(good))
    assert (
        ROWS[1].name in both.reason and math.isfinite(both.metrics["loss"]) and math.isfinite(both.metrics["grad_norm"])
    )
    assert largest_difference(weights(rank), weights(alone)) == 0.0
    neither = rank.train_rl([micro_batches(weighted(bad))] * 2, 1e-3)
    assert (neither.applied, neither.refused) == (False, (0, 1))


def test_the_gap_between_engine_and_learner_is_reported(start: Start):
    rank = start(correction="token", correction_cap=1.0)
    truth = [logprobs.numpy() for logprobs in rank.logprobs([[row] for row in ROWS])]
    gap = 0.25
    rows = []
    for row, logprobs in zip(ROWS, truth, strict=True):
        rollout = np.zeros(len(row.token_ids), np.float32)
        rollout[1:][row.loss_mask[1:]] = logprobs + gap
        rows.append(replace(row, rollout_logprobs=rollout))
    result = update(rank, rows)
    assert result.metrics["logprob_diff_mean"] == pytest.approx(gap, abs=1e-5)
    assert result.metrics["logprob_diff_max"] == pytest.approx(gap, abs=1e-4)
    assert result.metrics["correction_mean"] == pytest.approx(math.exp(-gap), abs=1e-4)


def test_what_was_seen_of_every_token_is_kept_by_row_until_the_next_update(start: Start, folder: Path):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    rank = start()
    update(rank, tokens=100)
    seen = rank.seen_tokens()
    assert seen.keys() == {row.name for row in ROWS}
    for row in ROWS:
        ids, sampled = torch.from_numpy(row.token_ids.astype(np.int64)), row.loss_mask[1:]
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1).numpy()[sampled]
        own = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()[sampled]
        np.testing.assert_allclose(seen[row.name].entropies, entropies, atol=1e-5)
        np.testing.assert_allclose(seen[row.name].logprob_diffs, own - row.rollout_logprobs[1:][sampled], atol=1e-5)
    update(rank, ROWS[:2])
    assert rank.seen_tokens().keys() == {row.name for row in ROWS[:2]}


def test_a_kl_term_to_the_policy_itself_changes_nothing_at_first(start: Start, folder: Path):
    rank = start(kl_coefficient=0.1, reference_model=str(folder))
    first = update(rank)
    assert first.metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert (update(rank).metrics["kl"] or 0) > 0


def test_the_kl_term_to_a_served_reference_is_that_of_its_log_probs(start: Start):
    batches = micro_batches(weighted(ROWS))
    with serving() as address:
        rank = start(kl_coefficient=0.1, reference_model=address)
        own = np.concatenate([logprobs.numpy() for logprobs in rank.logprobs(batches)]).astype(np.float64)
        kl = rank.train_rl([batches], 0.0).metrics["kl"]
    log_ratio = np.array(wanted([row for rows in batches for row in rows])) - own
    assert kl == pytest.approx(np.mean(np.exp(log_ratio) - log_ratio - 1), rel=1e-4)


def test_a_learning_rate_of_zero_changes_no_weight(start: Start):
    rank = start(zero=3)
    before = weights(rank)
    assert update(rank, lr=0.0).applied
    assert largest_difference(before, weights(rank)) == 0.0


def test_weight_decay_leaves_norms_alone(start: Start):
    rank = start(weight_decay=0.5)
    before = weights(rank)
    assert update(rank, [replace(row, advantage=0.0) for row in ROWS]).applied
    after = weights(rank)
    assert (
        largest_difference(
            {n: w for n, w in before.items() if w.dim() == 1}, {n: w for n, w in after.items() if w.dim() == 1}
        )
        == 0.0
    )
    embedding = "model.embed_tokens.weight"
    assert float((after[embedding] / before[embedding]).mean()) == pytest.approx(1 - 1e-3 * 0.5, abs=1e-6)


# ---------------------------------------------------------------- SFT


def test_the_sft_loss_is_cross_entropy_and_its_update_lowers_it(start: Start):
    rank = start()
    rows = weighted([TokenRow(row.name, row.token_ids, row.loss_mask) for row in ROWS])
    batches = micro_batches(rows)
    want = -float(sum(logprobs.sum() for logprobs in rank.logprobs(batches))) / num_sampled(rows)
    first = rank.evaluate_sft(batches)
    result = rank.train_sft(batches, 1e-3)
    assert (first, result.metrics["loss"]) == (pytest.approx(want, rel=1e-6), pytest.approx(want, rel=1e-6))
    assert rank.evaluate_sft(batches) < first


def test_the_temperature_of_rollouts_does_not_touch_sft(start: Start):
    rows = weighted([TokenRow(row.name, row.token_ids, row.loss_mask) for row in ROWS])
    plain, tempered = start(), start(temperature=0.5)
    assert tempered.evaluate_sft(micro_batches(rows)) == plain.evaluate_sft(micro_batches(rows))
    for rank in (plain, tempered):
        assert rank.train_sft(micro_batches(rows), 1e-3).applied
    assert largest_difference(gradients(plain), gradients(tempered)) == 0.0
    assert abs(float(plain.logprobs([rows[:1]])[0].sum() - tempered.logprobs([rows[:1]])[0].sum())) > 0.01


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("zero", ZERO)
def test_an_update_that_is_not_finite_leaves_the_weights_and_says_which_rollout(
    start: Start, zero: int, tmp_path: Path
):
    rank = start(zero=zero, save_bad_updates=str(tmp_path))
    update(rank)
    before, moments = weights(rank), gradients(rank)
    bad = [replace(row, advantage=math.nan) if row.name == "rollout-3" else row for row in ROWS]
    result = update(rank, bad)
    assert not result.applied and "rollout-3" in result.reason and "rollout-4" not in result.reason
    assert rank.step == 1
    assert largest_difference(before, weights(rank)) == 0.0
    assert largest_difference(moments, gradients(rank)) == 0.0
    with np.load(tmp_path / "update-000002-rank-0.npz") as saved:
        assert sorted(saved["names"]) == sorted(row.name for row in ROWS)
        assert len(saved["ids-0"]) == len(saved["mask-0"])
        assert np.isnan(saved[f"advantage-{saved['names'].tolist().index('rollout-3')}"])
    assert not update(rank, bad).applied
    assert len(list(tmp_path.iterdir())) == 2  # of the same step, and none written over
    assert update(rank).applied
    assert math.isfinite(largest_difference(before, weights(rank)))


def test_such_updates_in_a_row_are_counted_over_a_resume(start: Start, tmp_path: Path):
    bad = [replace(row, advantage=math.nan) for row in ROWS]
    first, second = start(), start()
    assert [update(first, bad).bad_updates for _ in range(2)] == [1, 2]
    first.save_checkpoint(tmp_path, {})
    first.written()
    second.load_checkpoint(tmp_path)
    assert update(second, bad).bad_updates == 3  # the limit: the run stops, with a checkpoint
    second.save_checkpoint(tmp_path / "stopped", {})
    second.written()
    second.load_checkpoint(tmp_path / "stopped")
    assert [update(second, bad).bad_updates for _ in range(2)] == [1, 2]
    assert update(second).bad_updates == 0
    good = micro_batches(weighted(ROWS))
    several = second.train_rl([micro_batches(weighted(bad)), micro_batches(weighted(bad)), good], 1e-3)
    assert (several.applied, several.bad_updates) == (True, 2)
    assert update(second, bad).bad_updates == 1


@pytest.mark.parametrize("zero", [0, 3])
def test_micro_batches_without_a_token_to_train_on_take_part_and_add_nothing(start: Start, zero: int):
    plain, padded = start(zero=zero), start(zero=zero)
    masked = TokenRow("masked", np.arange(5, dtype=np.int32), np.zeros(5, np.bool_))
    rows = weighted(ROWS)
    plain.train_rl([[rows]], 1e-3)
    padded.train_rl([[[], rows, [masked]]], 1e-3)
    assert largest_difference(gradients(plain), gradients(padded)) < 1e-6


def test_a_folder_without_a_model_is_refused(start: Start, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--model"):
        start(model=tmp_path)


def test_a_separate_head_under_a_config_that_ties_it_is_refused(start: Start, tmp_path: Path):
    """transformers would train both, and engines would serve the embeddings alone."""
    from safetensors.numpy import load_file, save_file

    folder = save_policy(tmp_path, num_hidden_layers=1)
    saved = load_file(folder / "model.safetensors")
    head = saved["model.embed_tokens.weight"].copy()
    save_file(saved | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    rank = start(model=folder)
    assert "lm_head.weight" not in rank.state.shapes
    rank.set_policy(folder)
    save_file(saved | {"lm_head.weight": 2 * head}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"--model: .*ties the output head.*tie_word_embeddings to false"):
        start(model=folder)


# ---------------------------------------------------------------- out and in


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0), (1, 3)])
def test_a_run_that_resumes_from_a_checkpoint_is_the_run_that_never_stopped(
    start: Start, saved_by: int, loaded_by: int, tmp_path: Path
):
    import torch

    first = start(zero=saved_by)
    update(first)
    first.save_checkpoint(tmp_path, {"note": [1, 2]})  # a copy, which an update does not change
    draw = torch.rand(3).tolist(), np.random.random(3).tolist()
    update(first)
    first.written()

    second = start(zero=loaded_by, seed=9)
    assert second.load_checkpoint(tmp_path) == {"note": [1, 2]}
    assert (torch.rand(3).tolist(), np.random.random(3).tolist()) == draw
    update(second)
    assert (second.step, second.calls) == (first.step, first.calls)
    allowed = 0.0 if saved_by == loaded_by else 1e-6
    assert largest_difference(weights(first), weights(second)) <= allowed


def test_a_checkpoint_can_be_taken_before_the_first_update(start: Start, tmp_path: Path):
    first, second = start(zero=1), start(zero=1)
    first.save_checkpoint(tmp_path, {})
    first.written()
    second.load_checkpoint(tmp_path)
    update(first)
    update(second)
    assert largest_difference(weights(first), weights(second)) == 0.0


def test_a_checkpoint_of_another_architecture_is_refused_with_both_names(start: Start, tmp_path: Path):
    other = start(model=save_policy(tmp_path / "other", num_hidden_layers=2))
    other.save_checkpoint(tmp_path / "saved", {})
    other.written()
    rank = start()
    before = weights(rank)
    with pytest.raises(ConfigError, match=r"layers 2.*layers 3"):
        rank.load_checkpoint(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"other.*layers 3"):
        rank.set_policy(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot read"):
        rank.load_checkpoint(tmp_path / "nowhere")
    assert largest_difference(before, weights(rank)) == 0.0


@pytest.mark.parametrize("zero", [0, 3])
def test_the_exported_folder_is_one_that_transformers_loads_with_equal_weights(
    start: Start, zero: int, folder: Path, tmp_path: Path
):
    import torch
    import transformers

    (folder / "tokenizer_config.json").write_text("{}")
    generation = folder / "generation_config.json"
    usual, odd = generation.read_text(), '{"eos_token_id": [1, 2], "temperature": 0.6}'  # loaded, but refused if saved
    generation.write_text(odd)
    rank = start(zero=zero)
    update(rank)
    rank.export(tmp_path / "model")
    assert tmp_path / "model" / "config.json" in rank.written()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), rank.state.get(name), rtol=0, atol=0)
    assert (tmp_path / "model" / "generation_config.json").read_text() == odd
    assert (tmp_path / "model" / "tokenizer_config.json").is_file()
    generation.write_text(usual)
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("zero", ZERO)
def test_weights_taken_over_and_a_fresh_optimizer_make_a_fresh_learner(start: Start, zero: int, tmp_path: Path):
    other = save_policy(tmp_path / "other", seed=5)
    rank, fresh = start(zero=zero), start(zero=zero, model=other)
    update(rank)
    rank.set_policy(other)
    rank.reset_optimizer()
    assert checksum(rank.served_weights().on_host()) == checksum(fresh.served_weights().on_host())
    update(rank)
    update(fresh)
    assert largest_difference(weights(rank), weights(fresh)) == 0.0


@pytest.mark.parametrize(("zero", "bucket_bytes"), [(0, 2**28), (1, 300_000), (3, 1), (3, 300_000)])
def test_what_is_published_is_every_weight_once_in_buckets(start: Start, zero: int, bucket_bytes: int):
    rank = start(zero=zero)
    buckets = list(
        ServedWeights(rank.state.served_entries, rank.state.served, bucket_bytes, everywhere=False).on_host()
    )
    assert all(bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1 for bucket in buckets)
    published = {parameter.name: parameter.array for parameter in unpack(buckets)}
    assert published.keys() == rank.state.shapes.keys()
    for name, array in published.items():
        np.testing.assert_array_equal(array, rank.state.get(name).numpy())


# ---------------------------------------------------------------- precision, memory


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_bfloat16_keeps_float32_master_weights_and_publishes_bfloat16(start: Start, zero: int, tmp_path: Path):
    rank = start(zero=zero, dtype="bfloat16")
    before = weights(rank)
    assert update(rank, lr=1e-6).applied
    assert 0 < largest_difference(before, weights(rank)) < 2e-6  # finer than bfloat16 can hold
    assert {entry.dtype for bucket in rank.served_weights().on_host() for entry in bucket.entries} == {"bfloat16"}
    rank.save_checkpoint(tmp_path, {})
    rank.written()
    second = start(zero=zero, dtype="bfloat16")
    second.load_checkpoint(tmp_path)
    assert largest_difference(weights(rank), weights(second)) == 0.0
    assert checksum(rank.served_weights().on_host()) == checksum(second.served_weights().on_host())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_offloaded_optimizer_state_gives_the_same_update(start: Start, zero: int):
    plain, offloaded = start(zero=zero), start(zero=zero, offload=True)
    update(plain)
    update(offloaded)
    # One rounding of float32 at 1, the largest weights: how DeepSpeed's Adam rounds depends on the CPU's instructions.
    assert largest_difference(weights(plain), weights(offloaded)) <= 2**-23


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_memory_stays_flat_over_a_thousand_steps(start: Start, zero: int):
    rank = start(zero=zero)
    rows = draw_rows(4, low=8, high=24)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    for _ in range(200):
        update(rank, rows)
    before = resident_bytes()
    for _ in range(1_000):
        update(rank, rows)
    assert (resident_bytes() - before) / 10 < 2**20
