"""utils.hardware: the table against the data sheets, and look-up by both kinds of name."""

import doctest

import pytest

from utils import hardware
from utils.units import GB, GIB, TERA

# What the data sheet of each GPU prints: memory bandwidth in GB/s; bf16 TFLOP/s without sparsity
# (half of the figure "with sparsity" where only that is printed); NVLink and PCIe in GB/s, both
# ways together. Written out a second time so that a slip in the table shows.
DATA_SHEETS = {
    "t4": (320, None, None, 32),
    "v100-32gb": (900, None, 300, 32),
    "rtx-3090": (936, 71, 112.5, 64),
    "rtx-4090": (1008, 165.2, None, 64),
    "l40s": (864, 362.05, None, 64),
    "a100-40gb": (1555, 312, 600, 64),
    "a100-80gb": (2039, 312, 600, 64),
    "a100-80gb-pcie": (1935, 312, 600, 64),
    "h100-80gb": (3350, 1979 / 2, 900, 128),
    "h100-80gb-pcie": (2000, 1513 / 2, 600, 128),
    "h200": (4800, 1979 / 2, 900, 128),
    "b200": (8000, 2250, 1800, 128),
}

# Out-of-memory messages print "total capacity of ... GiB".
CAPACITY_GIB = {
    "t4": 14.58,
    "v100-32gb": 31.73,
    "rtx-3090": 23.69,
    "rtx-4090": 23.52,
    "l40s": 44.52,
    "a100-40gb": 39.39,
    "a100-80gb": 79.14,
    "a100-80gb-pcie": 79.15,
    "h100-80gb": 79.11,
    "h100-80gb-pcie": 79.11,
    "h200": 139.80,
    "b200": 178.35,
}


def test_doctests():
    results = doctest.testmod(hardware)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_gpu_is_checked_here():
    assert set(hardware.names()) == set(DATA_SHEETS) == set(CAPACITY_GIB)


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_rates_are_those_of_the_data_sheet(name):
    memory, bf16, nvlink, pcie = DATA_SHEETS[name]
    gpu = hardware.get(name)
    assert gpu.memory_bandwidth == memory * GB
    assert gpu.bf16_flops == (None if bf16 is None else bf16 * TERA)
    assert gpu.nvlink_bandwidth == (None if nvlink is None else nvlink * GB / 2)
    assert gpu.pcie_bandwidth == pcie * GB / 2
    assert gpu.source.startswith("https://")


@pytest.mark.parametrize("name", CAPACITY_GIB)
def test_memory_is_what_cuda_reports(name):
    assert round(hardware.get(name).memory_bytes / GIB, 2) == CAPACITY_GIB[name]


def test_quantities_are_whole_numbers():
    for name in hardware.names():
        gpu = hardware.get(name)
        for value in (gpu.memory_bytes, gpu.memory_bandwidth, gpu.pcie_bandwidth):
            assert type(value) is int
        for value in (gpu.bf16_flops, gpu.nvlink_bandwidth):
            assert value is None or type(value) is int


def test_names_are_lower_case_with_dashes():
    for name in hardware.names():
        assert name == name.lower()
        assert not set(name) & set(" _")


def test_match_finds_each_gpu_by_its_cuda_name():
    cuda_names = [(cuda, name) for name in hardware.names() for cuda in hardware.get(name).cuda_names]
    assert len({cuda for cuda, _ in cuda_names}) == len(cuda_names)
    for cuda, name in cuda_names:
        assert hardware.match(cuda).name == name


@pytest.mark.parametrize(
    "cuda_name", ["NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300X", ""]
)
def test_match_leaves_other_gpus_alone(cuda_name):
    assert hardware.match(cuda_name) is None


@pytest.mark.parametrize(("given", "nearest"), [("H200", "h200"), ("a100-80", "a100-80gb"), ("rtx3090", "rtx-3090")])
def test_unknown_gpu_suggests_the_nearest(given, nearest):
    with pytest.raises(hardware.HardwareError) as raised:
        hardware.get(given)
    (line,) = raised.value.errors
    assert f"'{given}' is unknown; did you mean {nearest}" in line
    assert "allowed: t4, v100-32gb" in line
    assert "\n" not in line
