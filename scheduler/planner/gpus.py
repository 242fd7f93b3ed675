"""GPUs by their data sheets, and the shares of peak performance that the planner assumes. Nothing here is measured.

GB are 1e9 bytes. A card sold as 80 GB reports 85e9 bytes; the difference is a reserve.
"""

from dataclasses import dataclass, replace

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of peak performance, and times that software adds; each has a range, none is fitted to a step's total.

    Streaming and collective kernels reach 0.75 to 0.9 of a link or of memory in vendors' tests (STREAM, nccl-tests,
    rccl-tests); paged attention reads smaller pieces. Software's times are guesses of the order of magnitude.
    """

    decode_bandwidth: float = 0.6  # of memory bandwidth, by decode: weights and paged KV
    stream_bandwidth: float = 0.75  # of memory bandwidth, by element-wise kernels
    matmul: float = 1.0  # of `Gpu.matmul_tflops`
    attention: float = 0.6  # of the rate of matrix products, by attention forward and backward
    links: float = 0.75  # of NVLink, xGMI, PCIe and of the network, by collectives
    hidden: float = 0.5  # of ZeRO's traffic, overlapped with computation
    launch_s: float = 2e-3  # of a decode step: scheduling, launches, sampling
    bucket_s: float = 0.025  # per bucket of a publish: one round of calls between rank and engine
    rollout_s: float = 1.5e-3  # per rollout on the head: resampling, rows, metrics, records
    wake_s: float = 2.0  # to wake an engine: pages mapped again, prefix cache emptied


EXPECTED = Shares()
OPTIMISTIC = Shares(
    decode_bandwidth=0.7, stream_bandwidth=0.85, matmul=1.1, attention=0.75, links=0.85, hidden=0.75,
    launch_s=1e-3, bucket_s=0.015, rollout_s=0.75e-3, wake_s=1.0,
)  # fmt: skip
PESSIMISTIC = Shares(
    decode_bandwidth=0.5, stream_bandwidth=0.65, matmul=0.75, attention=0.45, links=0.6, hidden=0.25,
    launch_s=4e-3, bucket_s=0.04, rollout_s=3e-3, wake_s=5.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU in a node of eight; peaks from its data sheet (MI300X by default)."""

    name: str = "mi300x"
    memory_gb: float = 192.0  # as sold
    bandwidth_tb_s: float = 5.3
    tflops: float = 1_307.0  # dense bf16
    matmul_share: float = 0.45  # of `tflops`, by large products under the power limit; AMD's libraries reach less
    links_gb_s: float = 448.0  # to the node's other GPUs together, in one direction
    host_gb_s: float = 64.0  # to the host, in one direction (PCIe 5.0 x16)
    network_gb_s: float = 50.0  # to other nodes: one 400 Gbit/s adapter per GPU
    runtime_share: float = 0.08  # of memory: contexts, communication buffers, fragmentation

    @property
    def matmul_tflops(self) -> float:
        return self.tflops * self.matmul_share

    def between_gb_s(self, gpus: int) -> float:
        """Bandwidth per GPU of the slowest link of a collective over this many GPUs."""
        return self.links_gb_s if gpus <= GPUS_PER_NODE else min(self.links_gb_s, self.network_gb_s)


H100 = Gpu(name="h100", memory_gb=80.0, bandwidth_tb_s=3.35, tflops=989.0, matmul_share=0.7, links_gb_s=450.0)
GPUS = {
    "mi300x": Gpu(),
    "mi325x": Gpu(name="mi325x", memory_gb=256.0, bandwidth_tb_s=6.0),
    "b200": Gpu(
        name="b200", memory_gb=180.0, bandwidth_tb_s=7.7, tflops=2_250.0, matmul_share=0.65, links_gb_s=900.0
    ),
    "h200": replace(H100, name="h200", memory_gb=141.0, bandwidth_tb_s=4.8),
    "h100": H100,
    "a100": Gpu(
        name="a100", memory_gb=80.0, bandwidth_tb_s=2.0, tflops=312.0, matmul_share=0.75, links_gb_s=300.0,
        host_gb_s=32.0, network_gb_s=25.0,
    ),
    "l40s": Gpu(
        name="l40s", memory_gb=48.0, bandwidth_tb_s=0.86, tflops=362.0, matmul_share=0.6, links_gb_s=32.0,
        host_gb_s=32.0, network_gb_s=25.0,
    ),
    "rtx4090": Gpu(
        name="rtx4090", memory_gb=24.0, bandwidth_tb_s=1.01, tflops=165.0, matmul_share=0.8, links_gb_s=32.0,
        host_gb_s=32.0, network_gb_s=12.5,
    ),
}  # fmt: skip
"""SXM modules (AMD: OAM) with one network adapter each, and cards of 24 and 48 GB. Data sheets: AMD Instinct MI300X and
MI325X; NVIDIA B200 (HGX), H100, H200, A100 and L40S; NVIDIA Ada architecture (bf16 with float32 accumulation)."""


def known_gpu(device_name: str) -> Gpu | None:
    """The GPU with this name in torch (`torch.cuda.get_device_name`); None if it is not in the table.

    >>> known_gpu("NVIDIA H100 80GB HBM3").name, known_gpu("NVIDIA GeForce RTX 4090").name, known_gpu("Tesla T4")
    ('h100', 'rtx4090', None)
    """
    squeezed = device_name.lower().replace(" ", "")
    return next((gpu for name, gpu in GPUS.items() if name in squeezed), None)


def nearest_gpu(memory_gb: float) -> Gpu:
    """The GPU in the table that is closest in memory, with this much memory.

    >>> [nearest_gpu(memory_gb).name for memory_gb in (24.0, 80.0, 141.0, 192.0)]
    ['rtx4090', 'h100', 'h200', 'mi300x']
    """
    nearest = min(GPUS.values(), key=lambda gpu: abs(gpu.memory_gb - memory_gb))
    return replace(nearest, memory_gb=memory_gb)
