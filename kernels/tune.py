"""The fastest launches for this GPU, found by trying: `python -m kernels.tune`.

Each candidate is compiled, its results are compared with float64, and only then it is timed, with
a cold L2. The winners are written to a file that every later run on this GPU with this Triton
version uses. Training itself never sweeps.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean, median

import torch
import triton
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kernels import functional, launcher, launches, triton_rms_norm
from kernels.bench.cases import DESIGN_SHAPES, Case, add_case, default_rows, norm_case
from kernels.bench.command import integers, missing_gpu, names, run
from kernels.bench.problem import EPS, Problem
from kernels.bench.timing import Arm, Timer
from kernels.launches import Launch

WIDTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 8192)
FORMS = ("norm", "add", "mixed", "norm32", "add32")
PASSES = ("forward", "backward")
CHECKED_ROWS = 3001
FINALISTS = 6


@dataclass(frozen=True)
class Search:
    """One key to find the best launch for: a pass of a case."""

    case: Case
    direction: str

    @property
    def stream(self) -> torch.dtype:
        """Of what is normalised."""
        return getattr(torch, self.case.residual_dtype or self.case.x_dtype)

    @property
    def key(self) -> str:
        n, out = self.case.n, getattr(torch, self.case.out_dtype)
        if self.direction == "forward":
            return launches.forward_key(n, self.stream, out)
        return launches.backward_key(n, self.stream, out, self.case.residual_dtype is not None)

    @property
    def served(self) -> list[Case]:
        """The cases that take this launch: the norm's forward also serves its add."""
        if self.direction == "backward" or self.case.residual_dtype:
            return [self.case]
        return [
            self.case,
            replace(self.case, op="add_rms_norm", residual_dtype=self.case.x_dtype),
        ]

    @property
    def checked(self) -> list[Case]:
        """What the launch must be right for, and keep to the registers: a wider weight, too."""
        wider = (replace(case, weight_dtype="float32") for case in self.served)
        return list(dict.fromkeys([*self.served, *wider]))

    @property
    def kernel(self):
        if self.direction == "forward":
            return triton_rms_norm._rms_norm_forward_kernel
        return triton_rms_norm._rms_norm_backward_kernel

    def candidates(self, gpu: launches.Gpu) -> Iterator[Launch]:
        """Launches of 16 bytes to 32 elements a thread whose tiles of prefetch fit shared memory.

        Rows are one tile, or blocks: in the forward of 256 columns and more that leave no rest, or
        of 1024 and more, which are read twice; in the backward only where a tile does not fit.
        """
        n, forward = self.case.n, self.direction == "forward"
        read = sum(getattr(torch, name).itemsize for name in self.case.traffic(self.direction)[0])
        least = 16 // self.stream.itemsize
        whole = triton.next_power_of_2(n)
        if forward:
            blocks = {c for c in (whole // 4, whole // 2) if c >= 1024 or (c >= 256 and n % c == 0)}
        else:
            blocks = {2048, 4096, 8192} if n > 8192 else set()
        for columns in blocks | ({whole} if whole <= (32768 if forward else 16384) else set()):
            for rows, warps in product((2**i for i in range(8)), (1, 2, 4, 8, 16, 32)):
                tile = rows * columns
                if not (512 <= tile <= max(16384, columns) and least <= tile // (32 * warps) <= 32):
                    continue
                if forward:
                    yield Launch(rows, columns, warps)
                    continue
                for programs in (1, 2, 3, 4, 6, 8, 12):
                    fit = launches.tiles_that_fit(tile * read, programs, gpu.shared_memory)
                    if programs * warps <= 64:
                        for stages in range(2, min(4, fit + 1) + 1):
                            yield Launch(rows, columns, warps, programs, stages)


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    if missing := missing_gpu():
        print(f"python -m kernels.tune needs a GPU: {missing}", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    searches = [
        search
        for search in all_searches(arguments.n, arguments.forms)
        if search.direction in arguments.passes
    ]
    timer = Timer()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    workers = min(os.cpu_count() or 1, 14)
    with (
        ProcessPoolExecutor(workers, get_context("spawn")) as pool,
        Progress(*columns, TimeElapsedColumn()) as bar,
    ):
        task = bar.add_task("compiling", total=len(searches))
        compiled = [
            pool.submit(compile_candidate, search, candidate)
            for search in searches
            for candidate in compiled_once(search.candidates(launches.gpu(device)))
        ]
        for future in compiled:
            future.result()
        for search in bar.track(searches, task_id=task):
            bar.update(task, description=search.key)
            best, us, before = fastest(search, device, timer)
            if best is None:
                bar.console.print(f"{search.key}: no candidate runs and is right, nothing changes")
                continue
            try:
                save({search.key: best}, device, arguments.out)
            except (OSError, ValueError) as error:
                print(f"The launches could not be written: {error}", file=sys.stderr)
                return 2
            bar.console.print(
                f"{search.key}: {us:.1f} us (was {before:.1f}) {best}", highlight=False
            )
    print(f"What was found for {launches.tuned_for(device)} is in {arguments.out}")
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=__doc__)
    parser.add_argument(
        "--n",
        type=integers,
        default=WIDTHS,
        help="row lengths up to 32768, comma-separated; those of common models by default",
    )
    parser.add_argument(
        "--forms",
        type=names,
        default=FORMS,
        help="norm, add: all bfloat16; norm32, add32: all float32; mixed: bfloat16 branch and "
        "output, float32 stream and weight; all of them by default",
    )
    parser.add_argument("--passes", type=names, default=PASSES, help="forward, backward, or both")
    parser.add_argument(
        "--out",
        type=Path,
        default=launches.tuned_file(),
        help="file that the launches are added to; by default the one that later runs read",
    )
    arguments = parser.parse_args(argv)
    problems = [
        f"--{flag}: there is no {', '.join(unknown)}; there are {', '.join(known)}"
        for flag, known in (("forms", FORMS), ("passes", PASSES))
        if (unknown := set(getattr(arguments, flag)) - set(known))
    ]
    if wrong := [n for n in arguments.n if n > 32768]:
        problems.append(f"--n: {wrong} is more than 32768")
    if arguments.out.is_dir():
        problems.append(f"--out: {arguments.out} is a folder; name a file")
    if problems:
        parser.error("\n".join(problems))
    return arguments


def all_searches(widths: Iterable[int], forms: Iterable[str]) -> Iterator[Search]:
    """Every pass to tune. The add's forward takes the launch of the norm in the stream's dtype."""
    rows = {n: rows for rows, n in DESIGN_SHAPES}
    for n in widths:
        shape = (rows.get(n, default_rows(n, "bfloat16")), n)
        mixed = ("bfloat16", "float32", "float32", "bfloat16")
        cases = {
            "norm": norm_case("tune", *shape),
            "add": add_case("tune", *shape),
            "mixed": Case("tune", "add_rms_norm", *shape, *mixed),
            "norm32": norm_case("tune", *shape, "float32"),
            "add32": add_case("tune", *shape, "float32"),
        }
        for form in forms:
            if not form.startswith("add"):
                yield Search(cases[form], "forward")
            yield Search(cases[form], "backward")


def compiled_once(candidates: Iterable[Launch]) -> set[Launch]:
    """Candidates that differ in what is compiled, not only in the grid."""
    return {replace(candidate, programs_per_sm=1) for candidate in candidates}


def compile_candidate(search: Search, candidate: Launch) -> None:
    """Run a candidate once on a few rows, in a process of its own: fills Triton's disk cache."""
    launches.use(torch.device("cuda", 0), search.key, candidate)
    with contextlib.suppress(triton.runtime.errors.OutOfResources):  # fastest() leaves it out too
        for case in search.checked:
            Problem.random(replace(case, rows=3 * candidate.rows), "cuda").results(functional.norm)


def fastest(
    search: Search, device: torch.device, timer: Timer
) -> tuple[Launch | None, float, float]:
    """The launch with the smallest median time, that time, and the time of the present launch.

    Of a launch that serves several cases, a time is their geometric mean. The first is None if
    no candidate runs on this GPU and is right.
    """
    checked = [Problem.random(replace(c, rows=CHECKED_ROWS), device) for c in search.checked]
    arms = [make_arm(case, search.direction, device) for case in search.served]

    def us(calls: int) -> float:
        return geometric_mean(median(timer.gpu_us(arm, calls, cold=True)) for arm in arms)

    present = us(30)
    times, right = {}, {}
    for candidate in search.candidates(launches.gpu(device)):
        launches.use(device, search.key, candidate)
        compiled = replace(candidate, programs_per_sm=1)
        if compiled not in right:
            right[compiled] = all(is_right(search, problem) for problem in checked)
        if right[compiled]:
            times[candidate] = us(8)
    if not times:
        return None, present, present
    finalists = sorted(times, key=times.get)[:FINALISTS]
    samples = {candidate: [] for candidate in finalists}
    for _ in range(5):
        for candidate in finalists:
            launches.use(device, search.key, candidate)
            samples[candidate].append(us(15))
    best = min(finalists, key=lambda candidate: median(samples[candidate]))
    launches.use(device, search.key, best)
    return best, median(samples[best]), present


def is_right(search: Search, problem: Problem) -> bool:
    """Whether the launch in use can run, keeps to the registers and gives the right results."""
    launcher.forget()
    try:
        errors = problem.errors(problem.results(functional.norm))
    except triton.runtime.errors.OutOfResources:
        return False
    right = all(error <= problem.tolerance(name) for name, error in errors.items())
    return right and launcher.spills(search.kernel) == 0


def make_arm(case: Case, direction: str, device: torch.device) -> Arm:
    """A pass by itself, without autograd, on inputs of the case's size."""
    x, out = (getattr(torch, name) for name in (case.x_dtype, case.out_dtype))
    residual = case.residual_dtype and getattr(torch, case.residual_dtype)

    def normal(dtype, *shape):
        return torch.randn(shape, device=device).to(dtype) if dtype else None

    shape = (case.rows, case.n)
    branch, stream = normal(x, *shape), normal(residual, *shape)
    weight = normal(getattr(torch, case.weight_dtype), case.n)
    rstd = torch.rand(case.rows, device=device) + 0.5
    if direction == "forward":
        y, h = branch.to(out), None if stream is None else torch.empty_like(stream)
        return Arm(lambda _: triton_rms_norm.forward(branch, stream, weight, EPS, y, h, rstd))
    h = branch if stream is None else stream
    dy, dh = normal(out, *shape), normal(residual, *shape)
    dx, dw = torch.empty_like(branch), torch.empty_like(weight)
    dr = torch.empty_like(h) if residual not in (None, x) else None
    return Arm(lambda _: triton_rms_norm.backward(dy, dh, h, weight, rstd, dx, dr, dw))


def save(found: dict[str, Launch], device: torch.device, file: Path) -> None:
    """Add the launches to the file, which appears whole or not at all."""
    content = launches.read_launches(file) if file.exists() else {}
    content.setdefault(launches.tuned_for(device), {}).update(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    plain = {
        name: {key: asdict(launch) for key, launch in sorted(entries.items())}
        for name, entries in content.items()
    }
    lines = json.dumps(plain, indent=1)
    temporary.write_text(lines + "\n")
    os.replace(temporary, file)


if __name__ == "__main__":
    run(main)
