"""The steps of the first GPU hour (`benchmarks.gpu_first_hour`); each prints its figures as a last line of JSON.

python -m benchmarks.gpu_steps policy --shape 0.6B

On a CPU (`--device cpu --shape tiny`) the same code runs, except that memory is not measured.
"""

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.learner import attention_kernels
from actors.learner.row_attention import Heads, attend
from benchmarks.gpu_first_hour import Figure
from benchmarks.small import SMALL
from rstar_ray.algorithm.batch import TokenRow, collate
from rstar_ray.algorithm.loss import token_logprobs
from rstar_ray.algorithm.state_bytes import rank_bytes
from rstar_ray.config import RunConfig, with_values
from scheduler.planner.capacity import activations_gb, logits_gb
from scheduler.planner.gpus import EXPECTED, Gpu, known_gpu
from scheduler.planner.model_shape import GB, ModelShape, read_model
from scheduler.planner.step_time import PASSES, decode_step_s, device_load_gb_s, trained_token_s

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 512},
    "0.6B": {"hidden_size": 1_024, "intermediate_size": 3_072, "num_hidden_layers": 28, "vocab_size": 151_936},
    "1.7B": {"hidden_size": 2_048, "intermediate_size": 6_144, "num_hidden_layers": 28, "vocab_size": 151_936},
}
"""Shapes of Qwen3, with random weights."""
BUCKETS = 3
ROUNDS = 20
LEAK_BYTES = 16 * 2**20
STEPS_BEFORE_STOP, STEPS_OF_STAGE_1 = 3, 12
STOPPED = 130  # a recipe's exit status after a requested stop
WORKSPACE_GB = 0.27  # of cuBLAS or hipBLASLt in two threads


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, model shape and folders of a step."""

    device: torch.device
    shape: str
    folder: Path  # temporary files, removed at the end
    out: Path  # files for later steps

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch."""
        return 16_384 if self.on_gpu else 512

    def gpu(self) -> Gpu | None:
        """The planner's record of this GPU; None if it is not known."""
        return known_gpu(torch.cuda.get_device_name(self.device)) if self.on_gpu else None

    def model(self) -> Path:
        """A folder with random weights of this shape."""
        from actors.weights.random_weights import write_random_weights

        config = {
            **SHAPES[self.shape], "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32 if self.shape == "tiny" else 128,
            "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 0,
            "dtype": str(self.dtype).removeprefix("torch."),
        }  # fmt: skip
        path = self.folder / "model"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        write_random_weights(path, self.dtype)
        return path

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


# ---------------------------------------------------------------- kernels, log-probs


def kernels(setting: Setting) -> list[Figure]:
    """Compare values and gradients of packed rows with a dense mask; then run a hundred row lengths, as in training."""
    attention_kernels.choose(setting.device)
    generator = torch.Generator(setting.device).manual_seed(0)
    worst = 0.0
    for heads, kv_heads, window in ((16, 8, None), (8, 8, None), (16, 8, 64)):
        lengths = (5, 129, 129, 1, 300)
        parts = [_heads(number, sum(lengths), generator, setting) for number in (heads, kv_heads, kv_heads)]
        found = attend(Heads(*parts), row_lengths=lengths, sliding_window=window)
        expected = dense(parts, lengths, window)
        direction = torch.randn(found.shape, generator=generator, device=setting.device, dtype=torch.float32)
        gradients = zip(
            torch.autograd.grad((found.float() * direction).sum(), parts),
            torch.autograd.grad((expected * direction).sum(), parts),
            strict=True,
        )
        worst = max([worst, _error(found, expected), *(_error(one, other) for one, other in gradients)])
    tolerance = 0.03 if setting.dtype == torch.bfloat16 else 1e-4
    assert worst < tolerance, f"attention differs from a dense reference by {worst:.3g} (at most {tolerance})"
    lengths = tuple(range(64, 164)) if setting.on_gpu else (8, 9, 10)
    parts = [_heads(number, sum(lengths), generator, setting) for number in (16, 8, 8)]
    seconds: list[float] = []
    for turn in range(4):
        rows = lengths[turn:] + lengths[:turn]  # another order each time
        setting.wait()
        started = time.perf_counter()
        attend(Heads(*parts), row_lengths=rows).float().sum().backward()
        setting.wait()
        seconds.append(time.perf_counter() - started)
    return [
        Figure("largest difference from a dense reference", worst, "", tolerance),
        Figure(f"{len(lengths)} row lengths, first time", 1e3 * seconds[0], "ms"),
        Figure(f"{len(lengths)} row lengths, then", 1e3 * min(seconds[1:]), "ms"),
    ]


