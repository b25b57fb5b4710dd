"""What CUDA and PyTorch's caching allocator add to the bytes of tensors.

Blocks, workspaces and staging buffers are in the allocator's counters; the CUDA context and blocks that lie
unused are not, and show only on the device. Everything here is about NVIDIA GPUs and the native allocator with
its default settings.

Only the standard library is imported.
"""

from __future__ import annotations

import bisect

from utils.units import MIB

# cuBLAS takes one workspace for each thread that multiplies matrices, through PyTorch's allocator: the
# main thread and autograd's. 32 MiB on Hopper and newer, 8.125 MiB before
# (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
CUBLAS_WORKSPACES = 2
CUBLAS_WORKSPACE_BYTES = 32 * MIB
# A product with a bias goes through cuBLASLt, which has a workspace of its own (the same file,
# getCUDABlasLtWorkspaceSize: 1 MiB).
CUBLASLT_WORKSPACE_BYTES = 1 * MIB

# Around the allocator, both measured and held to the records by a test. The allocator keeps blocks that no
# tensor fits any more: reserved over allocated, the median of all recorded steps.
RESERVED_OVER_ALLOCATED = 1.065
# The CUDA context and the loaded kernels: device-level less reserved, in every recorded step this or, where no
# fused attention is loaded, 16 MiB less.
CONTEXT_BYTES = 758 * MIB

# Reductions over many rows split the rows until the GPU is full: 132 multiprocessors of 2,048 threads
# on an H100 or H200. Another GPU changes this buffer by its share of them.
MULTIPROCESSORS = 132
THREADS_PER_MULTIPROCESSOR = 2048


def block_bytes(requested: int) -> int:
    """What PyTorch's caching allocator counts for a request: whole blocks of 512 bytes
    (c10/cuda/CUDACachingAllocator.cpp, round_size).

    >>> block_bytes(1), block_bytes(1024)
    (512, 1024)
    """
    return -(-requested // 512) * 512


def packed_bytes(requests) -> int:
    """What the allocator counts for requests that it serves one after another from an empty cache.

    Small requests (up to 1 MiB) share segments of 2 MiB, larger ones segments of 20 MiB, and from 10 MiB on
    each opens a segment of whole 2 MiB. A request takes the smallest free block that holds it; the rest of the
    block is split off, unless it is too small to be worth it (in the large pool up to 1 MiB): then it is counted
    with the tensor (get_allocation_size, get_free_block, should_split).

    >>> packed_bytes([11 * MIB]) // MIB, packed_bytes([21 * MIB // 2]) / MIB, packed_bytes(4 * [6 * MIB]) / MIB
    (12, 10.5, 24.0)
    """
    free: dict[bool, list[int]] = {True: [], False: []}  # by pool, small or large; sorted
    total = 0
    for requested in requests:
        size = block_bytes(requested)
        small = size <= MIB
        blocks = free[small]
        position = bisect.bisect_left(blocks, size)
        if position < len(blocks):
            block = blocks.pop(position)
        elif small:
            block = 2 * MIB
        else:
            block = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        rest = block - size
        if rest >= 512 if small else rest > MIB:
            bisect.insort(blocks, rest)
            block = size
        total += block
    return total


def partial_sums(columns: int, rows: int) -> int:
    """Bytes of the buffer in which a sum over ``rows`` of a ``[rows, columns]`` matrix meets.

    Zero where each thread block sums whole columns. The launch geometry of
    aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, global_memory_size): four columns a thread,
    128 threads a block, at least 16 and at most 256 rows a thread.

    >>> partial_sums(2048, 4096) // 2**20, partial_sums(4096, 512)
    (64, 0)
    """
    vector, threads = 4, 128
    if columns % vector:
        vector, threads = 1, 512
    across = _power_of_two(columns // vector, threads)
    width = min(across, 32)
    height = min(_power_of_two(rows, threads), threads // width)
    width = min(across, threads // height)
    rows_per_thread = -(-rows // height)
    blocks = -(-columns // (vector * width))
    full = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if rows_per_thread < 256 or blocks > full:
        return 0
    split = max(min(-(-full // blocks), -(-rows_per_thread // 16)), -(-rows_per_thread // 256))
    if split == 1:
        return 0
    return 4 * columns * split * width * vector


def _power_of_two(number: int, at_most: int) -> int:
    return 1 << (max(1, min(number, at_most)).bit_length() - 1)
