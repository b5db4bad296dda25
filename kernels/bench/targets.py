"""Whether measured rows meet the targets that the kernels are developed against."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PEERS = ("compiled", "aten", "liger", "quack")
CASE_KEYS = ("group", "op", "pass", "rows", "n", "x_dtype", "residual_dtype", "out_dtype")

Rows = dict[str, dict]  # the rows of one case and pass, by implementation


@dataclass(frozen=True)
class Target:
    """`measure(rows) >= at_least` for every case of these groups, passes and row lengths.

    Args:
        text: what is measured, as a quotient: more is better.
        measure: that figure from the rows of one case and pass; raises KeyError for one that is not
            there, because it was not run or has no time.
        interval: the same figure's uncertainty, where being equal is enough: a case whose interval
            reaches `at_least` counts as no measurable difference.
        has_ceiling: whether the figure is of time on the GPU, which the memory's speed limits.
    """

    text: str
    groups: tuple[str, ...]
    passes: tuple[str, ...]
    measure: Callable[[Rows], float]
    at_least: float
    n: range = range(1, 2**31)
    interval: Callable[[Rows], tuple[float, float]] | None = None
    has_ceiling: bool = True


@dataclass(frozen=True)
class Verdict:
    """One target in one case.

    Args:
        measured: its figure, None where not measured.
        verdict: what that means.
        at_ceiling: the figure of a kernel that would take no longer than the stream kernel, which
            only moves the same bytes: below `at_least`, no kernel meets the target in this case.
    """

    target: Target
    case: dict
    measured: float | None
    verdict: str
    at_ceiling: float | None = None


def by_case(rows: list[dict]) -> list[tuple[dict, Rows]]:
    """What is common, and the rows by implementation, of each case and pass.

    Of Inductor's modes the faster one counts.
    """
    cases: dict[tuple, Rows] = {}
    for row in rows:
        found = cases.setdefault(tuple(row[key] for key in CASE_KEYS), {})
        other = found.get(row["impl"])
        if other is None or _p50(row) < _p50(other):
            found[row["impl"]] = row
    return [(dict(zip(CASE_KEYS, case, strict=True)), found) for case, found in cases.items()]


def judge(rows: list[dict]) -> list[Verdict]:
    """Every target in every case that it is stated for, in the order of TARGETS."""
    return [
        _judge(target, case, found)
        for target in TARGETS
        for case, found in by_case(rows)
        if case["group"] in target.groups
        and case["pass"] in target.passes
        and case["n"] in target.n
    ]


def _judge(target: Target, case: dict, rows: Rows) -> Verdict:
    try:
        measured = target.measure(rows)
    except KeyError:
        return Verdict(target, case, None, "not measured")
    at_ceiling = measured / _triton(rows)["fraction"] if target.has_ceiling else None
    if measured >= target.at_least:
        verdict = "met"
    elif target.interval and target.interval(rows)[1] >= target.at_least:
        verdict = "no measurable difference"
    else:
        verdict = "missed"
    return Verdict(target, case, measured, verdict, at_ceiling)


def faster_than(*peers: str) -> Callable[[Rows], float]:
    """How many times faster than the fastest of these peers the triton norm is, by medians."""

    def measure(rows: Rows) -> float:
        timed = [rows[peer]["us"]["p50"] for peer in peers if peer in rows and rows[peer]["us"]]
        return (min(timed) if timed else _missing()) / _triton(rows)["us"]["p50"]

    return measure


def fraction_of_ceiling(rows: Rows) -> float:
    """Time of the stream kernel with the same traffic over the triton norm's."""
    return _triton(rows)["fraction"]


def host_time_against(peer: str) -> Callable[[Rows], float]:
    """How many times less host time than a peer's the triton norm takes for both passes."""

    def measure(rows: Rows) -> float:
        if peer not in rows or not rows[peer]["host_us"]:
            _missing()
        return rows[peer]["host_us"] / _triton(rows)["host_us"]

    return measure


def inductor_interval(rows: Rows) -> tuple[float, float]:
    """95% bootstrap interval of the speed against Inductor, over rounds, which are paired."""
    rounds = np.median([rows["compiled"]["samples_us"], _triton(rows)["samples_us"]], axis=2)
    ratios = np.log(rounds[0] / rounds[1])
    draws = np.random.default_rng(0).integers(len(ratios), size=(10_000, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return float(np.exp(low)), float(np.exp(high))


def _triton(rows: Rows) -> dict:
    return rows["triton"] if "triton" in rows and rows["triton"]["us"] else _missing()


def _missing():
    raise KeyError("not measured")


def _p50(row: dict) -> float:
    return row["us"]["p50"] if row["us"] else float("inf")


BOTH = ("forward", "backward")
WIDE, NARROW = range(768, 2**31), range(1, 768)
NO_CLIFF = ("dtypes", "widths", "few_rows", "odd")
TARGETS = (
    Target("best peer's time / ours", ("design",), ("forward",), faster_than(*PEERS), 1 / 1.03),
    Target("copy's time / ours", ("design",), ("forward",), fraction_of_ceiling, 0.97, WIDE),
    Target("Inductor's time / ours", ("design",), ("backward",), faster_than("compiled"), 1.40),
    Target("QuACK's time / ours", ("design",), ("backward",), faster_than("quack"), 1.28),
    Target(
        "2-read-1-write time / ours", ("design",), ("backward",), fraction_of_ceiling, 0.92, WIDE
    ),
    Target(
        "2-read-1-write time / ours", ("design",), ("backward",), fraction_of_ceiling, 0.87, NARROW
    ),
    Target("2-read-2-write time / ours", ("add",), ("forward",), fraction_of_ceiling, 0.95, WIDE),
    Target("3-read-1-write time / ours", ("add",), ("backward",), fraction_of_ceiling, 0.95, WIDE),
    Target("same bytes' time / ours", ("mixed",), BOTH, fraction_of_ceiling, 0.90),
    Target(
        "Inductor's time / ours",
        NO_CLIFF,
        BOTH,
        faster_than("compiled"),
        1.0,
        interval=inductor_interval,
    ),
    Target(
        "Inductor's host time / ours",
        ("design",),
        ("forward",),
        host_time_against("compiled"),
        1.0,
        has_ceiling=False,
    ),
    Target(
        "QuACK's host time / ours",
        ("design",),
        ("forward",),
        host_time_against("quack"),
        1.0,
        has_ceiling=False,
    ),
)
