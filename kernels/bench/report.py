"""CSV file, plot and tables out of the benchmark's kernels.json.

`python -m kernels.bench.report FOLDER [FOLDER ...] --out FOLDER` makes them for one run, or for
several runs that measured different cases in the same environment.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kernels.bench.targets import PEERS, Verdict, by_case, judge

RESULTS, CSV, PLOT, TABLES = "kernels.json", "kernels.csv", "kernels.png", "kernels.md"
# Runs are only put together if these agree: figures from two GPUs do not belong in one table.
SAME_ENVIRONMENT = ("gpu", "driver_version", "torch", "triton", "liger", "quack", "git_revision")
TEXT, NUMBER, NONE = str, (int, float), type(None)
ROW = {
    **dict.fromkeys(("group", "op", "pass", "impl", "x_dtype", "weight_dtype", "out_dtype"), TEXT),
    **dict.fromkeys(("mode", "residual_dtype", "reason"), (TEXT, NONE)),
    **dict.fromkeys(("rows", "n", "bytes"), int),
    "ceiling_us": NUMBER,
    **dict.fromkeys(("gb_s", "fraction", "host_us", "first_call_s"), (*NUMBER, NONE)),
    **dict.fromkeys(("us", "us_warm", "error"), (dict, NONE)),
}
IMPLEMENTATIONS = ("triton", *PEERS, "eager", "triton-atomic")
COLORS = ("#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#999999", "#E69F00")
PLOTTED_GROUPS = ("design", "widths", "sweep")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help=f"folders that hold a {RESULTS}")
    parser.add_argument("--out", type=Path, help="folder to write to; by default the only folder")
    arguments = parser.parse_args(argv)
    if len(arguments.folders) > 1 and arguments.out is None:
        parser.error("several folders need --out, the folder for what they make together")
    out = arguments.out or arguments.folders[0]
    try:
        results = merge([load(folder) for folder in arguments.folders])
        check_kept(results, out)
        write(results, out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(targets_table(results))
    return 0


def percentiles(samples: list[float] | list[list[float]]) -> dict[str, float]:
    """p10, p50 and p90 of all samples, rounded to 3 decimals."""
    values = np.percentile(samples, [10, 50, 90])
    return {name: round(float(v), 3) for name, v in zip(("p10", "p50", "p90"), values, strict=True)}


# --- files ------------------------------------------------------------------------------------


def load(folder: Path) -> dict:
    """The results in a folder. ValueError if its kernels.json is not one of ours."""
    path = folder / RESULTS
    try:
        results = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not what a benchmark writes: {error}") from error
    try:
        environment, rows = results["environment"], results["rows"]
        lacking = set().union(
            {"gpu"} - environment.keys(), *(ROW.keys() - row.keys() for row in rows)
        )
    except (KeyError, TypeError, AttributeError):
        lacking = {"environment", "rows"}
    if lacking:
        names = ", ".join(sorted(lacking))
        raise ValueError(f"{path} is not what a benchmark writes: it lacks {names}")
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not what a benchmark writes: rows is {rows!r}")
    for row in rows:
        for key, kind in ROW.items():
            if not isinstance(row[key], kind):
                raise ValueError(f"{path} is not what a benchmark writes: {key} is {row[key]!r}")
    return results


def check_kept(results: dict, folder: Path) -> None:
    """ValueError if the folder's kernels.json has what would be lost by writing the results."""
    path = folder / RESULTS
    if path.exists() and any(row not in results["rows"] for row in load(folder)["rows"]):
        raise ValueError(f"{path} has other measurements, which would be lost: name another folder")


def merge(runs: list[dict]) -> dict:
    """One set of results from runs over different cases; environment["parts"] keeps each run's.

    Raises:
        ValueError: if GPU, driver, package versions or revision differ, or a case was run twice.
    """
    if len(runs) == 1:
        return runs[0]
    first = runs[0]["environment"]
    for key in SAME_ENVIRONMENT:
        if len(values := {str(run["environment"].get(key)) for run in runs}) > 1:
            raise ValueError(f"the runs differ in {key}: {', '.join(sorted(values))}")
    rows = [row for run in runs for row in run["rows"]]
    labels = [label(row) + str((row["pass"], row["impl"], row["mode"])) for row in rows]
    if twice := sorted({name for name in labels if labels.count(name) > 1}):
        raise ValueError(f"measured in more than one of the runs: {twice[0]}")
    return {"environment": first | {"parts": [run["environment"] for run in runs]}, "rows": rows}


