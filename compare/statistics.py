"""The statistics behind every figure and verdict: pure functions of the samples."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

RESAMPLES = 10_000
SEED = 20_240_229  # of the resampling: equal samples give equal intervals
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """An estimate and the interval around it, in the same unit."""

    median: float
    low: float
    high: float


def median_interval(samples: ArrayLike) -> tuple[NDArray, NDArray, NDArray]:
    """Median and 95% bootstrap interval (percentile method, 10,000 resamples) of each row.

    Args:
        samples: (..., n), n >= 1.

    Returns:
        (median, low, high), each of shape (...).
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64), axis=-1)
    lower, upper = _middle_ranks(ordered.shape[-1])
    medians = (ordered[..., lower] + ordered[..., upper]) / 2
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail], axis=-1)
    return np.median(ordered, axis=-1), low, high


@functools.cache
def _middle_ranks(n: int) -> tuple[NDArray, NDArray]:
    """Ranks of the two middle values (one, if n is odd) of every resample of n values.

    A resample's median is a function of the ranks drawn, so that one set of draws, sorted once,
    serves every sample of this size.
    """
    draws = np.random.default_rng(SEED).integers(n, size=(RESAMPLES, n))
    draws.sort(axis=-1)
    return draws[:, (n - 1) // 2], draws[:, n // 2]


def speedup(baseline_ms: Sequence[ArrayLike], variant_ms: Sequence[ArrayLike]) -> Interval:
    """How many times faster the variant is, from times of the same rounds in some processes.

    A round's log ratio of the two is free of what slows both down, such as clocks. All rounds
    together give the median and its bootstrap interval. That interval knows of the noise within a
    process alone, while memory layout, autotuning and compilation fall differently in each
    process and stay the same in all its rounds. So the medians of the processes get an interval as
    well, Student's t with one value a process, and what is returned reaches over both: rounds
    that are many do not make up for processes that disagree.

    Args:
        baseline_ms, variant_ms: for each process the times of its rounds, in the same order.

    Returns:
        Ratios: above 1 the variant is faster.
    """
    ratios = _log_ratios(baseline_ms, variant_ms)
    median, low, high = median_interval(np.concatenate(ratios))
    if len(ratios) > 1:
        between = paired_interval([np.median(rounds) for rounds in ratios], CONFIDENCE)
        low, high = min(low, between.low), max(high, between.high)
    return Interval(math.exp(median), math.exp(low), math.exp(high))


def process_speedups(
    baseline_ms: Sequence[ArrayLike], variant_ms: Sequence[ArrayLike]
) -> list[Interval]:
    """`speedup` of each process for itself: their spread is what differs between processes."""
    return [speedup([b], [v]) for b, v in zip(baseline_ms, variant_ms, strict=True)]


def _log_ratios(baseline_ms: Sequence[ArrayLike], variant_ms: Sequence[ArrayLike]) -> list[NDArray]:
    pairs = zip(baseline_ms, variant_ms, strict=True)
    return [np.log(np.asarray(b) / np.asarray(v)) for b, v in pairs]


def differs(variant: Interval, aa: Interval) -> bool:
    """Whether a speedup can be told from none.

    Its interval has to exclude 1, and its median has to lie outside of the interval that a second
    copy of the baseline got: what two equal models differ by is not a difference.
    """
    excludes_one = variant.low > 1 or variant.high < 1
    return bool(excludes_one and not aa.low <= variant.median <= aa.high)


def efficiency(one_ms: ArrayLike, many_ms: ArrayLike) -> Interval:
    """Work of n devices over n times that of one, each with a batch of the same size.

    That is the quotient of their step times, 1 where n devices take no longer. The two were not
    measured in the same rounds: the interval holds the quotients of all values in the 95% intervals
    of both medians, and so is wide rather than narrow.

    Args:
        one_ms, many_ms: (n,), n >= 1, times of the rounds of one device and of many.
    """
    (one, one_low, one_high), (many, low, high) = map(median_interval, (one_ms, many_ms))
    return Interval(*map(float, (one / many, one_low / high, one_high / low)))


def percentiles(samples: ArrayLike) -> dict[str, float]:
    """p10, p50 and p90 of all samples, of any shape."""
    values = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return dict(zip(("p10", "p50", "p90"), map(float, values), strict=True))


def amdahl(share: float, factor: float) -> float:
    """Speedup of a step of which `share` (0 to 1) becomes `factor` times as fast."""
    return 1 / ((1 - share) + share / factor)


def amdahl_ceiling(share: float) -> float:
    """Speedup of a step that is rid of this share (below 1) altogether."""
    return 1 / (1 - share)


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals: what overlaps counts once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def smooth(values: ArrayLike, window: int) -> NDArray:
    """Mean over `window` neighbours: (..., n) to (..., n - window + 1).

    Raises:
        ValueError: for a window below 1 or above n.
    """
    values = np.asarray(values, dtype=np.float64)
    if not 1 <= window <= values.shape[-1]:
        raise ValueError(f"window is {window}; it has to be from 1 to {values.shape[-1]}")
    return np.lib.stride_tricks.sliding_window_view(values, window, axis=-1).mean(-1)


def rms(values: ArrayLike) -> float:
    """Root of the mean square of all values."""
    return float(np.sqrt(np.mean(np.square(np.asarray(values, dtype=np.float64)))))


class MeanInterval(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float


def paired_interval(differences: ArrayLike, confidence: float = 0.90) -> MeanInterval:
    """Mean of paired differences and Student's t interval around it.

    With 90% this is the interval of two one-sided tests at 5% each (Schuirmann 1987): if it lies
    inside a margin, the two are equivalent up to that margin.

    Args:
        differences: (n,), n >= 2, one for each pair.
    """
    differences = np.asarray(differences, dtype=np.float64)
    n, mean = len(differences), float(differences.mean())
    if n < 2:
        raise ValueError(f"an interval needs at least 2 differences, but there are {n}")
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
    return MeanInterval(mean, mean - half, mean + half)
