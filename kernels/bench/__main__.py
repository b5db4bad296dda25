"""The norms alone, on a GPU, against each other and against the memory's limit.

Every implementation is called the same way, through autograd, and its results are compared with
float64 before it is timed. kernels.json is written after every case; the CSV file, the plot and
the tables beside it are made from it at the end, and again by `python -m kernels.bench.report`.
"""

import argparse
import random
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kernels import reference
from kernels.bench import report
from kernels.bench.cases import ITEMSIZE, Case, design_preset, sweep
from kernels.bench.command import integer, integers, missing_gpu, names, run
from kernels.bench.environment import clocks, environment
from kernels.bench.problem import EPS, Problem
from kernels.bench.timing import Arm, Timer, host_us, stream_arms
from kernels.registry import NORMS, Norm, load_norm

PASSES = ("forward", "backward", "add_forward", "add_backward")
WIDTHS = (256, 512, 768, 1024, 2048, 4096, 8192)
DTYPES = [dtype for dtype in ITEMSIZE if dtype != "float64"]
ATOMIC = {"triton-atomic": "kernels.bench.atomic:norm"}
INDUCTOR_MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}

ROUNDS = 10  # of all implementations in shuffled order, so that drift meets them all alike
COLD_CALLS, WARM_CALLS = 10, 5  # timed calls of an implementation in a round


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    if missing := missing_gpu():
        print(f"python -m kernels.bench needs a GPU: {missing}", file=sys.stderr)
        return 2
    results = {
        "environment": environment()
        | {
            "command": shlex.join(["python", "-m", "kernels.bench", *argv]),
            "method": {"rounds": ROUNDS, "cold": COLD_CALLS, "warm": WARM_CALLS, "eps": EPS},
        },
        "rows": [],
    }
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn()) as bar:
        timer, task = Timer(), bar.add_task("", total=len(arguments.cases))
        for case in arguments.cases:
            bar.update(task, description=case.label)
            rows = measure(case, arguments.norms, directions(case, arguments.passes), timer)
            results["rows"] += rows
            results["environment"]["clocks"]["end"] = clocks()
            report.save(results, arguments.out)
            bar.console.print(report.summary(rows), highlight=False, markup=False, soft_wrap=True)
            bar.advance(task)
    report.write(results, arguments.out)
    print(f"\n{report.targets_table(results)}\n\nResults are in {arguments.out}")
    return 0


