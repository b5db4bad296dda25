"""The report's pictures, each drawn from one result: step times, their parts, memory, losses."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.statistics import smooth
from kernels.bench.report import COLORS, IMPLEMENTATIONS
from model.files import replacing

# The benchmark's colour for every norm it knows; others get these in the order they are named.
NORM_COLORS = dict(zip(IMPLEMENTATIONS, COLORS, strict=True))
OTHER_COLORS = ("#0072B2", "#882255", "#44AA99", "#E69F00")
BAND = "#DCDCDC"
# A picture fits a phone's screen without its letters becoming unreadable.
WIDTH_INCHES, DPI = 5.6, 200
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def norm_colors(norms: Iterable[str]) -> dict[str, str]:
    """A colour for each norm, the same in every picture of a report."""
    others = [norm for norm in dict.fromkeys(norms) if norm not in NORM_COLORS]
    return NORM_COLORS | {n: OTHER_COLORS[i % len(OTHER_COLORS)] for i, n in enumerate(others)}


def save(
    plot: Callable[[dict, dict[str, str]], Figure], result: dict, colors: dict[str, str], path: Path
) -> None:
    """Draw one of the pictures below and write it as a PNG."""
    with rc_context(STYLE), replacing(path) as temporary:
        plot(result, colors).savefig(temporary, dpi=DPI, format="png")


# --- speed ------------------------------------------------------------------------------------


def step_times(result: dict, colors: dict[str, str]) -> Figure:
    """Block medians of every process and round, above the speedups that come from them."""
    speed, norms = result["speed"], list(result["speed"]["variants"])
    figure, (times, speedups) = _figure(2.0 + 1.1 * len(norms), 2, height_ratios=(3, 2))
    _rows(times, norms)
    baseline = speed["variants"].get(result["baseline"])
    if baseline:
        median = baseline["step_ms"]["p50"]
        _band(times, median / speed["aa"]["high"], median / speed["aa"]["low"])
    for row, norm in enumerate(norms):
        _strip(times, row, speed["variants"][norm], colors[norm])
    times.set(title="A dot: median of a block of steps; a line: one process", xlabel="ms a step")
    compared = [norm for norm in norms if "speedup" in speed["variants"][norm]]
    _rows(speedups, compared)
    _band(speedups, speed["aa"]["low"], speed["aa"]["high"])
    for row, norm in enumerate(compared):
        _interval(speedups, row, speed["variants"][norm], colors[norm])
    speedups.set(title="Median and 95% interval; small: each process; grey: A/A interval")
    speedups.set_xlabel(f"times as fast as {result['baseline']}")
    return figure


def _strip(ax: Axes, row: int, variant: dict, color: str) -> None:
    processes = variant["samples_ms"]
    for place, samples in zip(_places(row, len(processes)), processes, strict=True):
        ax.plot(samples, [place] * len(samples), "o", color=color, alpha=0.35, markersize=4, mew=0)
        ax.plot(np.median(samples), place, "|", color=color, markersize=9, mew=2)


def _interval(ax: Axes, row: int, variant: dict, color: str) -> None:
    _error_bar(ax, variant["speedup"], row - 0.25, color, "median", markersize=7, elinewidth=2.5)
    processes = variant["processes"]
    for place, process in zip(_places(row + 0.15, len(processes)), processes, strict=True):
        _error_bar(ax, process, place, color, "median", markersize=3, elinewidth=1, alpha=0.6)


def _places(middle: float, n: int) -> np.ndarray:
    """n heights around a middle, within half a row."""
    return middle + 0.5 * ((np.arange(n) + 0.5) / n - 0.5)


# --- profile and memory -----------------------------------------------------------------------


def time_parts(result: dict, colors: dict[str, str]) -> Figure:
    """Milliseconds of a step in the norm's kernels, forward and backward, and in all the rest."""
    profile = result["profile"]
    figure, (ax,) = _figure(1.3 + 0.45 * len(profile), 1)
    _rows(ax, list(profile), [_share(found) for found in profile.values()])
    for row, (norm, found) in enumerate(profile.items()):
        forward, backward = found["forward_ms"] or 0, found["backward_ms"] or 0
        rest = max(found["step_ms"] - forward - backward, 0)
        ax.barh(row, forward, color=colors[norm], height=0.6)
        ax.barh(row, backward, left=forward, color=colors[norm], height=0.6, alpha=0.5)
        ax.barh(row, rest, left=forward + backward, color="none", edgecolor="#999999", height=0.6)
    ax.set(title="Norm forward (solid), norm backward (pale), all else (white)", xlabel="ms a step")
    return figure


