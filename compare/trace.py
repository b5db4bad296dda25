"""Which work of a step belongs to its norms: a reading of the profiler's Chrome trace.

Events are the dicts of that format: name, cat, tid, ts and dur (both in microseconds), args.
"""

import bisect
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch.profiler import profile

RANGE = "rms_norm"  # of record_function, around every call of a norm
OPERATORS = "triton_rmsnorm_gpt::"  # kernels.functional's, which a compiled model calls on a CPU
NORM_KERNELS = "rms_norm_"  # in the names of kernels that a compiled model launches as they are
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
NODE = "autograd::engine::evaluate_function"  # begins the name of a backward node's range
INDUCTOR = ("triton_poi_", "triton_red_", "triton_per_")  # begin the names of its kernels
# What is left of a norm in a compiled backward beside Inductor's fused kernels: it has aten add up
# the partial sums of dw, and leaves no other sum of a GPT to it.
BACKWARD, SUM = f"{NODE}: CompiledFunctionBackward", "aten::sum"


class Work(NamedTuple):
    """A stretch of time that a GPU's kernel, or on a CPU an operator itself, takes.

    `phase` is "forward" or "backward" for work of a norm, else None.
    """

    name: str
    start: float
    end: float
    phase: str | None


def read_trace(profiler: profile) -> list[dict]:
    """The complete events of a finished profile."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "cat" in event]


def gpu_intervals(events: Iterable[dict]) -> list[tuple[float, float]]:
    """Start and end of everything that ran on the GPU."""
    return [
        (event["ts"], event["ts"] + event["dur"]) for event in events if event["cat"] in GPU_WORK
    ]


def attribute(events: list[dict], scope: str) -> list[Work]:
    """All work of the steps in a trace, that of norms marked.

    Scope "eager": forward work is what was launched inside a RANGE, backward work what the
    autograd nodes made there launched; nodes and operators share sequence numbers. Scope
    "compiled": norms with kernels or OPERATORS of their own are known by the names of these; others
    are fused with what is around them, and known by the `fused_phase` of a kernel and by the SUM of
    their weight's gradient.
    """
    eager = scope == "eager"
    find = _finder(_eager_ranges(events) if eager else _operator_ranges(events))
    if any(event["cat"] in GPU_WORK for event in events):
        pieces = _launched(events)
    else:
        pieces = _own_time([event for event in events if event["cat"] == "cpu_op"])
    return [
        Work(name, start, end, find(*launch) or (None if eager else _phase_by_name(name)))
        for name, start, end, launch in pieces
    ]


def _phase_by_name(kernel: str) -> str | None:
    if NORM_KERNELS in kernel:
        return "forward" if "forward" in kernel else "backward"
    return fused_phase(kernel)


def fused_phase(kernel: str) -> str | None:
    """The phase of a norm that a kernel of Inductor's has a part of, by its name.

    The name lists the operations inside. Of those of a GPT, only the norm's forward takes an
    rsqrt, and only its backward a power or, the softmax aside, a sum.
    """
    operations = set(kernel.split("_"))
    if not kernel.startswith(INDUCTOR) or "softmax" in operations:
        return None
    if "rsqrt" in operations:
        return "forward"
    return "backward" if operations & {"pow", "sum"} else None


def _eager_ranges(events: list[dict]) -> dict[str, list[dict]]:
    """Ranges on the host inside which the norms' forward and backward work is launched."""
    operators = [event for event in events if event["cat"] == "cpu_op"]
    norms = [e for e in events if e["cat"] == "user_annotation" and e["name"] == RANGE]
    numbers = _sequence_numbers(norms, operators)
    nodes = [
        operator
        for operator in operators
        if operator["name"].startswith(NODE) and _sequence_number(operator) in numbers
    ]
    return {"forward": norms, "backward": nodes}


