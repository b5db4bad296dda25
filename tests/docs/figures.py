"""The tables of README.md, docs/kernel.md and results/README.md, from results/ and kernels/tuned/.

python -m tests.docs.figures    # rewrites them
"""

import csv
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

from kernels.bench.targets import TARGETS, Verdict, by_case, judge
from model import overview
from tests.docs.blocks import ROOT

RESULTS, TUNED = ROOT / "results", ROOT / "kernels/tuned"
H200 = RESULTS / "h200"
NORMS = ("eager", "compiled", "triton")
INTERVAL = "{median:.3f} [{low:.3f}, {high:.3f}]"
Rows = list[list[str]]


def read(folder: str) -> dict:
    return json.loads((RESULTS / folder / "results.json").read_text())


def measured() -> list[dict]:
    return json.loads((H200 / "kernels.json").read_text())["rows"]


def kernels(group: str, direction: str, shape: str) -> dict[str, dict]:
    """What was measured of each implementation at a shape such as "32768 x 768"."""
    rows, n = map(int, shape.split(" x "))
    wanted = {"group": group, "pass": direction, "rows": rows, "n": n}
    [found] = [found for case, found in by_case(measured()) if wanted.items() <= case.items()]
    return found


def runs(shown: Rows) -> Rows:
    found = [overview.read_run(H200 / "train" / norm) for norm, *_ in shown]
    overview.label(found)
    return cells(overview.markdown_table(found).splitlines()[2:])


def backward_passes(shown: Rows) -> Rows:
    rows = []
    for shape, *_ in shown:
        found = kernels("design", "backward", shape)
        us = [found[name]["us"]["p50"] for name in ("triton", "compiled", "quack", "liger", "aten")]
        rows.append([shape, *(f"{t:.1f}" for t in (*us, found["triton"]["ceiling_us"]))])
    return rows


def targets(_: Rows) -> Rows:
    verdicts, rows = judge(measured()), []
    for target in TARGETS:
        found = [verdict for verdict in verdicts if verdict.target == target]
        what = [target.text, *(target.passes if target.has_ceiling else [])]
        missed = [verdict for verdict in found if verdict.verdict == "missed"]
        met = sum(verdict.verdict == "met" for verdict in found)
        rows.append(
            [
                ", ".join(what),
                f"{target.at_least:.2f}",
                f"{met} of {len(found)}",
                "; ".join(map(miss, missed)),
            ]
        )
    return rows


def miss(verdict: Verdict) -> str:
    """Where a target was missed, by how much, and whether a kernel at the ceiling would miss it."""
    case, target = verdict.case, verdict.target
    where = [
        f"{case['rows']} x {case['n']}" if case["group"] == "few_rows" else str(case["n"]),
        *([case["x_dtype"]] if case["x_dtype"] != "bfloat16" else []),
        *([case["pass"]] if len(target.passes) > 1 else []),
    ]
    out_of_reach = verdict.at_ceiling < target.at_least
    return f"{' '.join(where)}: {verdict.measured:.3f}{'*' * out_of_reach}"


def comparisons(_: Rows) -> Rows:
    rows = []
    for model, stream in itertools.product(("eager", "compiled"), ("bfloat16", "float32")):
        result = read(f"h200/compare-{stream}-{model}")
        for norm in NORMS:
            variant = result["speed"]["variants"][norm]
            rows.append(
                [
                    f"{model}, {stream}" if norm == "eager" else "",
                    norm,
                    f"{variant['step_ms']['p50']:.1f}",
                    INTERVAL.format(**variant["speedup"]) if norm != "eager" else "",
                    f"{result['profile'][norm]['norm_share']:.1%}",
                    f"{result['memory'][norm]['peak_allocated_gib']:.2f}",
                ]
            )
    return rows


def small_batches(shown: Rows) -> Rows:
    rows = []
    for scope, *_ in shown:
        variants = read(f"h200-batch4/{scope}")["speed"]["variants"]
        rows.append(
            [
                scope,
                *(f"{variants[norm]['step_ms']['p50']:.2f}" for norm in NORMS),
                INTERVAL.format(**variants["triton"]["vs"]["compiled"]),
                f"{variants['triton']['busy']:.0%}",
            ]
        )
    return rows


