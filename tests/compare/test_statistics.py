"""Statistics on inputs whose answer is known."""

import math

import numpy as np
import pytest
from scipy import stats

from compare.statistics import (
    Interval,
    amdahl,
    amdahl_ceiling,
    covered,
    differs,
    efficiency,
    median_interval,
    paired_interval,
    percentiles,
    process_speedups,
    rms,
    smooth,
    speedup,
)

TRIALS = 1_000
ROUNDS = 30
# Standard deviation of the log of one block's median: 0.5%. Blocks of ten steps on a data-centre
# GPU with free clocks stay below that.
BLOCK_NOISE = 0.005


def trials(true_speedup: float, seed: int, processes: int = 1, drift: float = 0.0):
    """For every trial the verdict on a variant that is `true_speedup` times as fast.

    Args:
        drift: Standard deviation of what a whole process adds to an arm's log time.
    """
    random = np.random.default_rng(seed)
    verdicts = []
    for _ in range(TRIALS):
        shape = (3, processes, ROUNDS)
        clock = random.normal(0, 0.02, (1, processes, ROUNDS))  # shared by the arms of a round
        own = random.normal(0, BLOCK_NOISE, shape) + random.normal(0, drift, (3, processes, 1))
        baseline, copy, variant = 80 * np.exp(clock + own)
        variant = variant / true_speedup
        verdicts.append(differs(speedup(baseline, variant), speedup(baseline, copy)))
    return np.mean(verdicts)


def test_equal_models_seldom_differ():
    assert trials(1.0, seed=1) <= 0.05


def test_equal_models_seldom_differ_when_processes_disagree():
    # Three processes, each with a luck of its own as large as the noise of a block.
    assert trials(1.0, seed=2, processes=3, drift=BLOCK_NOISE) <= 0.05


@pytest.mark.parametrize("processes", [1, 3])
def test_one_percent_is_found(processes):
    assert trials(1.01, seed=3, processes=processes) >= 0.90
    assert trials(0.99, seed=4, processes=processes) >= 0.90


def test_speedup_is_the_ratio_of_baseline_to_variant():
    baseline = [[10.0, 20.0, 40.0]]
    found = speedup(baseline, [[5.0, 10.0, 20.0]])
    assert found == pytest.approx((2, 2, 2))


def test_a_round_is_compared_with_itself():
    # The clock halves in the course of the run; within each round the variant is 1% faster.
    clock = np.geomspace(50, 100, ROUNDS)
    assert speedup([clock], [clock / 1.01]) == pytest.approx((1.01, 1.01, 1.01))


def test_processes_that_disagree_widen_the_interval():
    baseline = np.full((3, ROUNDS), 10.0)
    medians = np.array([1.00, 1.02, 1.05])
    variant = baseline / medians[:, None]
    theirs = stats.ttest_1samp(np.log(medians), 0).confidence_interval(0.95)
    found = speedup(baseline, variant)
    assert found == pytest.approx((1.02, math.exp(theirs.low), math.exp(theirs.high)))
    each = [process.median for process in process_speedups(baseline, variant)]
    assert each == pytest.approx(medians)


def test_median_interval_has_its_confidence():
    # Exactly normal samples: the true median 0 has to be inside in about 95% of them. The
    # percentile method is a little short for 30 values; 92% is 4 standard errors below 95%.
    samples = np.random.default_rng(5).normal(size=(TRIALS, ROUNDS))
    _, low, high = median_interval(samples)
    inside = np.mean((low <= 0) & (high >= 0))
    assert 0.92 <= inside <= 0.98


@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_median_interval_agrees_with_scipy(n):
    sample = np.random.default_rng(n).normal(size=n)
    median, low, high = median_interval(sample)
    assert median == np.median(sample)
    assert low <= median <= high
    if n > 2:  # with fewer, scipy has nothing to resample
        theirs = stats.bootstrap(
            (sample,), np.median, n_resamples=9_999, method="percentile", rng=1
        ).confidence_interval
        # Two sets of 10,000 draws may disagree by one order statistic at either end.
        gap = np.diff(np.sort(sample)).max()
        assert abs(low - theirs.low) <= gap
        assert abs(high - theirs.high) <= gap


def test_rows_are_independent_and_draws_are_fixed():
    samples = np.random.default_rng(6).normal(size=(4, ROUNDS))
    together = np.stack(median_interval(samples), axis=-1)
    one_by_one = np.array([median_interval(row) for row in samples])
    np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize(
    ("variant", "aa", "expected"),
    [
        (Interval(1.02, 1.01, 1.03), Interval(1.0, 0.99, 1.01), True),
        (Interval(0.98, 0.97, 0.99), Interval(1.0, 0.99, 1.01), True),
        (Interval(1.02, 0.99, 1.05), Interval(1.0, 0.99, 1.01), False),  # includes 1
        (Interval(1.02, 1.01, 1.03), Interval(1.02, 1.0, 1.04), False),  # as two equal models
    ],
)
def test_differs(variant, aa, expected):
    assert differs(variant, aa) is expected


def test_percentiles():
    assert percentiles([[*range(25)], [*range(25, 50)]]) == pytest.approx(
        {"p10": 4.9, "p50": 24.5, "p90": 44.1}
    )


def test_amdahl():
    assert amdahl(0.25, 1) == 1
    assert amdahl(0.5, 2) == pytest.approx(4 / 3)
    assert amdahl_ceiling(0.25) == pytest.approx(4 / 3)
    assert amdahl(0.25, 1e12) == pytest.approx(amdahl_ceiling(0.25))


def test_what_overlaps_counts_once():
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_smooth_is_a_moving_mean_without_edges():
    np.testing.assert_allclose(
        smooth([[1, 2, 3, 4], [0, 0, 0, 4]], 2), [[1.5, 2.5, 3.5], [0, 0, 2]]
    )
    with pytest.raises(ValueError, match="from 1 to 3"):
        smooth([1, 2, 3], 4)


def test_rms():
    assert rms([3, -4]) == pytest.approx(math.sqrt(12.5))


def test_paired_interval_is_students_t():
    sample = np.random.default_rng(8).normal(0.1, 1, size=6)
    theirs = stats.ttest_1samp(sample, 0).confidence_interval(0.90)
    mean, low, high = paired_interval(sample)
    assert mean == pytest.approx(sample.mean())
    assert (low, high) == pytest.approx((theirs.low, theirs.high))
    with pytest.raises(ValueError, match="at least 2"):
        paired_interval([1.0])


def test_efficiency_is_a_quotient_of_step_times():
    assert efficiency([10.0, 10.0], [12.5, 12.5]) == pytest.approx((0.8, 0.8, 0.8))


def test_efficiencys_interval_spans_those_of_both():
    one, many = [9.0, 10.0, 11.0], [18.0, 20.0, 22.0]
    assert efficiency(one, many) == pytest.approx((0.5, 9 / 22, 11 / 18))