def _heads(number: int, tokens: int, generator: torch.Generator, setting: Setting) -> Tensor:
    shape, dim = (1, number, tokens), 64 if setting.on_gpu else 16
    drawn = torch.randn((*shape, dim), generator=generator, device=setting.device, dtype=setting.dtype)
    return drawn.requires_grad_()


def dense(parts: Sequence[Tensor], lengths: Sequence[int], window: int | None) -> Tensor:
    """Softmax attention with an explicit mask, in float32: [1, T, H, D]."""
    query, key, value = (part.float() for part in parts)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    place = torch.arange(query.shape[2], device=query.device)
    behind = place[:, None] - place[None, :]
    seen = (row[:, None] == row[None, :]) & (behind >= 0) & (behind < (window or len(place) + 1))
    scores = (query @ key.transpose(2, 3) / query.shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the reference's largest value."""
    difference, scale = found.detach().float() - expected.detach().float(), expected.detach().float().abs().max()
    return float(difference.abs().max() / scale)


def log_probs(setting: Setting) -> list[Figure]:
    """Compare log-probs in chunks with unchunked ones, and measure a chunk's memory."""
    vocabulary, chunk, tokens = (151_936, 512, 2_048) if setting.on_gpu else (1_000, 32, 128)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 64, device=setting.device, dtype=setting.dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device=setting.device, dtype=setting.dtype, requires_grad=True)
    targets = torch.arange(tokens, device=setting.device) % vocabulary
    before = _memory(setting, reset=True)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_tokens=chunk, temperature=1.0)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    peak_gb = _memory(setting) - before
    with torch.no_grad():
        logits = (hidden[:256] @ weight.T).float()
        whole = logits.log_softmax(-1).gather(-1, targets[:256, None])[:, 0]
    difference = float((logprobs.detach()[:256] - whole).abs().max())
    tolerance = 0.05 if setting.dtype == torch.bfloat16 else 1e-3
    assert difference < tolerance, f"chunked log-probs differ by {difference:.3g} (at most {tolerance})"
    figures = [Figure("largest difference from whole log-probs", difference, "nat", tolerance)]
    if setting.on_gpu:
        figures.append(Figure("peak memory", peak_gb, "GB", logits_gb(vocabulary, chunk)))
    return figures


def _memory(setting: Setting, *, reset: bool = False) -> float:
    """Peak memory since the last reset [GB]; with `reset` the current memory."""
    if not setting.on_gpu:
        return 0.0
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / GB
    return torch.cuda.max_memory_allocated() / GB


# ---------------------------------------------------------------- the learner


def drawn_rows(setting: Setting, micro_batches: int, vocabulary: int) -> list[list[TokenRow]]:
    """Packed micro batches of rows of log-normal length; all tokens of a row but the first 20 are sampled."""
    rng = np.random.default_rng(0)
    batches: list[list[TokenRow]] = []
    for number in range(micro_batches):
        left, rows = setting.tokens, list[TokenRow]()
        while left >= 64:
            length = min(left, int(np.exp(rng.normal(np.log(setting.tokens / 8), 0.6)).clip(64, setting.tokens / 2)))
            left -= length
            ids = rng.integers(0, vocabulary, length).astype(np.int32)
            mask, logprobs = np.arange(length) >= 20, np.full(length, -8.0, np.float32)
            rows.append(TokenRow(f"row-{number}-{len(rows)}", ids, mask, float(rng.normal()), logprobs))
        batches.append(rows)
    count = sum(row.num_sampled_tokens for rows in batches for row in rows)
    return [[replace(row, token_weight=1.0 / count) for row in rows] for rows in batches]


