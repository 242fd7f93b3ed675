"""Tests all-reduce and memory sharing between two processes of one node, and whether sharing leaks memory.

`probe_pair` starts both; each runs this file. GPUs use NCCL or RCCL and IPC handles, a CPU uses gloo and /dev/shm.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from actors.preflight.facts import Probe

Device = Literal["cpu", "cuda"]

DEADLINE_S = 120.0
ROUNDS = 20
REDUCED_ELEMENTS = 2**20
SHARED_BYTES = 64 * 2**20
CONSEQUENCE = "Connection closed by peer"
"""Part of the error of a process whose partner has failed."""
LEAK_BYTES = 2**20
"""Per round; a smaller loss is attributed to other processes."""


def probe_pair(device: Device) -> tuple[Probe, Probe]:
    """Results of all-reduce and IPC; if a process fails, both results have its last message."""
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        command = [sys.executable, "-m", "actors.preflight.pair", folder, device]
        pair = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + DEADLINE_S
        try:
            outputs = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in pair]
        except subprocess.TimeoutExpired:
            message = f"two processes did not finish in {DEADLINE_S:g} s"
            return Probe(worked=False, message=message), Probe(worked=False, message=message)
        finally:
            for process in pair:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # a process that waits for a hung driver cannot end
                    process.wait(timeout=5)
    return judge_pair(
        [process.returncode for process in pair], [out for out, _ in outputs], [err for _, err in outputs]
    )


def judge_pair(statuses: list[int], outputs: list[str], errors: list[str]) -> tuple[Probe, Probe]:
    """Both results, from the figures in rank 0's output; NCCL_DEBUG adds lines before and after them."""
    if any(statuses):
        last = [error.strip().splitlines()[-1:] for error, status in zip(errors, statuses, strict=True) if status]
        last.sort(key=lambda lines: not lines or CONSEQUENCE in lines[0])
        message = (last[0] or [f"a process ended with {max(statuses, key=abs)}"])[0][:200]
        return Probe(worked=False, message=message), Probe(worked=False, message=message)
    figures = json.loads(next(line for line in outputs[0].splitlines() if line.startswith("{")))
    leaked = figures["leaked_bytes"]
    return (
        Probe(worked=True, message=f"{figures['reduced_gb_s']:.1f} GB/s between two processes"),
        Probe(worked=True, message=f"{ROUNDS} rounds, no leak", leaked_bytes=leaked * (leaked > LEAK_BYTES)),
    )


def run_rank(folder: Path, device: Device, rank: int) -> dict[str, float]:
    """Run one of the two ranks. Raises `ArithmeticError` if a result is wrong."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    alone = device == "cuda" and torch.cuda.device_count() < 2  # NCCL needs one device per rank
    dist.init_process_group(
        "gloo" if device == "cpu" or alone else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    reduced_gb_s = _all_reduce("cpu" if alone else device, rank)
    hands = dist.new_group(backend="gloo")
    leaked = _ipc(rank, hands) if device == "cuda" else _through_files(folder.name, rank, hands)
    dist.destroy_process_group()
    return {"reduced_gb_s": reduced_gb_s, "leaked_bytes": leaked}


def _all_reduce(device: Device, rank: int) -> float:
    """The best rate in GB/s, without the first round, which includes set-up."""
    import torch
    import torch.distributed as dist

    seconds: list[float] = []
    for _ in range(4):
        numbers = torch.full((REDUCED_ELEMENTS,), float(rank + 1), device=device)
        started = time.perf_counter()
        dist.all_reduce(numbers)
        total = float(numbers.sum())  # waits for the device
        seconds.append(time.perf_counter() - started)
        if total != 3.0 * REDUCED_ELEMENTS:
            raise ArithmeticError(f"an all-reduce of {REDUCED_ELEMENTS} ones and twos gave {total}")
    return REDUCED_ELEMENTS * 4 / min(seconds[1:]) / 1e9


def _ipc(rank: int, hands: Any) -> float:
    """Bytes of device memory leaked per round."""
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    from actors.weights.ipc import CudaExporter

    free = 0
    for number in range(ROUNDS + 1):
        if number == 1:  # contexts created in the first round are not a leak
            free = torch.cuda.mem_get_info()[0]
        mine = CudaExporter().room(SHARED_BYTES).view(torch.int32).fill_(number) if rank == 0 else None
        handle = [reduce_tensor(mine) if mine is not None else None]
        dist.broadcast_object_list(handle, src=0, group=hands)
        if rank == 1 and handle[0] is not None:
            opened = handle[0][0](*handle[0][1])
            if int(opened.max()) != number:
                raise ArithmeticError(f"an opened handle of round {number} holds {int(opened.max())}")
            del opened
        del handle
        dist.barrier(group=hands)
        del mine
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        dist.barrier(group=hands)
    return max(0.0, (free - torch.cuda.mem_get_info()[0]) / ROUNDS)


def _through_files(name: str, rank: int, hands: Any) -> float:
    """Share memory through /dev/shm, as CPU engines receive weights; returns 0 leaked bytes."""
    import torch.distributed as dist

    path = Path("/dev/shm") / name
    try:
        for number in range(ROUNDS):
            if rank == 0:
                path.write_bytes(bytes([number]) * 2**20)
            dist.barrier(group=hands)
            if rank == 1:
                with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as opened:
                    if opened[-1] != number:
                        raise ArithmeticError(f"a shared page of round {number} holds {opened[-1]}")
            dist.barrier(group=hands)
    finally:
        if rank == 0:  # rank 1 no longer uses it after the last barrier
            path.unlink(missing_ok=True)
    return 0.0


def main() -> int:
    folder, device, rank = sys.argv[1:]
    print(json.dumps(run_rank(Path(folder), "cuda" if device == "cuda" else "cpu", int(rank))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
