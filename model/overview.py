"""Finished runs side by side: `python -m model.overview RUN RUN ... --out picture.png`.

Reads each run's summary.json and metrics.csv; draws loss, step time and memory, prints a table.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from model.files import replacing
from model.loggers import read_metrics

COLOURS = {"eager": "#999999", "compiled": "#D55E00", "triton": "#000000"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m model.overview", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", required=True, type=Path, help="PNG file to write")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in arguments.runs]
    except (OSError, ValueError) as error:
        parser.error(f"not a finished run: {error}")
    label(runs)
    figure = draw(runs)
    try:
        with replacing(arguments.out) as temporary:
            figure.savefig(temporary, format="png")
    except OSError as error:
        parser.error(f"{arguments.out} cannot be written: {error.strerror}")
    print(f"{markdown_table(runs)}\n\nWritten to {arguments.out}")
    return 0


def read_run(folder: Path) -> dict[str, Any]:
    """The summary of a run, with its metrics by step under "rows".

    Raises:
        OSError, ValueError: if it has no summary, or fewer than the two steps or the one validation
            that its figures take.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
        known = summary["step_ms"]["p50"], summary["val_loss"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder}/summary.json is not what train.py writes") from None
    if None in known:
        raise ValueError(f"{folder} has fewer than two steps or no validation loss")
    return summary | {"rows": read_metrics(folder / "metrics.csv")}


def label(runs: list[dict[str, Any]]) -> None:
    """Give each run a "label" and a "colour": its norm's, or its own where norms repeat."""
    by_norm = len({run["norm"] for run in runs}) == len(runs)
    for number, run in enumerate(runs):
        run["label"] = run["norm"] if by_norm else run["name"]
        run["colour"] = COLOURS.get(run["norm"], f"C{number}") if by_norm else f"C{number}"


def draw(runs: list[dict[str, Any]]) -> Figure:
    """Loss over steps of labelled runs, and bars of the median step time and, of runs on a GPU, of
    the peak memory."""
    figure = Figure(figsize=(11, 4), dpi=150, layout="constrained")
    on_gpu = any(run["peak_allocated_gib"] for run in runs)
    loss, time, *memory = figure.subplots(1, 2 + on_gpu, width_ratios=(2.2, 1, 1)[: 2 + on_gpu])
    for run, width in zip(runs, range(2 * len(runs), 0, -2), strict=True):  # all stay visible
        for key, style in (
            ("loss", {}),
            ("val_loss", {"marker": "o", "ls": "--", "ms": 2 + width}),
        ):
            points = {step: row[key] for step, row in run["rows"].items() if key in row}
            loss.plot(
                *zip(*points.items(), strict=True),
                label=run["label"] + (", validation" if key == "val_loss" else ""),
                color=run["colour"],
                lw=width,
                **style,
            )
    loss.set(xlabel="step", ylabel="cross-entropy (nats per token)", title="loss")
    loss.legend(fontsize="small")
    _bars(time, runs, [run["step_ms"]["p50"] for run in runs], "ms a step (median)", "{:.1f}")
    for axes in memory:
        peaks = [run["peak_allocated_gib"] or 0 for run in runs]
        _bars(axes, runs, peaks, "peak GiB allocated", "{:.2f}")
    facts = zip(*map(_about, runs), strict=True)
    figure.suptitle(", ".join(" and ".join(dict.fromkeys(fact)) for fact in facts))
    return figure


def _about(run: dict[str, Any]) -> list[str]:
    """What a title says of a run, once if it is the same of all."""
    on, gpu = run["environment"], run["peak_allocated_gib"]
    return [
        f"{run['parameters'] / 1e6:.0f}M GPT",
        f"{run['tokens_per_step']:,} tokens a step",
        run["precision"],
        f"on {on['gpu'] if gpu else 'a CPU: times are no findings'} "
        f"(torch {on['torch']}, triton {on['triton']})",
    ]


def _bars(axes, runs: list[dict[str, Any]], values: list[float], title: str, form: str) -> None:
    labels = [run["label"] for run in runs]
    bars = axes.bar(range(len(runs)), values, color=[run["colour"] for run in runs])
    axes.set_xticks(range(len(runs)), labels)
    axes.bar_label(bars, [form.format(value) for value in values])
    axes.set_title(title)
    axes.margins(y=0.1)


def markdown_table(runs: list[dict[str, Any]]) -> str:
    """One row a labelled run: step time, tokens a second, MFU, memory and final losses."""
    lines = [
        "| run | ms a step p50 (p10 to p90) | first step, s | tokens/s | MFU "
        "| peak GiB allocated / reserved | train loss | validation loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        ms = run["step_ms"]
        gib = [run["peak_allocated_gib"], run["peak_reserved_gib"]]
        lines.append(
            f"| {run['label']} | {ms['p50']:.1f} ({ms['p10']:.1f} to {ms['p90']:.1f}) "
            f"| {run['first_step_ms'] / 1000:.1f} | {run['tokens_per_s']:,.0f} "
            f"| {'n/a' if run['mfu'] is None else format(run['mfu'], '.1%')} "
            f"| {' / '.join('n/a' if value is None else f'{value:.2f}' for value in gib)} "
            f"| {run['train_loss']:.3f} | {run['val_loss']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
