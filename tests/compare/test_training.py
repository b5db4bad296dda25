"""The training tier: verdicts on made-up curves, and trainings that take milliseconds a step."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from compare import child, training
from compare.child import Kept
from compare.controls import CONTROLS

STEPS, SEEDS = 60, 5  # of the made-up curves
NOISE = 0.01  # of the made-up curves, drifting apart as trainings do
SIZE = {"steps": training.WINDOW + 2, "tokens": 32}


@pytest.fixture
def small(settings, device):
    return dataclasses.replace(settings, device=device)


def ignore(what: str, done: int, total: int) -> None:
    assert 0 <= done < total


# --- verdicts on made-up curves ---------------------------------------------------------------


def drift(seed: int) -> np.ndarray:
    steps = np.random.default_rng(seed).normal(0, 1, STEPS)
    return NOISE * np.cumsum(steps) / np.sqrt(np.arange(1, STEPS + 1))


def judge(candidate=drift, null=drift, final=lambda seed: 0.0) -> dict:
    """Verdict where a run is the reference plus what these functions give for a seed."""
    curve = 3 + 5 * np.exp(-np.arange(STEPS) / 10)
    losses = {
        str(seed): {
            "reference": list(curve),
            "candidate": list(curve + candidate(seed)),
            "null": list(curve + null(100 + seed)),
        }
        for seed in range(SEEDS)
    }
    ends = 3 + np.linspace(-0.02, 0.02, SEEDS)  # standard deviation 0.0158, margin 0.0079
    finals = {
        str(seed): {"reference": end, "null": end, "candidate": end + final(seed)}
        for seed, end in enumerate(ends)
    }
    return training.judge(losses, finals)


def test_as_far_apart_as_null_runs_and_equivalent_in_the_end_passes():
    found = judge(final=lambda seed: 0.001 * (-1) ** seed)
    assert found["verdict"] == "pass"
    assert found["margin"] == pytest.approx(0.5 * np.std(np.linspace(-0.02, 0.02, 5), ddof=1))
    assert found["ratio"] == found["rms_difference"] / found["largest_null"]
    assert found["rms_null"] < found["largest_null"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("times", "verdict"), [(1.4, "pass"), (1.6, "fail")])
def test_curves_may_lie_half_as_far_apart_again_as_the_largest_null_run(times, verdict):
    """The null runs of the seeds lie 1, 1/2, 1/3, ... apart: the first one counts."""
    found = judge(lambda seed: times * NOISE, null=lambda seed: NOISE / (seed - 99))
    assert (found["verdict"], found["verdicts"]["curves"]) == (verdict, verdict)
    assert found["ratio"] == pytest.approx(times)


def test_a_small_lasting_difference_counts_and_a_large_alternating_one_does_not():
    """Smoothing keeps what the curves drift apart by, not the noise of single batches."""
    alternating = np.tile([NOISE, -NOISE], STEPS // 2)
    assert judge(candidate=lambda seed: alternating, final=lambda seed: 0)["verdict"] == "pass"
    lasting = judge(candidate=lambda seed: NOISE, null=lambda seed: alternating)
    assert lasting["verdict"] == "fail"


def test_a_final_difference_beyond_the_margin_fails_though_the_curves_agree():
    for end in (0.02, -0.02):
        found = judge(final=lambda seed, end=end: end + 0.0001 * seed)
        assert found["verdict"] == "fail"
        assert found["verdicts"] == {"curves": "pass", "end": "fail"}


@pytest.mark.parametrize(
    "final",
    [
        pytest.param(lambda seed: 0.02 * (-1) ** seed, id="no mean difference but a wide interval"),
        pytest.param(lambda seed: 0.007 + 0.001 * seed, id="across the margin"),
    ],
)
def test_an_interval_that_is_not_inside_the_margin_is_inconclusive(final):
    found = judge(final=final)
    assert found["verdict"] == "inconclusive"
    assert found["verdicts"] == {"curves": "pass", "end": "inconclusive"}


def test_without_noise_the_resolution_of_the_losses_is_the_floor():
    ulp = np.finfo(np.float32).eps * 8  # the losses begin at 8

    def verdict(difference: float) -> str:
        return judge(lambda seed: difference, null=lambda seed: 0)["verdict"]

    assert verdict(0) == "pass"
    assert verdict(ulp) == "pass"
    assert verdict(2 * ulp) == "fail"


@pytest.mark.parametrize("run", ["candidate", "null"])
def test_a_training_that_diverges_fails(run):
    assert judge(**{run: lambda seed: np.full(STEPS, np.nan)})["verdict"] == "fail"


def test_a_loss_that_is_null_in_the_file_it_was_kept_in_fails():
    found = judge(candidate=lambda seed: np.full(STEPS, np.nan))
    curves = {
        seed: {run: [None if x != x else x for x in values] for run, values in runs.items()}
        for seed, runs in found["curves"].items()
    }
    again = training.judge(curves, found["finals"])
    assert again["verdict"] == found["verdict"] == "fail"


def test_a_final_difference_is_taken_to_the_mean_of_reference_and_null_run():
    """Each seed's candidate ends 0.004 above its reference, which ended 0.01 below its null run."""
    curve = {run: [3.0] * STEPS for run in ("reference", "null", "candidate")}
    finals = {
        str(seed): {"reference": end, "null": end + 0.01, "candidate": end + 0.004}
        for seed, end in enumerate([1.0, 1.1, 1.2])
    }
    found = training.judge(dict.fromkeys(finals, curve), finals)
    assert found["final_difference"]["mean"] == pytest.approx(-0.001)