# --- command line -----------------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, with the cases made of it. A bad one exits with status 2 and a sentence."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=["design"], help="the cases that the project's targets are stated for")
    add("--group", type=names, help="groups of the preset, comma-separated; all by default")
    add("--n", type=integers, help="row lengths; with a preset, which of its cases to measure")
    add("--rows", type=integer, help="rows; by default as many as make a tensor of 64 MiB")
    add("--dtype", type=names, help=f"dtypes out of {','.join(DTYPES)}; bfloat16 by default")
    add("--passes", type=names, default=list(PASSES), help=f"{','.join(PASSES)} by default")
    add("--norms", type=names, help="implementations; by default all, in groups of a preset fewer")
    add("--out", type=Path, help="folder of the results; runs/bench-<number> by default")
    arguments = parser.parse_args(argv)
    try:
        _check_known("--passes", arguments.passes, PASSES)
        for norm in arguments.norms or []:
            load_norm(ATOMIC.get(norm, norm))
        arguments.cases = select_cases(arguments)
        arguments.out = arguments.out or _next_run()
        if (arguments.out / report.RESULTS).exists():
            raise ValueError(f"--out {arguments.out} holds a {report.RESULTS} already")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def select_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for. ValueError where flags contradict each other."""
    if arguments.preset is None:
        if arguments.group:
            raise ValueError("--group chooses among a preset's groups: give --preset as well")
        dtypes = arguments.dtype or ["bfloat16"]
        _check_known("--dtype", dtypes, DTYPES)
        cases = sweep(arguments.n or list(WIDTHS), arguments.rows, dtypes)
    else:
        if arguments.rows or arguments.dtype:
            raise ValueError("a preset fixes rows and dtypes: leave out --rows and --dtype")
        cases = design_preset()
        groups = list(dict.fromkeys(case.group for case in cases))
        _check_known("--group", arguments.group or [], groups)
        cases = [case for case in cases if case.group in (arguments.group or groups)]
        cases = [case for case in cases if case.n in (arguments.n or [case.n])]
    cases = [case for case in cases if directions(case, arguments.passes)]
    if not cases:
        raise ValueError("no case is left: --group, --n and --passes exclude each other")
    return cases


def directions(case: Case, passes: list[str]) -> list[str]:
    """Which of forward and backward to time for a case, by the names in PASSES."""
    prefix = "add_" if case.op == "add_rms_norm" else ""
    return [direction for direction in ("forward", "backward") if prefix + direction in passes]


def _check_known(flag: str, given: Collection[str], known: Collection[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{flag}: there is no {', '.join(unknown)}; there are {', '.join(known)}")


def _next_run() -> Path:
    number = 1
    while (folder := Path("runs") / f"bench-{number}").exists():
        number += 1
    return folder


# --- one case ---------------------------------------------------------------------------------


@dataclass
class Candidate:
    """An implementation in one case, and what was found out about it before it is timed."""

    impl: str
    mode: str | None
    load: Callable[[], Norm]
    norm: Norm | None = None
    error: dict[str, float] | None = None
    first_call_s: float | None = None
    host_us: float | None = None
    reason: str | None = None

    def check(self, problem: Problem) -> None:
        """Load it, run it once, and fill in its errors or the reason why it is not timed."""
        try:
            self.norm = self.load()
            begin = time.perf_counter()
            results = problem.results(self.norm)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.first_call_s = time.perf_counter() - begin
            self.error = problem.errors(results)
        except Exception as error:  # a peer raises anything for what it cannot do
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            self.reason = kind + (str(error).strip() or "no message").splitlines()[0]
            return
        wrong = [
            f"{name} is off by {error:.1e}, allowed {problem.tolerance(name):.1e}"
            for name, error in self.error.items()
            if not error <= problem.tolerance(name)
        ]
        self.reason = f"wrong result: {'; '.join(wrong)}" if wrong else None


def candidates(case: Case, norms: list[str] | None) -> list[Candidate]:
    """The implementations to compare in a case, Inductor once for each of its modes."""
    found = []
    for name in norms or case.norms or [*NORMS, *ATOMIC]:
        if name == "compiled":
            modes = list(INDUCTOR_MODES) if case.max_autotune else ["default"]
            found += [Candidate(name, mode, lambda mode=mode: inductor(mode)) for mode in modes]
        else:
            target = ATOMIC.get(name, name)
            found.append(Candidate(name, None, lambda target=target: load_norm(target)))
    return found


def inductor(mode: str) -> Norm:
    """The definition through torch.compile in one of INDUCTOR_MODES, as one whole graph."""
    options = {"mode": INDUCTOR_MODES[mode], "fullgraph": True}
    return Norm(
        "compiled",
        torch.compile(reference.rms_norm, **options),
        torch.compile(reference.add_rms_norm, **options),
    )


def measure(case: Case, norms: list[str] | None, passes: list[str], timer: Timer) -> list[dict]:
    """The rows of one case: every implementation in every pass."""
    torch._dynamo.reset()  # a compiled baseline of its own, not one made general by other shapes
    problem = Problem.random(case, "cuda")
    found = candidates(case, norms)
    for candidate in found:
        candidate.check(problem)
    problem.expected.clear()

    right = {index: candidate for index, candidate in enumerate(found) if candidate.reason is None}
    arms = {
        (index, direction): make_arm(problem, candidate.norm, direction)
        for index, candidate in right.items()
        for direction in passes
    }
    for direction in passes:
        arms["ceiling", direction] = stream_arm(case, direction, timer)
    cold, warm = time_in_rounds(arms, timer)
    measure_host_times(problem, list(right.values()))
    return [
        make_row(
            case, direction, candidate, cold["ceiling", direction], cold.get(key), warm.get(key)
        )
        for direction in passes
        for index, candidate in enumerate(found)
        for key in [(index, direction)]
    ]


def measure_host_times(problem: Problem, candidates: list[Candidate]) -> None:
    """Fill in the median microseconds that the host needs to queue one forward and backward."""
    times = {index: [] for index in range(len(candidates))}
    for index in in_rounds(times):
        norm = candidates[index].norm
        times[index] += host_us(lambda norm=norm: problem.backward(problem.forward(norm)))
    for index, candidate in enumerate(candidates):
        candidate.host_us = report.percentiles(times[index])["p50"]


def make_arm(problem: Problem, norm: Norm, direction: str) -> Arm:
    """A pass to time. A backward gets the fresh graph of a forward that is not in its time."""
    if direction == "forward":
        return Arm(lambda _: problem.forward(norm))
    return Arm(problem.backward, prepare=lambda: problem.forward(norm))


def time_in_rounds(arms: dict, timer: Timer) -> tuple[dict, dict]:
    """Microseconds by arm, with a cold and with a warm L2: a list of samples for each round."""
    cold, warm = {key: [] for key in arms}, {key: [] for key in arms}
    for key in in_rounds(arms):
        cold[key].append(timer.gpu_us(arms[key], COLD_CALLS, cold=True))
        warm[key].append(timer.gpu_us(arms[key], WARM_CALLS, cold=False))
    return cold, warm


def in_rounds(keys: Iterable) -> Iterator:
    """The keys ROUNDS times, each time in another order."""
    order, shuffle = list(keys), random.Random(0).shuffle
    for _ in range(ROUNDS):
        shuffle(order)
        yield from order


def stream_arm(case: Case, direction: str, timer: Timer) -> Arm:
    """The fastest stream kernel that reads and writes what this pass must: its ceiling."""
    arms = stream_arms(case.rows * case.n, *case.traffic(direction))
    for arm in arms:
        arm.call(arm.prepare())  # compiles it
    return min(arms, key=lambda arm: np.median(timer.gpu_us(arm, COLD_CALLS, cold=True)))


def make_row(
    case: Case,
    direction: str,
    candidate: Candidate,
    ceiling: list[list[float]],
    cold: list[list[float]] | None,
    warm: list[list[float]] | None,
) -> dict:
    """One row of the results. Times are in microseconds unless the key says seconds."""
    about = asdict(case)
    del about["max_autotune"], about["norms"]
    ceiling_us = report.percentiles(ceiling)["p50"]
    figures = dict.fromkeys(["us", "us_warm", "gb_s", "fraction"])
    if cold is not None:
        us = report.percentiles(cold)
        figures = {
            "us": us,
            "us_warm": report.percentiles(warm),
            "gb_s": round(case.bytes(direction) / us["p50"] / 1000, 1),
            "fraction": round(ceiling_us / us["p50"], 4),
        }
    error = candidate.error and {name: float(f"{e:.2e}") for name, e in candidate.error.items()}
    return {
        "group": about.pop("group"),
        "op": about.pop("op"),
        "pass": direction,
        "impl": candidate.impl,
        "mode": candidate.mode,
        **about,
        "bytes": case.bytes(direction),
        "ceiling_us": ceiling_us,
        **figures,
        "host_us": candidate.host_us,
        "first_call_s": candidate.first_call_s and round(candidate.first_call_s, 2),
        "error": error,
        "reason": candidate.reason,
        "samples_us": cold and [[round(sample, 3) for sample in samples] for samples in cold],
    }


if __name__ == "__main__":
    run(main)
