"""What a training run amounts to: figures from its raw samples, a table, a plot, a JSON file."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from model.files import replacing
from model.mfu import mfu

NO_FINDING = "Times from a CPU or from Triton's interpreter say nothing about the kernel."
WITH_A_GPU = (
    "With a GPU the same command compiles the kernels and trains the larger configs/small.yaml; "
    "README.md shows an H200's figures."
)


def figures(
    rows: dict[int, dict[str, float]],
    step_ms: list[float],
    tokens_per_step: int,
    flops_per_token: int,
    peak_flops: float | None,
    n_devices: int = 1,
    memory: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The figures of a run as a pure function of its samples; None for what is not known.

    Args:
        rows: Logged metrics by step, as in metrics.csv.
        step_ms: Milliseconds of every step that this process took, the first one too.
        tokens_per_step: Tokens of an optimizer step, all devices together.
        flops_per_token: Forward and backward FLOPs of a token.
        peak_flops: Peak FLOP/s of one device, None if unknown.
        n_devices: How many devices share a step.
        memory: Peak bytes "allocated" and "reserved" on the GPU.

    Returns:
        first_step_ms is the first step of this process, with all its compilation. step_ms holds
        p10, p50 and p90 of the others, tokens_per_s comes from their median. Losses are in nats.
    """
    first, others = step_ms[:1], step_ms[1:]
    p10, p50, p90 = quantiles(others, (0.1, 0.5, 0.9)) if others else (None, None, None)
    tokens_per_s = tokens_per_step / p50 * 1e3 if p50 else None
    used = tokens_per_s is not None and peak_flops is not None
    return {
        "steps": max(rows, default=0),
        "first_train_loss": _edge(rows, "loss", last=False),
        "train_loss": _edge(rows, "loss"),
        "val_loss": _edge(rows, "val_loss"),
        "val_perplexity": _edge(rows, "val_perplexity"),
        "first_step_ms": first[0] if first else None,
        "step_ms": {"p10": p10, "p50": p50, "p90": p90},
        "tokens_per_step": tokens_per_step,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(tokens_per_s, flops_per_token, peak_flops, n_devices) if used else None,
        "peak_allocated_gib": memory["allocated"] / 2**30 if memory else None,
        "peak_reserved_gib": memory["reserved"] / 2**30 if memory else None,
    }


def quantiles(values: list[float], probabilities: tuple[float, ...]) -> tuple[float, ...]:
    """Quantiles with linear interpolation between the sorted values."""
    if len(values) == 1:
        return tuple(values[0] for _ in probabilities)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return tuple(cuts[round(100 * p) - 1] for p in probabilities)


def _edge(rows: dict[int, dict[str, float]], key: str, last: bool = True) -> float | None:
    """The value of `key` in the last, or the first, row that has it."""
    for step in sorted(rows, reverse=last):
        if key in rows[step]:
            return rows[step][key]
    return None


def table(summary: dict[str, Any]) -> Table:
    """The summary for people: one line a figure, "n/a" for what is not known."""
    step_ms = summary["step_ms"]
    lines = [
        ("steps", _number(summary["steps"], "d")),
        (
            "train loss, first step -> last",
            f"{_number(summary['first_train_loss'], '.4f')} -> "
            f"{_number(summary['train_loss'], '.4f')}",
        ),
        ("validation loss", _number(summary["val_loss"], ".4f")),
        ("validation perplexity", _number(summary["val_perplexity"], ".2f")),
        ("first step, compilation included", _number(summary["first_step_ms"], ",.1f", " ms")),
        ("step time, median", _number(step_ms["p50"], ",.2f", " ms")),
        (
            "step time, p10 to p90",
            f"{_number(step_ms['p10'], ',.2f')} to {_number(step_ms['p90'], ',.2f', ' ms')}",
        ),
        ("tokens a second", _number(summary["tokens_per_s"], ",.0f")),
        ("MFU", _number(summary["mfu"], ".1%")),
        ("peak GPU memory, allocated", _number(summary["peak_allocated_gib"], ".2f", " GiB")),
        ("peak GPU memory, reserved", _number(summary["peak_reserved_gib"], ".2f", " GiB")),
    ]
    result = Table(title=f"{summary['name']}  (norm {summary['norm']}, {summary['precision']})")
    result.add_column("figure")
    result.add_column("value", justify="right")
    for line in lines:
        result.add_row(*line)
    return result


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:{spec}}{unit}"


def write_json(summary: dict[str, Any], path: Path) -> None:
    """Write the summary to `path`; a figure that is not finite becomes null, as JSON has no NaN."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_loss(rows: dict[int, dict[str, float]], path: Path, title: str) -> None:
    """Training and validation loss over steps as a PNG."""
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for key, label, style in (
        ("loss", "training", {"linewidth": 1}),
        ("val_loss", "validation", {"marker": "o", "markersize": 4}),
    ):
        steps = [step for step in sorted(rows) if key in rows[step]]
        axes.plot(steps, [rows[step][key] for step in steps], label=label, **style)
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