# --- trainings --------------------------------------------------------------------------------


def test_null_runs_differ_by_rounding_and_by_nothing_else(small):
    runs = {"reference": "eager", "null": "eager"}
    found = training.seed_runs(small, ignore, small.seed, runs, steps=22, tokens=64)["runs"]
    reference, null = (np.array(found[run]["losses"]) for run in runs)
    assert (reference != null).any()
    # A gradient's sign flips where it is nearly zero, and AdamW then goes the other way.
    np.testing.assert_allclose(null, reference, rtol=1e-4)
    assert found["null"]["final"] == pytest.approx(found["reference"]["final"], rel=1e-4)
    assert len(reference) == 22


@pytest.mark.parametrize(("tokens", "rows"), [(1, 2), (48, 3), (10_000, 4)])
def test_batches_have_two_rows_at_least_and_the_configs_at_most(small, tokens, rows):
    found = training.training_batches(small, 22, tokens, small.seed)
    again = training.training_batches(small, 22, tokens, small.seed)
    assert [len(batch) for batch in found] == [rows] * 22
    assert all(map(torch.equal, found, again))
    assert len({tuple(batch.flatten().tolist()) for batch in found}) > 1


@pytest.mark.parametrize("fault", ["wrong eps", "dx without its projection term", "dw zero"])
def test_loss_curves_alone_would_give_a_fault_away_in_float32(small, in_this_process, fault):
    found = training.training_tier(small, CONTROLS[fault], 2, *SIZE.values(), ignore, Kept())
    assert found["verdict"] == "fail"


def test_every_seed_has_weights_and_batches_of_its_own(small, in_this_process):
    found = training.training_tier(small, "aten", 2, *SIZE.values(), ignore, Kept())
    assert found["seeds"] == [small.seed, small.seed + 1]
    one, another = (curves["reference"] for curves in found["curves"].values())
    assert one[0] != another[0]


@pytest.fixture
def by_name(monkeypatch):
    """Stands for the processes, with room for two at a time; holds the seeds that were trained."""
    seeds = []

    def result(target, config, report, seed, **_):
        seeds.append(seed)
        report("training", 5, 10)
        return {"runs": {"reference": {"losses": [], "final": seed}}, "at_once": 2}

    def call_all(starts, at_once):
        if starts:  # the first seed says for how many there is room
            assert at_once == (2 if seeds else 1)
        yield from reversed([(name, start()) for name, start in starts.items()])

    monkeypatch.setattr(training, "Child", result)
    monkeypatch.setattr(child, "call_all", call_all)
    return seeds


def test_seeds_are_in_order_whichever_ended_first(small, by_name):
    reports = []
    found = training.all_seeds(
        small, range(3, 7), {"reference": "eager"}, SIZE, lambda *r: reports.append(r), Kept()
    )
    assert [(seed, runs["reference"]["final"]) for seed, runs in found.items()] == [
        (3, 3),
        (4, 4),
        (5, 5),
        (6, 6),
    ]
    assert [done for _, done, _ in reports] == [5, 10, 15, 20]
    assert {total for *_, total in reports} == {40}


def test_seeds_that_are_kept_are_not_trained_again(small, by_name):
    keep = Kept()
    for seeds in (range(3, 5), range(3, 7)):
        found = training.all_seeds(small, seeds, {"reference": "eager"}, SIZE, ignore, keep)
    assert by_name == [3, 4, 5, 6]
    assert list(found) == [3, 4, 5, 6]
