"""How the kernels are launched: tile, warps, programs and prefetch, by row length and dtypes.

A launch depends on the number of rows only where few rows are spread over more programs and laid
out the same (`thinned`): so a row's result does not depend on the batch that it sits in. What
`python -m kernels.tune` found on the user's own GPU comes first, then the tables measured for this
project (one file an architecture, in tuned/), then a heuristic.
"""

import contextlib
import functools
import json
import logging
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import triton

from kernels.interpreter import INTERPRETED

INTERPRETED_TILE = 2**17  # elements; an interpreted operation costs its overhead, not its size
MEASURED = Path(__file__).parent / "tuned"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """A program's tile is rows x columns elements, worked on by 32 x warps threads.

    The backward kernel's grid has programs_per_sm programs a multiprocessor; each walks over its
    tiles and prefetches stages - 1 of them.
    """

    rows: int
    columns: int
    warps: int
    programs_per_sm: int = 1
    stages: int = 1


@dataclass(frozen=True)
class Gpu:
    """What a launch needs to know of the GPU."""

    name: str
    architecture: str
    multiprocessors: int
    shared_memory: int  # bytes that a program may use
    dependent_launch: bool  # a kernel may start before the one it waits for has ended


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """The properties of a CUDA device, or of the interpreter's stand-in for one."""
    if INTERPRETED:
        return Gpu("interpreter", "interpreter", 2, 2**30, dependent_launch=False)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        properties.name,
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        dependent_launch=properties.major >= 9,
    )


@functools.cache
def forward_launch(
    device: torch.device, n: int, h_dtype: torch.dtype, y_dtype: torch.dtype, compute: torch.dtype
) -> Launch:
    """Launch of the forward kernel for rows of n features.

    Args:
        h_dtype: of what is normalised, which is the stream where there is one: so that the add
            and the norm by itself take the same launch, and give the same bits.
        y_dtype: of the output.
        compute: of the arithmetic.
    """
    found = _lookup(device, forward_key(n, h_dtype, y_dtype))
    return found or forward_heuristic(n, compute.itemsize)


@functools.cache
def backward_launch(
    device: torch.device,
    n: int,
    h_dtype: torch.dtype,
    dy_dtype: torch.dtype,
    has_dh: bool,
    compute: torch.dtype,
) -> Launch:
    """Launch of the persistent backward kernel; has_dh: a stream's gradient is read as well."""
    found = _lookup(device, backward_key(n, h_dtype, dy_dtype, has_dh))
    read = h_dtype.itemsize * (1 + has_dh) + dy_dtype.itemsize
    return found or backward_heuristic(n, compute.itemsize, read, gpu(device).shared_memory)


def forward_key(n: int, h_dtype: torch.dtype, y_dtype: torch.dtype) -> str:
    """What a launch of the forward kernel is filed under."""
    return f"forward {n} {_name(h_dtype)} {_name(y_dtype)}"


def backward_key(n: int, h_dtype: torch.dtype, dy_dtype: torch.dtype, has_dh: bool) -> str:
    """What a launch of the backward kernel is filed under."""
    return f"{'add_' * has_dh}backward {n} {_name(h_dtype)} {_name(dy_dtype)}"