def _share(found: dict) -> str:
    return "norm n/a" if found["norm_share"] is None else f"norm {found['norm_share']:.1%}"


def memory(result: dict, colors: dict[str, str]) -> Figure:
    """Peak memory of every norm: allocated as a bar, reserved as the frame around it."""
    peaks = result["memory"]
    figure, (ax,) = _figure(1.3 + 0.45 * len(peaks), 1)
    _rows(ax, list(peaks))
    for row, (norm, found) in enumerate(peaks.items()):
        allocated, reserved = found["peak_allocated_gib"], found["peak_reserved_gib"]
        ax.barh(row, allocated, color=colors[norm], height=0.6, alpha=0.75)
        ax.barh(row, reserved, color="none", edgecolor=colors[norm], height=0.6)
        ax.annotate(f" {allocated:.2f}", (reserved, row), va="center", fontsize=9)
    ax.margins(x=0.15)
    ax.set(title="Peak allocated (filled, number) and reserved (frame)", xlabel="GiB")
    return figure


# --- parity -----------------------------------------------------------------------------------


def losses(result: dict, colors: dict[str, str]) -> Figure:
    """Loss curves, their difference against the null runs' band, and the final difference."""
    parity = result["parity"]
    training = parity["tiers"]["training"]
    figure, (curves, difference, final) = _figure(6.6, 3, height_ratios=(4, 3, 1))
    _curves(curves, training["curves"], parity, colors)
    _differences(difference, training, parity, colors)
    difference.sharex(curves)
    _rows(final, [parity["candidate"]])
    [margin] = _floats([training["margin"]])
    if np.isfinite(margin):
        _band(final, -margin, margin)
    _error_bar(final, training["final_difference"], 0, colors[parity["candidate"]], "mean")
    final.axvline(0, color="black", linewidth=0.6)
    final.set(title="Final validation difference: 90% interval; grey: margin")
    final.set_xlabel("nats")
    return figure


def _curves(ax: Axes, curves: dict, parity: dict, colors: dict[str, str]) -> None:
    for index, seed in enumerate(curves.values()):
        for part, width, style in (("reference", 2.4, "-"), ("candidate", 0.9, "--")):
            norm, loss = parity[part], _floats(seed[part])
            look = {"color": colors[norm], "linewidth": width, "label": None if index else norm}
            ax.plot(np.arange(1, len(loss) + 1), loss, style, **look)
    ax.set(title=f"Training loss of {len(curves)} seeds", ylabel="nats")
    ax.legend(loc="upper right")


def _differences(ax: Axes, training: dict, parity: dict, colors: dict[str, str]) -> None:
    window, curves = training["window"], training["curves"].values()
    null, candidate = (
        smooth([_floats(seed[run]) - _floats(seed["reference"]) for seed in curves], window)
        for run in ("null", "candidate")
    )
    steps = np.arange(window, window + null.shape[1])
    ax.fill_between(steps, null.min(0), null.max(0), color=BAND, linewidth=0, label="null runs")
    for index, line in enumerate(candidate):
        label = None if index else f"{parity['candidate']} - {parity['reference']}"
        ax.plot(steps, line, color=colors[parity["candidate"]], linewidth=0.9, label=label)
    ax.set(title=f"Differences, mean of {window} steps", ylabel="nats", xlabel="optimizer step")
    ax.margins(y=0.2)
    ax.legend(loc="upper left", ncols=2)


# --- parts of a picture -------------------------------------------------------------------------


def _figure(height: float, rows: int, **grid) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False, gridspec_kw=grid)[:, 0]


def _rows(ax: Axes, names: list[str], notes: Iterable[str] = ()) -> None:
    """A horizontal row for each name, the first on top, with a note beneath the name."""
    short = [name.rpartition(".")[2] for name in names]
    labels = (
        [f"{name}\n{note}" for name, note in zip(short, notes, strict=True)] if notes else short
    )
    ax.set_yticks(range(len(names)), labels)
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.locator_params(axis="x", nbins=6)


def _band(ax: Axes, low: float, high: float) -> None:
    ax.axvspan(low, high, color=BAND, linewidth=0)


def _error_bar(ax: Axes, interval: dict, row: float, color: str, middle: str, **style) -> None:
    at, low, high = _floats([interval[middle], interval["low"], interval["high"]])
    ends = [[abs(at - low)], [abs(high - at)]]
    ax.errorbar(at, row, xerr=ends, fmt="o", color=color, **style)


def _floats(values: list[float | None]) -> np.ndarray:
    """The values with NaN for None, as JSON has what is not finite."""
    return np.array(values, dtype=np.float64)
