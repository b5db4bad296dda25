"""The norms' share of a step by PyTorch's profiler, and what Amdahl's law makes of it."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from compare import child
from compare.child import Progress
from compare.setup import Settings, batches
from compare.statistics import amdahl, amdahl_ceiling, covered, percentiles
from compare.timing import (
    PROFILED_STEPS,
    no_garbage_collection,
    ready_step,
    synchronize,
    time_block,
)
from compare.trace import RANGE, Work, attribute, fused_phase, read_trace
from kernels import RMSNorm

FUSED = (
    "In a compiled model this norm is fused with what is around it: its time is at most that of "
    "all kernels with a part of it, given here, known by the operations in their names."
)


def run(settings: Settings, progress: Progress) -> dict:
    """Each norm's share of the step, as results.json has it under "profile"."""
    profiles = child.call("compare.profile:measure", settings.config, progress)
    return judge(profiles, settings.baseline)


def measure(settings: Settings, progress: Progress) -> dict[str, dict]:
    """The profile of every norm, one after the other."""
    profiles = {}
    for number, norm in enumerate(settings.norms):
        progress(f"profiling {norm}", number, len(settings.norms))
        profiles[norm] = measure_norm(settings, norm)
    return profiles


def measure_norm(settings: Settings, norm: str) -> dict:
    """A norm's work and the whole step's, in milliseconds a step.

    Returns:
        step_ms: median without the profiler; busy_ms: in which something ran, under the profiler;
        norm_ms, forward_ms and backward_ms: of the norms, None where they cannot be told apart;
        kernels: milliseconds by name, of "norm" and of "other"; fused: whether the norm's are
        kernels that do other things, too.
    """
    on_gpu = settings.device.type == "cuda"
    data = batches(settings, 10 if on_gpu else 2, settings.data.seed)
    step = ready_step(settings, norm, data, warmup_steps=20 if on_gpu else 2)
    with no_garbage_collection():
        step_ms = percentiles(time_block(step, data))["p50"]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiled = data[:PROFILED_STEPS]
    with marked_norms(step.lit, settings.scope), no_garbage_collection():
        for _ in range(2):  # the first profile of a process starts slowly
            with profile(activities=activities) as profiler:
                for batch in profiled:
                    step(batch)
                synchronize(settings.device)
    found = figures(attribute(read_trace(profiler), settings.scope), len(profiled))
    fused = settings.scope != "eager" and any(map(fused_phase, found["kernels"]["norm"]))
    return {"step_ms": step_ms, "fused": fused, **found}


@contextmanager
def marked_norms(model: nn.Module, scope: str) -> Iterator[None]:
    """Inside, every call of a norm has a range in the profile; not so in a compiled model, which
    would be compiled anew around it."""
    open_ranges, handles = [], []

    def enter(*_) -> None:
        open_ranges.append(record_function(RANGE))
        open_ranges[-1].__enter__()

    def leave(*_) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for module in model.modules() if scope == "eager" else ():
        if isinstance(module, RMSNorm):
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def figures(work: list[Work], steps: int) -> dict:
    """Milliseconds a step of the norms, forward and backward, and of everything, by kernel."""

    def milliseconds(*phases: str | None) -> float:
        return covered([(w.start, w.end) for w in work if w.phase in phases]) / steps / 1e3

    kernels = {True: defaultdict(float), False: defaultdict(float)}
    for name, start, end, phase in work:
        kernels[phase is not None][name] += (end - start) / steps / 1e3
    known = bool(kernels[True])
    return {
        "busy_ms": milliseconds("forward", "backward", None),
        "norm_ms": milliseconds("forward", "backward") if known else None,
        "forward_ms": milliseconds("forward") if known else None,
        "backward_ms": milliseconds("backward") if known else None,
        "kernels": {"norm": kernels[True], "other": kernels[False]},
    }


def judge(profiles: dict[str, dict], baseline: str) -> dict:
    """The share of each norm, and Amdahl's prediction and ceiling of its speedup.

    With p, the baseline's norms' share of its step, and s, how many times faster the variant's
    norms are: the prediction is 1 / ((1 - p) + p / s), the ceiling 1 / (1 - p).
    """
    base = profiles[baseline]
    share = norm_share(base)
    judged = {}
    for norm, found in profiles.items():
        ceiling = share and amdahl_ceiling(share)
        predicted = None
        if norm != baseline and share and found["norm_ms"]:
            predicted = amdahl(share, base["norm_ms"] / found["norm_ms"])
        judged[norm] = {
            "norm_share": norm_share(found),
            "forward_ms": found["forward_ms"],
            "backward_ms": found["backward_ms"],
            "step_ms": found["step_ms"],
            "busy_ms": found["busy_ms"],
            "amdahl_predicted": predicted,
            "amdahl_ceiling": ceiling,
            "note": FUSED if found["fused"] else None,
            "top": from_the_top(found["kernels"]),
        }
    return judged


def norm_share(found: dict) -> float | None:
    """Of the step's time, 0 to 1; the profiler may have slowed a CPU down, whose step is then
    taken to be as long as the work that was found in it."""
    if found["norm_ms"] is None:
        return None
    return found["norm_ms"] / max(found["step_ms"], found["busy_ms"])


def from_the_top(kernels: dict[str, dict[str, float]]) -> list[dict]:
    """All kernels of a step, the longest first, and whether they belong to norms."""
    found = [
        {"kernel": name, "ms": ms, "norm": kind == "norm"}
        for kind, by_name in kernels.items()
        for name, ms in by_name.items()
    ]
    return sorted(found, key=lambda kernel: -kernel["ms"])
