"""Parity: verdicts on made-up curves, and each tier on a model so small that it takes seconds."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from compare import parity
from compare.controls import CONTROLS
from compare.parity import Effort

STEPS, SEEDS = 60, 5
LITTLE = Effort(steps=parity.WINDOW + 2, seeds=2, tokens=32, rows=16)
NOISE = 0.01  # of the made-up curves, drifting apart as trainings do


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
        str(seed): {"reference": end, "candidate": end + final(seed)}
        for seed, end in enumerate(ends)
    }
    return parity.judge_training(losses, finals)


def test_as_far_apart_as_null_runs_and_equivalent_in_the_end_passes():
    found = judge(final=lambda seed: 0.001 * (-1) ** seed)
    assert found["verdict"] == "pass"
    assert found["margin"] == pytest.approx(0.5 * np.std(np.linspace(-0.02, 0.02, 5), ddof=1))
    assert found["ratio"] == found["rms_difference"] / found["largest_null"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("times", "verdict"), [(1.4, "pass"), (1.6, "fail")])
def test_curves_may_lie_half_as_far_apart_again_as_the_largest_null_run(times, verdict):
    """The null runs of the seeds lie 1, 1/2, 1/3, ... apart: the first one counts."""
    found = judge(lambda seed: times * NOISE, null=lambda seed: NOISE / (seed - 99))
    assert found["verdict"] == verdict
    assert found["ratio"] == pytest.approx(times)


def test_a_small_lasting_difference_counts_and_a_large_alternating_one_does_not():
    """Smoothing keeps what the curves drift apart by, not the noise of single batches."""
    alternating = np.tile([NOISE, -NOISE], STEPS // 2)
    assert judge(candidate=lambda seed: alternating, final=lambda seed: 0)["verdict"] == "pass"
    lasting = judge(candidate=lambda seed: NOISE, null=lambda seed: alternating)
    assert lasting["verdict"] == "fail"


def test_a_final_difference_beyond_the_margin_fails_though_the_curves_agree():
    assert judge(final=lambda seed: 0.02 + 0.0001 * seed)["verdict"] == "fail"
    assert judge(final=lambda seed: -0.02 + 0.0001 * seed)["verdict"] == "fail"


@pytest.mark.parametrize(
    "final",
    [
        pytest.param(lambda seed: 0.02 * (-1) ** seed, id="no mean difference but a wide interval"),
        pytest.param(lambda seed: 0.007 + 0.001 * seed, id="across the margin"),
    ],
)
def test_an_interval_that_is_not_inside_the_margin_is_inconclusive(final):
    assert judge(final=final)["verdict"] == "inconclusive"


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


@pytest.mark.parametrize(
    ("training", "caught", "expected"),
    [
        ("pass", True, "pass"),
        ("inconclusive", True, "inconclusive"),
        ("fail", True, "fail"),
        ("pass", False, "fail"),
    ],
)
def test_the_verdict_is_the_worst_tier_and_needs_every_control_caught(training, caught, expected):
    tiers = {"op": {"verdict": "pass"}, "training": {"verdict": training}}
    controls = {"one": {"caught": True}, "another": {"caught": caught}}
    assert parity.verdict(tiers, controls) == expected


# --- tiers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["eager", "triton"])
@pytest.mark.parametrize(
    ("precision", "stream"),
    [
        ("32-true", "float32"),
        ("16-mixed", "float32"),
        ("bf16-mixed", "float32"),
        ("bf16-mixed", "bfloat16"),
    ],
)
def test_op_tier_passes_a_right_norm(small, norm, precision, stream):
    model = small.model | {"stream_dtype": stream, "qk_norm": True}
    found = parity.op_tier(
        dataclasses.replace(small, model=model, precision=precision), norm, LITTLE
    )
    assert found["pass"], found["detail"]
    named = " ".join(case["case"] for case in found["cases"])
    for part in ("dw of QK-norm", "h of add and norm", "dr of add and norm, odd shape", "small"):
        assert part in named


def test_op_tier_sees_one_wrong_element_and_nan(small, monkeypatch):
    for value in (2.0, float("nan")):

        def results(self, norm, autocast, honest=parity.Operands.results, value=value):
            found = honest(self, norm, autocast)
            if norm.name == "aten":
                found["dx"][0, 0] = value * found["dx"].abs().max()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(parity.Operands, "results", results)
            assert parity.op_tier(small, "aten", LITTLE)["verdict"] == "fail"
    assert parity.op_tier(small, "aten", LITTLE)["verdict"] == "pass"


def test_float32_tier_passes_triton_and_finds_the_reference_equal_to_itself(small):
    triton = parity.float32_tier(small, "triton")
    assert triton["pass"], triton["detail"]
    if small.device.type == "cpu":  # a GPU has no deterministic algorithm for some operations
        assert parity.float32_tier(small, "eager")["worst"] == 0


def test_float32_tier_covers_every_parameter_and_step(small):
    cases = {case["case"] for case in parity.float32_tier(small, "aten")["cases"]}
    assert {"gradient of blocks.0.norm1.weight", "gradient of embedding.weight"} <= cases
    assert {"loss of step 0", f"loss of step {parity.SGD_STEPS - 1}"} <= cases


def test_float32_tier_restores_the_switches_it_turns():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with parity.reproducible_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(before)


def test_null_runs_differ_by_rounding_and_by_nothing_else(small):
    effort = dataclasses.replace(LITTLE, tokens=64)
    runs = parity.reference_runs(small, effort, ignore)
    assert list(runs) == [small.seed, small.seed + 1]
    for found in runs.values():
        reference, null = (np.array(found[run].losses) for run in ("reference", "null"))
        assert (reference != null).any()
        # A gradient's sign flips where it is nearly zero, and AdamW then goes the other way.
        np.testing.assert_allclose(null, reference, rtol=1e-4)
        assert found["null"].final == pytest.approx(found["reference"].final, rel=1e-4)
        assert len(reference) == effort.steps


@pytest.mark.parametrize(("tokens", "rows"), [(1, 2), (48, 3), (10_000, 4)])
def test_batches_have_two_rows_at_least_and_the_configs_at_most(small, tokens, rows):
    effort = dataclasses.replace(LITTLE, tokens=tokens)
    found = parity.training_batches(small, effort, small.seed)
    again = parity.training_batches(small, effort, small.seed)
    assert [len(batch) for batch in found] == [rows] * effort.steps
    assert all(map(torch.equal, found, again))
    assert len({tuple(batch.flatten().tolist()) for batch in found}) > 1


def test_run_judges_the_candidate_and_shows_that_every_fault_is_caught(small):
    found = parity.run(dataclasses.replace(small, scope="compiled"), ignore, LITTLE)
    assert (found["candidate"], found["reference"]) == ("aten", "eager")
    assert list(found["tiers"]) == ["op", "float32", "training"]
    assert list(found["controls"]) == list(CONTROLS)
    assert found["verdict"] == "pass"
    json.dumps(found, allow_nan=False)
    training = found["tiers"]["training"]
    curves = training["curves"][str(small.seed)]
    assert set(curves) == {"reference", "candidate", "null"}
    assert all(len(losses) == LITTLE.steps for losses in curves.values())


def test_triton_is_the_candidate_wherever_it_stands(small, monkeypatch):
    monkeypatch.setattr(parity, "reference_runs", lambda *_: {})
    for tier in ("op_tier", "float32_tier", "training_tier"):
        monkeypatch.setattr(
            parity, tier, lambda *_: {"verdict": "pass", "pass": True, "detail": ""}
        )
    norms = ("eager", "triton", "aten")
    found = parity.run(dataclasses.replace(small, norms=norms), ignore, LITTLE)
    assert found["candidate"] == "triton"
    assert list(found["norms"]) == ["triton", "aten"]
    assert found["verdict"] == "fail"  # no control was caught
