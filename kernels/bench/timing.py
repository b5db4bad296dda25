"""Time on a GPU: of a call without its launches, of the launches, and the memory's ceiling."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import interpreter  # noqa: F401  chosen before the first kernel is defined

FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU up to now
ATTEMPTS = 6  # to queue a batch before its delay ends


@dataclass
class Arm:
    """Something to time: `call` is timed and gets what the untimed `prepare` returned."""

    call: Callable
    prepare: Callable = lambda: None
    queue_ms: float = 0.5  # what the host last needed to queue one call


class Timer:
    """Times calls on the current GPU with events.

    All calls of a batch are queued behind a delay that the GPU runs first, so that it never waits
    for the host: what an event pair encloses is the call's own time on the GPU, without the time
    it takes to launch it. A batch whose delay ended before the last call was queued is thrown
    away and measured again behind a longer one.
    """

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._cycles_per_ms = 1e6
        for _ in range(3):  # the first call loads the kernel and wakes the clocks
            start, end = _events()
            start.record()
            torch.cuda._sleep(int(20 * self._cycles_per_ms))
            end.record()
            torch.cuda.synchronize()
            self._cycles_per_ms *= 20 / start.elapsed_time(end)

    def gpu_us(self, arm: Arm, calls: int, *, cold: bool) -> list[float]:
        """Microseconds of each of `calls` calls; cold: with an L2 that holds none of their data.

        Raises:
            RuntimeError: if the host never manages to queue the batch before the delay ends.
        """
        for _ in range(ATTEMPTS):
            torch.cuda.synchronize()
            delay_ms = 1 + 2 * calls * arm.queue_ms
            torch.cuda._sleep(int(delay_ms * self._cycles_per_ms))
            delay = torch.cuda.Event()
            delay.record()
            begin = time.perf_counter()
            pairs = [self._queue(arm, cold) for _ in range(calls)]
            hidden = not delay.query()
            arm.queue_ms = 1000 * (time.perf_counter() - begin) / calls
            torch.cuda.synchronize()
            if hidden:
                return [1000 * start.elapsed_time(end) for start, end in pairs]
        raise RuntimeError(f"{calls} calls could not be queued while the GPU waited for them")

    def _queue(self, arm: Arm, cold: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        prepared = arm.prepare()
        if cold:
            self._flush.zero_()
        start, end = _events()
        start.record()
        arm.call(prepared)
        end.record()
        return start, end


def host_us(call: Callable, calls: int = 10) -> list[float]:
    """Wall-clock microseconds that the host needs for each call, the GPU's own time left out.

    The GPU is waited for before the calls, not between them: they only queue their kernels, and
    are few enough for the queue (about a thousand launches) never to be full.
    """
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return times


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


# Elements and warps of a program of the stream kernel; the fastest one is the ceiling.
STREAM_LAUNCHES = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8))


def stream_arms(elements: int, reads: list[str], writes: list[str]) -> list[Arm]:
    """Calls that move the traffic of one pass and compute nothing but a sum, one for each launch.

    Args:
        elements: of each tensor.
        reads, writes: names of the dtypes of the one to three tensors read and one or two written.
    """
    sources = [torch.randn(elements, device="cuda").to(getattr(torch, name)) for name in reads]
    targets = [torch.empty(elements, device="cuda", dtype=getattr(torch, name)) for name in writes]
    return [
        Arm(lambda _, launch=launch: stream(sources, targets, *launch))
        for launch in STREAM_LAUNCHES
    ]


def stream(sources: list[Tensor], targets: list[Tensor], block: int, warps: int) -> None:
    """Write the sum of one to three sources, added in float32, to one or two targets."""
    elements = sources[0].numel()
    sources = [*sources, None, None][:3]
    targets = [*targets, None][:2]
    grid = (triton.cdiv(elements, block),)
    _stream_kernel[grid](*sources, *targets, elements, BLOCK=block, num_warps=warps)


@triton.jit
def _stream_kernel(a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, elements, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    total = tl.load(a_ptr + index, mask=inside).to(tl.float32)
    if b_ptr is not None:
        total += tl.load(b_ptr + index, mask=inside).to(tl.float32)
    if c_ptr is not None:
        total += tl.load(c_ptr + index, mask=inside).to(tl.float32)
    tl.store(y_ptr + index, total.to(y_ptr.dtype.element_ty), mask=inside)
    if z_ptr is not None:
        tl.store(z_ptr + index, total.to(z_ptr.dtype.element_ty), mask=inside)