def forward_heuristic(n: int, itemsize: int) -> Launch:
    """A row of up to 8192 float32 features is one tile; a longer one is read in blocks, twice.

    itemsize: bytes of the compute dtype.
    """
    whole = triton.next_power_of_2(n)
    columns = min(whole, 8192 * 4 // itemsize)
    if INTERPRETED:
        return Launch(max(1, INTERPRETED_TILE // columns), columns, warps=4)
    rows = max(1, 2048 // columns)
    return Launch(rows, columns, warps=min(max(rows * whole // 1024, 4), 32))


def backward_heuristic(n: int, itemsize: int, read: int, shared_memory: int) -> Launch:
    """Enough warps to hold a tile and dw in registers, and two tiles of prefetch where they fit.

    itemsize: bytes of the compute dtype. read: bytes read a feature. shared_memory: in bytes.
    """
    columns = min(triton.next_power_of_2(n), 8192 * 4 // itemsize)
    if INTERPRETED:
        return Launch(max(1, INTERPRETED_TILE // columns), columns, warps=4)
    rows = max(1, min(1024 if n <= 256 else 2048, 8192 * 4 // itemsize) // columns)
    warps = min(max(rows * columns // 1024, 4), 8)
    programs_per_sm = 4 if rows * columns <= 2048 else 1
    return Launch(
        rows,
        columns,
        warps,
        programs_per_sm,
        min(3, 1 + tiles_that_fit(rows * columns * read, programs_per_sm, shared_memory)),
    )


def tiles_that_fit(tile_bytes: int, programs_per_sm: int, shared_memory: int) -> int:
    """Tiles of prefetch for which a multiprocessor's programs have shared memory."""
    reserved = 2048  # what the driver and the reductions need beside the tiles
    return max(0, (shared_memory // programs_per_sm - reserved) // tile_bytes)


def thinned(launch: Launch, rows: int, n: int, multiprocessors: int) -> Launch:
    """The launch with one row a program, where so few rows would leave multiprocessors without one.

    Only where that does not change how a row is laid out over threads, and so the order of its sum:
    where they lie along one row anyway, each with 16 bytes of its features.
    """
    filled = rows >= launch.rows * multiprocessors
    along = n % 16 == 0 and launch.columns >= 256 * launch.warps
    return launch if filled or not along or INTERPRETED else replace(launch, rows=1)


@functools.cache
def reduce_launch(n: int, partials: int) -> Launch:
    """Launch of the kernel that adds up to so many partial sums of dw, all loaded at once."""
    if INTERPRETED:
        return Launch(64, min(triton.next_power_of_2(n), INTERPRETED_TILE // 64), warps=4)
    rows = min(triton.next_power_of_2(partials), 2048)
    return Launch(rows, min(16, 16384 // rows), warps=8)


def tuned_file() -> Path:
    """Where `python -m kernels.tune` keeps what it found: a file in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "triton-rmsnorm-gpt", "launches.json")


def contents() -> bytes:
    """Of the files that launches are read from; of one that cannot be read, nothing."""
    found = b""
    for file in (*sorted(MEASURED.glob("*.json")), tuned_file()):
        with contextlib.suppress(OSError):
            found += file.read_bytes()
    return found


def tuned_for(device: torch.device) -> str:
    """What launches are tuned for: a GPU and a Triton version."""
    return f"{gpu(device).name}, triton {triton.__version__}"


def read_launches(file: Path) -> dict[str, dict[str, Launch]]:
    """The launches in a file: {GPU: {key: Launch}}.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it does not hold launches.
    """
    names = {field.name for field in fields(Launch)}
    try:
        content = json.loads(file.read_text())
        found = {
            name: {key: Launch(**launch) for key, launch in launches.items()}
            for name, launches in content.items()
        }
        tiles = [launch for launches in found.values() for launch in launches.values()]
        numbers = [number for tile in tiles for number in asdict(tile).values()]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError("a launch holds what is not a positive whole number")
        powers = [v for x in tiles for v in (x.rows, x.columns, x.warps)]
        if any(power & (power - 1) for power in powers):
            raise ValueError("rows, columns and warps have to be powers of two")
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not hold launches of {sorted(names)}: {error}") from error
    return found


@functools.cache
def known_launches(device: torch.device) -> dict[str, Launch]:
    """Launches by key for a GPU: those measured for its architecture, then those tuned on it.

    A file that cannot be read is said to be so, and left out.
    """
    found = {}
    for file in (MEASURED / f"{gpu(device).architecture}.json", tuned_file()):
        try:
            tables = read_launches(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("Launches are not used: %s. Tune again, or restore the file.", error)
            continue
        for name, launches in tables.items():
            if file.parent == MEASURED or name == tuned_for(device):
                found |= launches
    return found


def use(device: torch.device, key: str, launch: Launch) -> None:
    """Launch so from now on, in this process."""
    known_launches(device)[key] = launch
    forward_launch.cache_clear()
    backward_launch.cache_clear()


def _lookup(device: torch.device, key: str) -> Launch | None:
    return None if INTERPRETED else known_launches(device).get(key)


def _name(dtype: torch.dtype) -> str:
    """Dtypes of one width take the same time, and so the same launch."""
    return f"{8 * dtype.itemsize}-bit"