def two_gpus(_: Rows) -> Rows:
    rows = []
    for scope, norm in itertools.product(("eager", "compiled"), NORMS):
        scaling = read(f"h200-x2/scaling-{scope}")["scaling"]
        both = [scaling[strategy]["variants"][norm] for strategy in ("ddp-2", "fsdp-2")]
        cells = [
            (f"{found['tokens_per_s']:,.0f}", f"{found['efficiency']['median']:.1%}")
            for found in both
        ]
        rows.append([scope if norm == "eager" else "", norm, *itertools.chain(*cells)])
    return rows


def passes(shown: Rows) -> Rows:
    rows = []
    for shape, name, *_ in shown:
        group = "add" if name.startswith("add") else "design"
        found = kernels(group, name.removeprefix("add "), shape)["triton"]
        elements = found["rows"] * found["n"]
        rows.append(
            [
                shape,
                name,
                f"{found['bytes'] / elements:g}",
                f"{found['us']['p50']:.1f}",
                f"{found['gb_s'] / 1000:.2f}",
                f"{found['fraction']:.2f}",
            ]
        )
    return rows


def launches(shown: Rows) -> Rows:
    [found] = json.loads((TUNED / "sm_90.json").read_text()).values()
    keys = {
        "forward": ["rows", "columns", "warps"],
        "backward": ["rows", "warps", "programs_per_sm", "stages"],
    }
    return [
        [
            n,
            *(
                ", ".join(str(found[f"{direction} {n} 16-bit 16-bit"][key]) for key in names)
                for direction, names in keys.items()
            ),
        ]
        for n, *_ in shown
    ]


def two_gpu_losses(shown: Rows) -> Rows:
    rows = []
    for name, *_ in shown:
        one, ddp, fsdp = (
            [loss_of(run, name) for kind in kinds for run in training_runs(kind)]
            for kinds in (("one", "null"), ("ddp",), ("fsdp",))
        )
        mean, sd = statistics.mean(one), statistics.stdev(one)
        error = sd * math.sqrt(1 + 1 / len(one))  # of one more run's distance from the mean
        farthest = max(abs(loss - mean) / error for loss in ddp + fsdp)
        listed = [", ".join(f"{loss:.4f}" for loss in found) for found in (ddp, fsdp)]
        rows.append([name, f"{mean:.4f} ({sd:.4f})", *listed, f"{farthest:.2f}"])
    return rows


def training_runs(kind: str) -> list[Path]:
    """On one or two GPUs, by norm: eager, compiled, triton."""
    runs = (RESULTS / "h200-x2/train").glob(f"{kind}-*")
    return sorted(runs, key=lambda run: NORMS.index(run.name.split("-")[1]))


def loss_of(run: Path, name: str) -> float:
    """The validation loss of a run, or its training loss in "step 10"."""
    if name == "validation":
        return json.loads((run / "summary.json").read_text())["val_loss"]
    with (run / "metrics.csv").open() as file:
        return next(
            float(row["loss"]) for row in csv.DictReader(file) if f"step {row['step']}" == name
        )


README, KERNEL = ROOT / "README.md", ROOT / "docs/kernel.md"
TABLES: dict[tuple[Path, str], Callable[[Rows], Rows]] = {  # by page and how the header begins
    (README, "run | ms a step"): runs,
    (README, "rows x N"): backward_passes,
    (README, "aimed at"): targets,
    (README, "model, stream"): comparisons,
    (README, "model of 4 x 1024"): small_batches,
    (README, "model on two GPUs"): two_gpus,
    (KERNEL, "rows x N"): passes,
    (KERNEL, "N, all bfloat16"): launches,
    (RESULTS / "README.md", "loss |"): two_gpu_losses,
}


def lines_of(page: Path, header: str) -> list[str]:
    """The table's lines below its header and rule."""
    text = page.read_text()
    return text[text.index(f"| {header}") :].split("\n\n")[0].splitlines()[2:]


def cells(lines: list[str]) -> Rows:
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def main() -> None:
    for (page, header), make in TABLES.items():
        old = lines_of(page, header)
        indent = " " * (len(old[0]) - len(old[0].lstrip()))
        new = [
            indent + "|" + "".join(f" {cell} |" if cell else " |" for cell in row)
            for row in make(cells(old))
        ]
        page.write_text(page.read_text().replace("\n".join(old), "\n".join(new)))


if __name__ == "__main__":
    main()
