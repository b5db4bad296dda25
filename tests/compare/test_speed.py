"""Step time: what is measured in which order, when a warm-up ends, figures from given samples."""

import dataclasses
from functools import partialmethod

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from compare import speed, timing
from compare.child import Kept
from compare.speed import AA, Plan
from compare.timing import time_block, warm_up
from model.gpt import GPT

PLAN = Plan(rounds=3, block_steps=2, warmup_steps=1, processes=2)


def nothing(*_):
    pass


def process(eager: list, aa: list, fast: list, clocks: dict | None = None) -> dict:
    """Samples of one process with one step a block."""
    arms = {"eager": eager, AA: aa, "aten": fast}
    return {
        "steps_ms": {arm: [[ms] for ms in rounds] for arm, rounds in arms.items()},
        "host_us": {"eager": 20.0, "aten": 10.0},
        "busy": {"eager": None, "aten": None},
        "clocks": clocks,
    }


def test_summary_of_known_samples(settings):
    first = {"eager": {"cold": 2.0, "warm": 1.0}, "aten": {"cold": 4.0, "warm": 3.0}}
    processes = [
        process([10, 20, 40], [10, 20, 40], [5, 10, 20], {"clocks.sm": "1980"}),
        process([10, 20, 40], [10, 20, 40], [5, 10, 20]),
    ]
    found = speed.summary(settings, PLAN, processes, first)
    aten, eager = found["variants"]["aten"], found["variants"]["eager"]
    assert aten["speedup"] == {
        "vs": "eager",
        **dict.fromkeys(("median", "low", "high"), pytest.approx(2)),
        "difference": True,
    }
    assert eager["vs"]["aten"]["median"] == pytest.approx(0.5)
    assert "speedup" not in eager
    assert aten["step_ms"]["p50"] == 10
    assert aten["tokens_per_s"] == pytest.approx(4 * 16 / 0.010)
    assert aten["samples_ms"] == [[5, 10, 20]] * 2
    assert [process["median"] for process in aten["processes"]] == pytest.approx([2, 2])
    assert aten["first_call_s"] == {"cold": 4.0, "warm": 3.0}
    assert (aten["host_us"], aten["busy"]) == (10, None)
    assert found["aa"]["low"] == found["aa"]["high"] == 1
    assert found["clocks"] == {"process 1": {"clocks.sm": "1980"}}


def test_a_difference_within_the_aa_interval_is_none(settings):
    first = {norm: {"cold": 1.0, "warm": 1.0} for norm in settings.norms}
    # The baseline's copy differs from it by up to 5%, the norm by 2% in every round.
    samples = process([10, 10, 10], [10.5, 10, 9.5], [9.8, 9.8, 9.8])
    found = speed.summary(settings, PLAN, [samples], first)
    assert found["variants"]["aten"]["speedup"]["low"] > 1
    assert found["variants"]["aten"]["speedup"]["difference"] is False


def test_every_round_has_a_block_of_every_arm_in_shuffled_order(settings, monkeypatch):
    blocks = []

    def record(step, block):
        blocks.append((step, [batch.sum().item() for batch in block]))
        return [1.0] * len(block)

    steps = iter(("first", "second", "third"))
    monkeypatch.setattr(speed, "ready_step", lambda *_: next(steps))
    monkeypatch.setattr(speed, "time_block", record)
    for name in ("host_us", "busy"):
        monkeypatch.setattr(speed, name, lambda *_: None)
    plan = {"rounds": 12, "block_steps": 2, "warmup_steps": 1, "processes": 1}
    found = speed.measure(settings, nothing, plan, seed=0)
    assert {arm: len(rounds) for arm, rounds in found["steps_ms"].items()} == {
        "eager": 12,
        "aten": 12,
        AA: 12,
    }
    rounds = [blocks[i : i + 3] for i in range(0, len(blocks), 3)]
    orders = [tuple(step for step, _ in one) for one in rounds]
    assert all(sorted(order) == ["first", "second", "third"] for order in orders)
    assert len(set(orders)) > 1
    for one in rounds:  # all arms of a round read the same batches
        assert all(sums == one[0][1] for _, sums in one)
    assert rounds[0][0][1] != rounds[1][0][1]