def save(results: dict, folder: Path) -> None:
    """Write kernels.json, a row a line, so that a run that is cut off keeps what it measured."""
    rows = ",\n".join(json.dumps(row) for row in results["rows"])
    environment = json.dumps(results["environment"], indent=1)
    _write_text(folder / RESULTS, f'{{"environment": {environment},\n"rows": [\n{rows}\n]}}\n')


def write(results: dict, folder: Path) -> None:
    """Write kernels.json and all that is made of it: CSV, plot and tables."""
    save(results, folder)
    write_csv(results["rows"], folder / CSV)
    plot(results, folder / PLOT)
    _write_text(folder / TABLES, f"{targets_table(results)}\n\n{tables(results)}\n")


def write_csv(rows: list[dict], path: Path) -> None:
    """The rows without their samples; us and error as one column for each of their parts."""
    flat = [_flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(flat)
    temporary.replace(path)


def _flatten(row: dict) -> dict:
    flat = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{key}_{part}": part_value for part, part_value in value.items()}
        elif key not in ("samples_us", "us", "us_warm", "error"):
            flat[key] = value
    return flat


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


# --- plot -------------------------------------------------------------------------------------


def plot(results: dict, path: Path) -> None:
    """Bandwidth of rms_norm over N, forward and backward, in the first dtype that was measured."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, direction in zip(axes, ("forward", "backward"), strict=True):
        lines = bandwidth_over_n(results["rows"], direction)
        for name in sorted(lines, key=_drawing_order):
            ax.plot(*zip(*lines[name], strict=True), label=name, **_style(name))
        ticks = sorted({n for points in lines.values() for n, _ in points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(n) for n in ticks], rotation=60, fontsize=8)
        ax.minorticks_off()
        ax.set(title=direction, xlabel="N, features in a row")
        ax.grid(alpha=0.25)
    axes[0].set_ylabel("GB/s of the minimum bytes, L2 cold")
    axes[0].set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"RMSNorm on {results['environment']['gpu']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)


def _drawing_order(name: str) -> int:
    return (*IMPLEMENTATIONS, name).index(name)


def _style(name: str) -> dict:
    if name == "ceiling":
        return {"color": "#555555", "linestyle": "--"}
    color = COLORS[IMPLEMENTATIONS.index(name)] if name in IMPLEMENTATIONS else None
    width, zorder = (2.4, 3) if name == "triton" else (1.3, 2)
    return {"color": color, "marker": "o", "markersize": 4, "linewidth": width, "zorder": zorder}


def bandwidth_over_n(rows: list[dict], direction: str) -> dict[str, list[tuple[int, float]]]:
    """(N, GB/s) by implementation, and of the "ceiling"; of two with one N, that with more rows."""
    rows = [r for r in rows if r["op"] == "rms_norm" and r["group"] in PLOTTED_GROUPS]
    dtypes = [row["x_dtype"] for row in rows][:1]
    lines: dict[str, dict[int, float]] = {}
    for case, found in sorted(
        by_case([row for row in rows if row["x_dtype"] in dtypes]), key=lambda c: c[0]["rows"]
    ):
        if case["pass"] != direction:
            continue
        for name, row in found.items():
            if row["us"]:
                lines.setdefault(name, {})[case["n"]] = row["gb_s"]
                ceiling = row["bytes"] / row["ceiling_us"] / 1000
                lines.setdefault("ceiling", {})[case["n"]] = ceiling
    return {name: sorted(points.items()) for name, points in lines.items()}


# --- tables -----------------------------------------------------------------------------------


def targets_table(results: dict) -> str:
    """Markdown: every target in every case with what was measured, misses included.

    Beside it what a kernel at the ceiling would get, where that is less than what was aimed at.
    """
    verdicts = judge(results["rows"])
    if not verdicts:
        return "No target is stated for what was measured."
    header = ["target", "case", "pass", "at least", "measured", "verdict", "at the ceiling"]
    lines = [_line(header), _line(["---"] * len(header))]
    lines += [_verdict_line(verdict) for verdict in verdicts]
    counts = {v.verdict: sum(w.verdict == v.verdict for w in verdicts) for v in verdicts}
    total = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    beyond = sum(_beyond_ceiling(verdict) for verdict in verdicts)
    summary = f"{len(verdicts)} targets: {total}; {beyond} are out of a kernel's reach."
    return "\n".join(["## Targets", "", *lines, "", summary])


def _beyond_ceiling(verdict: Verdict) -> bool:
    return verdict.at_ceiling is not None and verdict.at_ceiling < verdict.target.at_least


def _verdict_line(verdict: Verdict) -> str:
    measured = "" if verdict.measured is None else f"{verdict.measured:.3f}"
    shown = verdict.verdict if verdict.verdict == "met" else f"**{verdict.verdict}**"
    passes = verdict.case["pass"] if verdict.target.has_ceiling else "both"
    at_least = f"{verdict.target.at_least:.2f}"
    bound = f"{verdict.at_ceiling:.3f}" if _beyond_ceiling(verdict) else ""
    text, case = verdict.target.text, label(verdict.case)
    return _line([text, case, passes, at_least, measured, shown, bound])


def tables(results: dict) -> str:
    """Markdown: medians of every implementation, host time, and why a figure is missing."""
    cases = by_case(results["rows"])
    names = list(dict.fromkeys(name for _, found in cases for name in found))
    names.sort(key=_drawing_order)
    header = ["case", "pass", *names, "ceiling", "triton's part of it"]
    lines = ["## Microseconds (p50, L2 cold)", "", _line(header), _line(["---"] * len(header))]
    for case, found in cases:
        any_row = next(iter(found.values()))
        fraction = found.get("triton", {}).get("fraction")
        cells = [_cell(found.get(name), "us") for name in names]
        ceiling = [f"{any_row['ceiling_us']:.1f}", f"{fraction:.3f}" if fraction else ""]
        lines.append(_line([label(case), case["pass"], *cells, *ceiling]))
    header = ["case", *names]
    lines += ["", "## Host time of forward + backward, microseconds (p50, eager mode)", ""]
    lines += [_line(header), _line(["---"] * len(header))]
    hosts = {label(case): [_cell(found.get(n), "host_us") for n in names] for case, found in cases}
    lines += [_line([case, *cells]) for case, cells in hosts.items()]
    return "\n".join([*lines, "", *_reasons(results["rows"])])


def summary(rows: list[dict]) -> str:
    """A line for each pass of one case: the implementations' medians, fastest first."""
    lines = []
    for case, found in by_case(rows):
        timed = {name: row for name, row in found.items() if row["us"]}
        order = sorted(timed, key=lambda name: timed[name]["us"]["p50"])
        figures = "  ".join(f"{name} {timed[name]['us']['p50']:.1f}" for name in order)
        ceiling = next(iter(found.values()))["ceiling_us"]
        lines.append(f"{label(case)} {case['pass']}: {figures}  (ceiling {ceiling:.1f} us)")
    return "\n".join([*lines, *_reasons(rows)])


def label(case: dict) -> str:
    """Group, operator, shape and dtypes of a case or row."""
    dtypes = [case["x_dtype"], case["residual_dtype"], case["out_dtype"]]
    dtypes = list(dict.fromkeys(dtype for dtype in dtypes if dtype))
    return f"{case['group']}: {case['op']} {case['rows']} x {case['n']} {'/'.join(dtypes)}"


def _cell(row: dict | None, key: str) -> str:
    if row is None or row[key] is None:
        return ""
    value = f"{row['us']['p50']:.1f}" if key == "us" else f"{row[key]:.0f}"
    return f"{value} (max-autotune)" if row["mode"] == "max-autotune" else value


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _reasons(rows: list[dict]) -> list[str]:
    """Why implementations have no time, each reason once with the cases it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["reason"]:
            cases = reasons.setdefault((row["impl"], row["reason"]), [])
            if label(row) not in cases:
                cases.append(label(row))
    return [f"- {impl}: {reason} ({'; '.join(cases)})" for (impl, reason), cases in reasons.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
