"""Timing of training steps: warm-up, blocks between events, host time, the GPU's busy share."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from compare import statistics
from compare.setup import Settings, Step, make_model
from compare.trace import gpu_intervals, read_trace

FLAT_STEPS = 5  # without a compilation end the warm-up
MAX_WARMUP_STEPS = 200
PROFILED_STEPS = 5


def ready_step(settings: Settings, norm: str, data: list[Tensor], warmup_steps: int) -> Step:
    """The training step of a new model, after its warm-up.

    Raises:
        RuntimeError: as `warm_up` does, and in scope "graphs" for a model that runs without them.
    """
    skipped = counters["inductor"]["cudagraph_skips"]
    lit = make_model(settings, norm, settings.seed)
    step = Step(settings, lit, lit.optimizer())
    warm_up(step, data, warmup_steps)
    if settings.scope == "graphs" and counters["inductor"]["cudagraph_skips"] > skipped:
        raise RuntimeError(
            f"torch.compile could not record CUDA graphs of the model with norm {norm!r} "
            "(TORCH_LOGS=perf_hints says why): leave it out of --norms in scope graphs"
        )
    return step


def compilations() -> int:
    """A number that grows with every frame and graph that torch.compile has compiled."""
    return sum(counters["frames"].values()) + counters["stats"]["unique_graphs"]


def warm_up(
    step: Callable[[Tensor], Tensor],
    data: list[Tensor],
    least: int,
    compiled: Callable[[], int] = compilations,
) -> None:
    """Run at least `least` steps, and until the last FLAT_STEPS, or `least`, compiled nothing.

    Args:
        compiled: A number that changes with everything that is compiled.

    Raises:
        RuntimeError: if something is still compiled after MAX_WARMUP_STEPS.
    """
    flat, seen = 0, compiled()
    for number, batch in enumerate(itertools.cycle(data)):
        if number >= least and flat >= min(FLAT_STEPS, least):
            break
        if number == MAX_WARMUP_STEPS:
            raise RuntimeError(f"something is still compiled after {number} steps")
        step(batch)
        now = compiled()
        flat, seen = (flat + 1 if now == seen else 0), now
    synchronize(data[0].device)


def time_block(step: Callable[[Tensor], Tensor], block: list[Tensor]) -> list[float]:
    """Milliseconds of each step; on a GPU between events, with no wait before the block's end.

    One more step runs before, off the clock: it fills the caches with this model's data, and
    gives an idle GPU work until the host is ahead of it, as it is in a training.
    """
    step(block[0])
    if block[0].device.type != "cuda":
        marks = [time.perf_counter()]
        for batch in block:
            step(batch)
            marks.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(block) + 1)]
    events[0].record()
    for batch, event in zip(block, events[1:], strict=True):
        step(batch)
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Nothing is collected inside, where a collection would take milliseconds of some steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_us(step: Step, data: list[Tensor]) -> float:
    """Microseconds that the host needs to queue a step, the GPU's own time left out; a median.

    A GPU takes about a thousand queued kernels before it makes the host wait. So it is waited for,
    off the clock, before forward, backward and update, each of which stays below that in models
    of up to some 20 layers; in larger ones this is an upper bound. On a CPU it is the step's time.
    """
    device, times = data[0].device, []
    with no_garbage_collection():
        for batch in data[:PROFILED_STEPS]:
            forward, loss = _timed(device, lambda batch=batch: step.forward(batch))
            backward, _ = _timed(device, lambda loss=loss: step.backward(loss))
            update, _ = _timed(device, step.update)
            times.append(forward + backward + update)
    return 1e6 * statistics.percentiles(times)["p50"]


def _timed(device: torch.device, call: Callable) -> tuple[float, Tensor | None]:
    """Seconds that a call takes, the GPU idle when it starts, and what it returns."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def busy(step: Step, data: list[Tensor]) -> float | None:
    """Share of its steps' wall time in which the GPU computes or copies; None on a CPU.

    Both from one trace of the GPU alone, which costs the host little: time that some kernel runs,
    over the time from the first kernel's start to the last one's end.
    """
    if data[0].device.type != "cuda":
        return None
    for _ in range(2):  # the first profile of a process starts slowly
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for batch in data[:PROFILED_STEPS]:
                step(batch)
            synchronize(batch.device)
    intervals = gpu_intervals(read_trace(profiler))
    wall = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return statistics.covered(intervals) / wall