def test_a_process_measures_every_arm(settings):
    plan = {"rounds": 2, "block_steps": 2, "warmup_steps": 1, "processes": 1}
    reports = []
    found = speed.measure(settings, lambda *report: reports.append(report), plan, seed=0)
    for arm in ("eager", "aten", AA):
        assert [len(block) for block in found["steps_ms"][arm]] == [2, 2]
        assert all(ms > 0 for block in found["steps_ms"][arm] for ms in block)
    assert found["host_us"]["aten"] > 0
    assert found["busy"] == {"eager": None, "aten": None}
    assert all(done < total for _, done, total in reports)


@pytest.fixture
def compile_counters():
    """Dynamo's counters, as they were before the test when it is over."""
    before = counters["stats"]["unique_graphs"]
    yield counters["stats"]
    counters["stats"]["unique_graphs"] = before


def test_warm_up_ends_once_nothing_is_compiled(compile_counters):
    steps = []

    def step(batch):
        steps.append(batch)
        if len(steps) in (1, 8):
            compile_counters["unique_graphs"] += 1

    warm_up(step, [torch.zeros(1)], least=10)
    assert len(steps) == 8 + timing.FLAT_STEPS


def test_warm_up_does_not_go_on_forever(compile_counters):
    def step(batch):
        compile_counters["unique_graphs"] += 1

    with pytest.raises(RuntimeError, match="still compiled after 200 steps"):
        warm_up(step, [torch.zeros(1)], least=10)


def test_warm_up_ends_when_nothing_is_compiled_anywhere():
    steps, compiled_elsewhere = [], [0, 1, 1, 2, 2, 2, 2]
    warm_up(steps.append, [torch.zeros(1)], 2, lambda: compiled_elsewhere[len(steps)])
    assert len(steps) == 5


def test_a_model_that_runs_without_its_cuda_graphs_is_refused(settings, monkeypatch):
    monkeypatch.setattr(GPT, "compile", lambda *_, **__: None)
    graphs, data = settings.with_scope("graphs"), speed.batches(settings, 2, 0)
    timing.ready_step(graphs, "aten", data, warmup_steps=1)

    def skip(*_, **__):
        counters["inductor"]["cudagraph_skips"] += 1

    monkeypatch.setattr(GPT, "compile", skip)
    with pytest.raises(RuntimeError, match="CUDA graphs of the model with norm 'aten'"):
        timing.ready_step(graphs, "aten", data, warmup_steps=1)


def test_compilations_are_counted():
    before = timing.compilations()
    function = torch.compile(lambda x: x + 1, backend="eager")
    function(torch.zeros(2))
    compiled = timing.compilations()
    function(torch.zeros(2))
    assert before < compiled == timing.compilations()


def test_a_block_has_a_time_for_every_step_after_one_off_the_clock():
    seen = []
    times = time_block(seen.append, [torch.tensor(1), torch.tensor(2)])
    assert [batch.item() for batch in seen] == [1, 1, 2]
    assert len(times) == 2


def test_first_calls_are_cold_then_warm_in_a_folder_of_their_own(settings, monkeypatch):
    calls = []

    def call(target, config, progress, environment, norm):
        calls.append(
            (norm, environment["TRITON_CACHE_DIR"], environment["TORCHINDUCTOR_CACHE_DIR"])
        )
        return float(len(calls))

    monkeypatch.setattr(speed.child, "call", call)
    found = speed.first_calls(settings, nothing, Kept())
    assert found == {"eager": {"cold": 1.0, "warm": 2.0}, "aten": {"cold": 3.0, "warm": 4.0}}
    assert calls[0] == calls[1]
    assert calls[1][1:] != calls[2][1:]
    assert calls[0][1] != calls[0][2]


def test_models_of_every_norm_are_compiled(settings, device, monkeypatch):
    """Each norm's model has a version of its own, without a graph break; none runs eagerly."""
    # Dynamo alone, without the minutes that Inductor takes.
    monkeypatch.setattr(GPT, "compile", partialmethod(nn.Module.compile, backend="eager"))
    compiled = dataclasses.replace(settings, device=device).with_scope("compiled")
    data = speed.batches(compiled, 2, 0)
    for norm in ("eager", "aten", "triton"):
        before = timing.compilations()
        timing.ready_step(compiled, norm, data, warmup_steps=1)
        assert timing.compilations() > before
    assert not counters["graph_break"]