def _operator_ranges(events: list[dict]) -> dict[str, list[dict]]:
    operators = [event for event in events if event["cat"] == "cpu_op"]
    ranges = {
        phase: [operator for operator in operators if operator["name"] == OPERATORS + phase]
        for phase in ("forward", "backward")
    }
    inside = _finder({"backward": [e for e in operators if e["name"] == BACKWARD]})
    ranges["backward"] += [e for e in operators if e["name"] == SUM and inside(e["tid"], e["ts"])]
    return ranges


def _sequence_numbers(norms: list[dict], operators: list[dict]) -> set[int]:
    """Numbers of the autograd nodes that were made inside the norms' ranges.

    A forward operator shows the number that the thread's next node will get, whether it makes one
    or not. So the nodes made in a range have those from the first number shown inside up to, and
    without, the first one shown after it.
    """
    shown = defaultdict(list)
    for operator in operators:
        if (number := _sequence_number(operator)) is not None and not _is_backward(operator):
            shown[operator["tid"]].append((operator["ts"], number))
    numbers = set()
    for thread in shown.values():
        thread.sort()
    for norm in norms:
        thread = shown[norm["tid"]]
        first = bisect.bisect_left(thread, (norm["ts"], -1))
        after = bisect.bisect_left(thread, (norm["ts"] + norm["dur"], -1))
        if first < after:
            end = thread[after][1] if after < len(thread) else thread[after - 1][1] + 1
            numbers.update(range(thread[first][1], end))
    return numbers


def _sequence_number(operator: dict) -> int | None:
    number = operator.get("args", {}).get("Sequence number")
    return None if number is None or number < 0 else number


def _is_backward(operator: dict) -> bool:
    return operator.get("args", {}).get("Fwd thread id", 0) != 0


def _finder(ranges: dict[str, list[dict]]):
    """A function (thread, time) -> the phase whose range that is in, or None."""
    starts = defaultdict(list)
    for phase, found in ranges.items():
        for event in found:
            end = event["ts"] + event["dur"]
            starts[event["tid"]].append((event["ts"], end, phase))
    for thread in starts.values():
        thread.sort()

    def find(thread: int, time: float) -> str | None:
        candidates = starts.get(thread, [])
        place = bisect.bisect_right(candidates, (time, float("inf"), "")) - 1
        if place < 0 or time >= candidates[place][1]:
            return None
        return candidates[place][2]

    return find


def _launched(events: list[dict]) -> Iterable[tuple[str, float, float, tuple[int, float]]]:
    """The GPU's work with the thread and the time of its launch, which correlation ids connect."""
    launches = {
        event["args"]["correlation"]: (event["tid"], event["ts"])
        for event in events
        if event["cat"] in LAUNCHES and "correlation" in event.get("args", {})
    }
    nowhere = (-1, 0.0)
    for event in events:
        if event["cat"] in GPU_WORK:
            launch = launches.get(event.get("args", {}).get("correlation"), nowhere)
            yield event["name"], event["ts"], event["ts"] + event["dur"], launch


def _own_time(operators: list[dict]) -> Iterable[tuple[str, float, float, tuple[int, float]]]:
    """Each operator's time without that of operators it calls, in pieces between those calls."""
    threads = defaultdict(list)
    for operator in operators:
        threads[operator["tid"]].append(operator)
    for tid, thread in threads.items():
        # Of two that start together the longer one is the caller.
        thread.sort(key=lambda operator: (operator["ts"], -operator["dur"]))
        running, reached = [], 0.0  # callers of what runs now; all before `reached` is dealt with
        for operator in [*thread, {"name": "", "ts": float("inf"), "dur": 0.0}]:
            while running and running[-1][1] <= operator["ts"]:
                name, end = running.pop()
                if end > reached:
                    yield name, reached, end, (tid, reached)
                    reached = end
            if running and operator["ts"] > reached:
                yield running[-1][0], reached, operator["ts"], (tid, reached)
            reached = max(reached, operator["ts"])
            running.append((operator["name"], operator["ts"] + operator["dur"]))