def speed(tokens: int, seconds: float, model: ModelShape, setting: Setting) -> list[Figure]:
    """Tokens/s, and MFU: 6 FLOPs per parameter and token over the peak, without recomputation."""
    rate, gpu = tokens / seconds, setting.gpu()
    if gpu is None:
        return [Figure("tokens", rate, "1/s")]
    peak = gpu.tflops * 1e12
    planned = 1 / trained_token_s(model, gpu, EXPECTED, [setting.tokens // 8], fused=False, passes=PASSES)
    flops = 6 * model.parameters
    return [Figure("tokens", rate, "1/s", planned), Figure("MFU", flops * rate / peak, "", flops * planned / peak)]


def policy(setting: Setting) -> list[Figure]:
    """Forward and backward of one micro batch, with activation checkpointing."""
    from actors.learner.policy import Policy, load_language_model

    folder, config = setting.model(), learner_config(setting)
    attention_kernels.choose(setting.device)
    language_model = load_language_model(folder, config.learner)
    language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = Policy(language_model, config.learner.logprob_chunk_tokens).to(setting.device).train()
    model = read_model(folder / "config.json")
    (rows,) = drawn_rows(setting, 1, SHAPES[setting.shape]["vocab_size"])
    batch = collate(rows, packed=True).to(setting.device)
    _memory(setting, reset=True)
    seconds: list[float] = []
    for _ in range(4):
        trained.zero_grad()
        setting.wait()
        started = time.perf_counter()
        logprobs_N, _ = trained(batch, 1.0)
        (-(logprobs_N * batch.weights_N).sum()).backward()
        setting.wait()
        seconds.append(time.perf_counter() - started)
    assert all(bool(p.grad.isfinite().all()) for p in trained.parameters() if p.grad is not None)
    figures = speed(batch.num_input_tokens, min(seconds[1:]), model, setting)
    if setting.on_gpu:
        planned = 2 * model.weights_gb + activations_gb(model, setting.tokens) + WORKSPACE_GB
        figures.append(Figure("peak memory", _memory(setting), "GB", planned))
    return figures


def learner_config(setting: Setting) -> RunConfig:
    return with_values(
        SMALL,
        {
            "learner.gpus_per_rank": 1.0 if setting.on_gpu else 0.0,
            "learner.dtype": "bfloat16" if setting.on_gpu else "float32",
            "learner.zero": 3,
            "learner.activation_checkpointing": True,
            "learner.micro_batch_tokens": setting.tokens,
            "rollout.max_response_tokens": 1_024,
        },
    )


def learner(setting: Setting) -> list[Figure]:
    """Three updates with ZeRO-3, then a checkpoint, another update, and loading of the checkpoint."""
    from actors.learner.rank import LearnerRank

    folder = setting.model()
    rank = LearnerRank(learner_config(setting), folder)
    rank.start()
    model = read_model(folder / "config.json")
    work = drawn_rows(setting, 4, SHAPES[setting.shape]["vocab_size"])
    held_gb = _memory(setting, reset=True)
    seconds: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        result = rank.train_rl([work], 1e-5)
        setting.wait()
        seconds.append(time.perf_counter() - started)
        assert result.applied, result.reason
    tokens = sum(len(row.token_ids) for rows in work for row in rows)
    figures = speed(tokens, min(seconds[1:]), model, setting)
    if setting.on_gpu:
        peak_gb, held_gb = _memory(setting), torch.cuda.memory_allocated() / GB
        state = rank_bytes(rank.facts().num_parameters, dtype="bfloat16", zero=3, ranks=1)
        planned = (state.state + state.bucket) / GB
        figures += [
            Figure("held between updates", held_gb, "GB", planned + WORKSPACE_GB),
            Figure("peak memory", peak_gb, "GB", planned + WORKSPACE_GB + activations_gb(model, setting.tokens)),
        ]
        assert held_gb < 1.1 * planned + 2 * WORKSPACE_GB, f"{held_gb:.2f} GB held, {planned:.2f} planned"
    saved, started = setting.folder / "checkpoint", time.perf_counter()
    saved.mkdir()
    rank.save_checkpoint(saved, {})
    rank.written()
    figures.append(Figure("checkpoint written in", time.perf_counter() - started, "s"))
    size_gb = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) / GB
    figures.append(Figure("checkpoint", size_gb, "GB", 12 * rank.facts().num_parameters / GB))
    before = rank.logprobs(work[:1])
    rank.train_rl([work], 1e-3)
    rank.load_checkpoint(saved)
    after = rank.logprobs(work[:1])
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "not as it was saved"
    rank.close()
    return figures


# ---------------------------------------------------------------- weights between processes


def reader(calls: Any) -> None:
    """The engine's process: vLLM opens a buffer and copies it; returns the copy's checksum."""
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter, packed_ipc_consumer

    from actors.weights.buckets import WeightEntry
    from actors.weights.ipc import layout, opening
    from actors.weights.tensors import sum_of_tensor

    device, importer = torch.cuda.current_device(), PackedBufferImporter()
    while (handle := calls.recv()) is not None:
        if handle == "close":
            importer.close()
            calls.send(0)
            continue
        whole: dict[str, Any] = layout([WeightEntry("all", (handle["num_bytes"],), "uint8", 0)])
        ((_, copied),) = packed_ipc_consumer(opening(handle), device_index=device, importer=importer, **whole)
        calls.send(sum_of_tensor(copied))


def ipc(setting: Setting) -> list[Figure]:
    """Send a buffer to another process, three times per version, for twenty versions, without a memory leak."""
    from actors.weights.ipc import CudaExporter
    from actors.weights.tensors import sum_of_tensor

    assert setting.on_gpu, "handles of GPU memory need a GPU"
    spawn = multiprocessing.get_context("spawn")
    calls, theirs = spawn.Pipe()
    other = spawn.Process(target=reader, args=(theirs,), daemon=True)
    other.start()
    num_bytes, free, seconds = 256 * 2**20, 0, 0.0
    for version in range(ROUNDS):
        exporter = CudaExporter()
        room = exporter.room(num_bytes)
        handle = exporter.export(room)
        for _ in range(BUCKETS):
            room.random_(256)
            exporter.ready()
            started = time.perf_counter()
            calls.send(handle)
            found = calls.recv()
            seconds += time.perf_counter() - started
            assert found == sum_of_tensor(room), f"version {version} arrived with other bytes"
        calls.send("close")
        calls.recv()
        del room
        exporter.release()
        torch.cuda.empty_cache()
        if version == 2:  # contexts of the first versions remain
            free, seconds = torch.cuda.mem_get_info()[0], 0.0
    leaked = (free - torch.cuda.mem_get_info()[0]) / (ROUNDS - 3)
    calls.send(None)
    other.join(30)
    assert leaked < LEAK_BYTES / (ROUNDS - 3), f"{leaked / 2**20:.1f} MiB stay behind each version"
    rate = (ROUNDS - 3) * BUCKETS * num_bytes / GB / seconds
    gpu = setting.gpu()
    return [Figure("opened, copied and hashed", rate, "GB/s", device_load_gb_s(gpu, EXPECTED) if gpu else None)]


# ---------------------------------------------------------------- the engine


def engine(setting: Setting) -> list[Figure]:
    """Measure decoding with a full batch."""
    import asyncio

    from actors.generation.engine import Engine
    from rstar_ray.trajectory import UNMODIFIED

    running, tokens = (256, 512) if setting.on_gpu else (8, 16)
    config = with_values(
        SMALL,
        {
            "engine.gpus_per_replica": 1.0 if setting.on_gpu else 0.0,
            "engine.dtype": "bfloat16" if setting.on_gpu else "float32",
            "engine.gpu_memory_share": 0.6,
            "engine.max_running": running,
            "engine.kv_tokens": 0 if setting.on_gpu else 8_192,
        },
    )
    folder = setting.model()
    prompts = np.random.default_rng(0).integers(1, SHAPES[setting.shape]["vocab_size"], (running, 64)).tolist()

    async def measured() -> tuple[int, float, float]:
        one = Engine(config, folder)
        started = time.perf_counter()
        await one.start()
        start_s = time.perf_counter() - started

        async def complete(number: int, seed: int) -> int:
            done = await one.generate(
                prompts[number], request_id=f"r{seed}", max_tokens=tokens, seed=seed, sampling=UNMODIFIED
            )
            return len(done.token_ids)

        try:
            await asyncio.gather(*(complete(number, number) for number in range(min(8, running))))
            started = time.perf_counter()
            counts = await asyncio.gather(*(complete(number, running + number) for number in range(running)))
            return sum(counts), time.perf_counter() - started, start_s
        finally:
            await one.close()

    count, seconds, start_s = asyncio.run(measured())
    planned = None
    if (gpu := setting.gpu()) is not None:
        context = running * (64 + tokens / 2)
        planned = running / decode_step_s(read_model(folder / "config.json"), gpu, EXPECTED, 1, running, context)
    return [Figure("tokens", count / seconds, "1/s", planned), Figure("started in", start_s, "s")]


# ---------------------------------------------------------------- the loop


def recipe(setting: Setting) -> list[str]:
    """The command of stage 1 with the tiny model, which hardly learns: SFT has only three steps."""
    on_gpu = [
        "--engine.gpus-per-replica", "0.5", "--engine.gpu-memory-share", "0.3", "--learner.gpus-per-rank", "0.5",
        "--engine.dtype", "bfloat16", "--learner.dtype", "bfloat16",  # float32 has no fused kernel for GQA
    ] if setting.on_gpu else []  # fmt: skip
    return [
        sys.executable, "recipes/stage1.py", "--scale", "tiny", "--learner.ranks", "1", *on_gpu,
        "--algorithm.no-reject-equal-reward", "--sft.steps", "3", "--steps", str(STEPS_OF_STAGE_1),
        "--evaluate.num-problems", "8", "--run-dir", str(setting.out / "stage1"),
    ]  # fmt: skip


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of stage 1 in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be incomplete
    return [row for row in rows if row["stage"] == "stage1"]


def stage1(setting: Setting) -> list[Figure]:
    """Three steps, then SIGTERM: the run must end with a checkpoint and the status of a requested stop."""
    run_dir = setting.out / "stage1"
    shutil.rmtree(run_dir, ignore_errors=True)
    run = subprocess.Popen(recipe(setting))
    while len(steps_of(run_dir)) < STEPS_BEFORE_STOP and run.poll() is None:
        time.sleep(0.5)
    run.terminate()
    status = run.wait()
    assert status == STOPPED, f"the recipe ended with {status}, not with a requested stop"
    steps = steps_of(run_dir)
    assert list((run_dir / "checkpoints").glob("stage1-*")), "it left no checkpoint"
    figures = [Figure(name, steps[-1][name], "s") for name in ("generate_s", "learn_s", "publish_s", "step_s")]
    return [*figures, Figure("steps", len(steps), "")]


def resume(setting: Setting) -> list[Figure]:
    """The same command again: no step may be repeated or missing."""
    before = steps_of(setting.out / "stage1")
    done = subprocess.run(recipe(setting))
    assert done.returncode == 0, f"the recipe ended with {done.returncode}"
    steps = steps_of(setting.out / "stage1")
    assert [row["step"] for row in steps] == list(range(1, STEPS_OF_STAGE_1 + 1)), [row["step"] for row in steps]
    assert steps[: len(before)] == before, "a step before the checkpoint was repeated"
    return [Figure("steps after the checkpoint", len(steps) - len(before), "")]


BODIES = {
    "kernels": kernels, "log-probs": log_probs, "policy": policy, "learner": learner, "ipc": ipc, "engine": engine,
    "stage1": stage1, "resume": resume,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=list(BODIES))
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu-first-hour"), help="of stage1, which resume continues"
    )
    options = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="gpu-step-") as folder:
        figures = BODIES[options.step](Setting(device, options.shape, Path(folder), options.out.resolve()))
    print(json.dumps({"step": options.step, "figures": [asdict(figure) for figure in figures]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
