"""GPUs: memory, bandwidth, matrix rate and link rates, each with its source.

Rates are the vendor's peaks: an upper bound that no program reaches, good for comparing a
measurement with. Matrix rates are dense: most data sheets print twice as much, "with sparsity",
which training does not use.

Only the standard library is imported: the command line, the notebooks and the calculator page
run this file unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.errors import InputError, did_you_mean
from utils.units import GB, MIB, TERA


class HardwareError(InputError):
    """The GPU is not in the table."""


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU of one kind. Sizes are bytes, rates bytes per second or FLOP per second."""

    name: str
    cuda_names: tuple[str, ...]  # what torch.cuda.get_device_name() calls it
    # What CUDA reports as total (torch.cuda.mem_get_info()[1], "total capacity" in an
    # out-of-memory message). It is less than the name says, because the driver and error
    # correction take their share, and moves by up to 1 % between drivers: the smallest seen
    # in public logs.
    memory_bytes: int
    memory_bandwidth: int
    bf16_flops: int | None  # dense, accumulated in fp32; None: its tensor cores have no bf16
    nvlink_bandwidth: int | None  # to the other GPUs together, one way; None: no NVLink
    pcie_bandwidth: int  # to the host, one way
    source: str  # of the rates: the vendor's data sheet or architecture white paper


# Data sheets print what NVLink and PCIe carry both ways together.
def _one_way(both_ways_gb_per_s: int) -> int:
    return both_ways_gb_per_s * GB // 2


_PCIE_3 = _one_way(32)
_PCIE_4 = _one_way(64)
_PCIE_5 = _one_way(128)

_AMPERE_WHITE_PAPER = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
)
_A100_DATA_SHEET = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100_DATA_SHEET = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"

_GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="t4",
            cuda_names=("Tesla T4",),
            memory_bytes=14930 * MIB,
            memory_bandwidth=320 * GB,
            bf16_flops=None,
            nvlink_bandwidth=None,
            pcie_bandwidth=_PCIE_3,
            source="https://www.nvidia.com/en-us/data-center/tesla-t4/",
        ),
        GPU(
            name="v100-32gb",
            cuda_names=("Tesla V100-SXM2-32GB",),
            memory_bytes=32494 * MIB,
            memory_bandwidth=900 * GB,
            bf16_flops=None,
            nvlink_bandwidth=_one_way(300),
            pcie_bandwidth=_PCIE_3,
            source=(
                "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
            ),
        ),
        GPU(
            name="rtx-3090",
            cuda_names=("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
            memory_bytes=24259 * MIB,
            memory_bandwidth=936 * GB,
            bf16_flops=71 * TERA,
            nvlink_bandwidth=112_500_000_000 // 2,  # through the bridge for two cards
            pcie_bandwidth=_PCIE_4,
            source=("https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"),
        ),
        GPU(
            name="rtx-4090",
            cuda_names=("NVIDIA GeForce RTX 4090",),
            memory_bytes=24081 * MIB,
            memory_bandwidth=1008 * GB,
            bf16_flops=165_200 * 10**9,
            nvlink_bandwidth=None,
            pcie_bandwidth=_PCIE_4,
            source=("https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"),
        ),
        GPU(
            name="l40s",
            cuda_names=("NVIDIA L40S",),
            memory_bytes=45589 * MIB,
            memory_bandwidth=864 * GB,
            bf16_flops=362_050 * 10**9,
            nvlink_bandwidth=None,
            pcie_bandwidth=_PCIE_4,
            source="https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
        ),
        GPU(
            name="a100-40gb",
            cuda_names=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
            memory_bytes=40339 * MIB,
            memory_bandwidth=1555 * GB,
            bf16_flops=312 * TERA,
            nvlink_bandwidth=_one_way(600),
            pcie_bandwidth=_PCIE_4,
            source=_AMPERE_WHITE_PAPER,
        ),
        GPU(
            name="a100-80gb",
            cuda_names=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
            memory_bytes=81038 * MIB,
            memory_bandwidth=2039 * GB,
            bf16_flops=312 * TERA,
            nvlink_bandwidth=_one_way(600),
            pcie_bandwidth=_PCIE_4,
            source=_A100_DATA_SHEET,
        ),
        GPU(
            name="a100-80gb-pcie",
            cuda_names=("NVIDIA A100 80GB PCIe",),
            memory_bytes=81049 * MIB,
            memory_bandwidth=1935 * GB,
            bf16_flops=312 * TERA,
            nvlink_bandwidth=_one_way(600),  # through the bridge for two cards
            pcie_bandwidth=_PCIE_4,
            source=_A100_DATA_SHEET,
        ),
        GPU(
            name="h100-80gb",
            cuda_names=("NVIDIA H100 80GB HBM3",),
            memory_bytes=81008 * MIB,
            memory_bandwidth=3350 * GB,
            bf16_flops=1979 * TERA // 2,
            nvlink_bandwidth=_one_way(900),
            pcie_bandwidth=_PCIE_5,
            source=_H100_DATA_SHEET,
        ),
        GPU(
            name="h100-80gb-pcie",
            cuda_names=("NVIDIA H100 PCIe",),
            memory_bytes=81008 * MIB,
            memory_bandwidth=2000 * GB,
            bf16_flops=1513 * TERA // 2,
            nvlink_bandwidth=_one_way(600),  # through the bridge for two cards
            pcie_bandwidth=_PCIE_5,
            source=_H100_DATA_SHEET,
        ),
        GPU(
            name="h200",
            cuda_names=("NVIDIA H200",),
            memory_bytes=143156 * MIB,
            memory_bandwidth=4800 * GB,
            bf16_flops=1979 * TERA // 2,
            nvlink_bandwidth=_one_way(900),
            pcie_bandwidth=_PCIE_5,
            source=(
                "https://resources.nvidia.com/en-us-data-center-overview-mc/"
                "en-us-data-center-overview/hpc-datasheet-sc23-h200"
            ),
        ),
        GPU(
            name="b200",
            cuda_names=("NVIDIA B200",),
            memory_bytes=182631 * MIB,
            memory_bandwidth=8000 * GB,
            bf16_flops=2250 * TERA,
            nvlink_bandwidth=_one_way(1800),
            pcie_bandwidth=_PCIE_5,  # of the DGX B200's processors
            source="https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet",
        ),
    )
}


def names() -> tuple[str, ...]:
    """The GPUs of the table: for inference and desktops first, then for training, older before newer."""
    return tuple(_GPUS)


def get(name: str) -> GPU:
    """The GPU of that name. Raises HardwareError, with the nearest names, for any other.

    >>> get("h200").memory_bandwidth
    4800000000000
    """
    if name not in _GPUS:
        known = ", ".join(_GPUS)
        hint = did_you_mean(str(name), _GPUS)
        raise HardwareError(f"gpu: {name!r} is unknown{hint}; allowed: {known}")
    return _GPUS[name]


def match(cuda_device_name: str) -> GPU | None:
    """The entry for what `torch.cuda.get_device_name()` returned, or None for another GPU.

    The whole name has to match: a variant (PCIe, laptop, MIG slice, 96 GB) has other numbers.

    >>> match("NVIDIA H200").name
    'h200'
    >>> match("NVIDIA H200 NVL") is None
    True
    """
    for gpu in _GPUS.values():
        if cuda_device_name in gpu.cuda_names:
            return gpu
    return None
