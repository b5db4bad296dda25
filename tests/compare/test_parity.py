"""Parity as a whole: the verdict over all tiers and controls."""

import dataclasses
import json

import pytest

from compare import child, parity, training
from compare.child import Kept
from compare.controls import CONTROLS
from compare.parity import Effort

LITTLE = Effort(steps=training.WINDOW + 2, seeds=2, tokens=32, rows=16)


@pytest.fixture
def small(settings, device):
    return dataclasses.replace(settings, device=device)


def ignore(what: str, done: int, total: int) -> None:
    assert 0 <= done < total


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


def test_run_judges_the_candidate_and_shows_that_every_fault_is_caught(small, in_this_process):
    found = parity.run(dataclasses.replace(small, scope="compiled"), ignore, Kept(), LITTLE)
    assert (found["candidate"], found["reference"]) == ("aten", "eager")
    assert list(found["tiers"]) == ["op", "float32", "training"]
    assert list(found["controls"]) == list(CONTROLS)
    assert found["verdict"] == "pass"
    json.dumps(found, allow_nan=False)
    curves = found["tiers"]["training"]["curves"][str(small.seed)]
    assert set(curves) == {"reference", "candidate", "null"}
    assert all(len(losses) == LITTLE.steps for losses in curves.values())


@pytest.fixture
def exact(monkeypatch):
    """What the cheap tiers say of every norm, instead of their measurement, and the trainings."""
    passed = {"verdict": "pass", "pass": True, "detail": ""}
    monkeypatch.setattr(parity, "training_tier", lambda *_: passed)

    def call(target, config, progress, norms, rows):
        return {norm: {"op": passed, "float32": passed} for norm in norms}

    monkeypatch.setattr(child, "call", call)


def test_triton_is_the_candidate_wherever_it_stands(small, exact):
    norms = ("eager", "triton", "aten")
    found = parity.run(dataclasses.replace(small, norms=norms), ignore, Kept(), LITTLE)
    assert found["candidate"] == "triton"
    assert list(found["norms"]) == ["triton", "aten"]


def test_a_fault_that_the_cheap_tiers_miss_goes_through_training(small, exact):
    found = parity.run(small, ignore, Kept(), LITTLE)
    for control in found["controls"].values():
        assert list(control["tiers"]) == ["op", "float32", "training"]
        assert not control["caught"]
        assert control["tier"] is None
    assert found["verdict"] == "fail"  # no control was caught
