"""How the kernels are launched: tile, warps and programs by row length, dtypes and GPU.

A launch never depends on the number of rows, so a row's result does not depend on the batch that
it sits in. The figures behind the tables are in results/LOG.md.
"""

import functools
from dataclasses import dataclass

import torch

from kernels.interpreter import INTERPRETED

INTERPRETED_TILE = 2**17  # elements; an interpreted operation costs its overhead, not its size


@dataclass(frozen=True)
class Launch:
    """One program's tile is rows x columns elements, worked on by 32 x warps threads."""

    rows: int
    columns: int
    warps: int
    programs_per_sm: int = 1
    stages: int = 1


@dataclass(frozen=True)
class Gpu:
    """What a launch needs to know of the GPU: multiprocessors and shared memory in bytes."""

    multiprocessors: int
    shared_memory: int
    dependent_launch: bool


# Row length: (rows, warps, programs a multiprocessor, stages), measured on an H200 in bfloat16.
BACKWARD_LAUNCHES = {
    64: (16, 4, 4, 4),
    128: (8, 2, 4, 4),
    768: (2, 4, 4, 3),
    1024: (2, 4, 2, 4),
    2048: (1, 4, 4, 3),
    4096: (2, 8, 1, 3),
    8192: (1, 8, 1, 3),
}


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """The properties of a CUDA device, or of the interpreter's stand-in for one."""
    if INTERPRETED:
        return Gpu(multiprocessors=2, shared_memory=2**30, dependent_launch=False)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        dependent_launch=properties.major >= 9,
    )


@functools.cache
def forward_launch(n: int, itemsize: int) -> Launch:
    """Launch of the forward kernel for rows of n features, computed in itemsize bytes each.

    The whole row is one tile where it fits the registers, else it is read in blocks, twice.
    """
    columns = min(_power_of_two(n), 32768 * 4 // itemsize)
    if INTERPRETED:
        return Launch(max(1, INTERPRETED_TILE // columns), columns, warps=4)
    rows = max(1, 2048 // columns)
    return Launch(rows, columns, warps=min(max(rows * columns // 1024, 4), 32))


@functools.cache
def backward_launch(n: int, itemsize: int, bytes_per_feature: int, shared_memory: int) -> Launch:
    """Launch of the persistent backward kernel for rows of n features.

    Args:
        n: features in a row.
        itemsize: bytes of the compute dtype, in which dw is held in registers.
        bytes_per_feature: bytes read a feature (x, dy and the stream's gradient), which set how
            many tiles of prefetch fit into shared_memory bytes.
    """
    columns = min(_power_of_two(n), 8192 * 4 // itemsize)
    if INTERPRETED:
        return Launch(max(1, INTERPRETED_TILE // columns), columns, warps=4)
    if n in BACKWARD_LAUNCHES and itemsize == 4:
        rows, warps, programs_per_sm, stages = BACKWARD_LAUNCHES[n]
    else:
        rows = max(1, min(1024 if n <= 256 else 2048, 8192 * 4 // itemsize) // columns)
        warps = min(max(rows * columns // 1024, 4), 8)
        programs_per_sm, stages = (4, 3) if rows * columns <= 2048 else (1, 3)
    prefetched = (shared_memory // programs_per_sm - 4096) // (rows * columns * bytes_per_feature)
    return Launch(rows, columns, warps, programs_per_sm, min(stages, prefetched + 1))


@functools.cache
def reduce_launch(n: int) -> Launch:
    """Launch of the kernel that adds the programs' partial sums of dw."""
    if INTERPRETED:
        return Launch(64, min(_power_of_two(n), INTERPRETED_TILE // 64), warps=4)
    return Launch(64, 8, warps=4)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()
