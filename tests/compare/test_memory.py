"""Bytes that norms keep, and the search for the largest batch."""

import dataclasses

import pytest
import torch

from compare import memory
from compare.child import Kept

ROWS, WIDTH = 4 * 16, 16  # of the fixture's settings


@pytest.mark.parametrize(
    ("norm", "stream", "precision", "expected"),
    [
        # h and rstd
        ("triton", "float32", "32-true", 4 * ROWS * WIDTH + 4 * ROWS),
        ("triton", "bfloat16", "bf16-mixed", 2 * ROWS * WIDTH + 4 * ROWS),
        # h in float32, rstd and x_hat in float32
        ("eager", "float32", "32-true", 2 * 4 * ROWS * WIDTH + 4 * ROWS),
        ("eager", "bfloat16", "bf16-mixed", 2 * 4 * ROWS * WIDTH + 4 * ROWS),
    ],
)
def test_bytes_kept_for_backward(settings, device, norm, stream, precision, expected):
    model = {**settings.model, "stream_dtype": stream}
    settings = dataclasses.replace(settings, model=model, precision=precision, device=device)
    assert memory.saved_bytes_of(settings, norm) == expected


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 100, 1000])
def test_the_largest_batch_is_found_to_within_three_percent(limit):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    largest = memory.bisect_largest(fits, start=8)
    assert limit - max(1, limit // 32) < largest <= limit or largest == limit
    assert len(asked) <= 20


def test_a_batch_that_does_not_fit_is_an_answer(settings, monkeypatch):
    """Each size is tried as a training begins: without the optimizer's state of another size."""
    ready, states = memory.Step, []

    def limited_step(*arguments):
        step = ready(*arguments)

        def forward(batch, whole=step.forward):
            states.append((len(batch), len(step.optimizer.state)))
            if len(batch) > 9:
                raise torch.OutOfMemoryError("out of memory")
            return whole(batch)

        step.forward = forward
        return step

    monkeypatch.setattr(memory, "Step", limited_step)
    assert memory.largest_batch(settings, "eager") == 9
    assert all(state == 0 for size, state in states if size > 9)
    fitting = [state > 0 for size, state in states if size <= 9]
    assert fitting == [False, True] * (len(fitting) // 2)  # two steps of each


def test_without_a_gpu_there_are_no_peaks(settings, in_this_process):
    found = memory.run(settings, lambda *_: None, Kept())
    for norm in settings.norms:
        assert found[norm]["peak_allocated_gib"] is None
        assert found[norm]["largest_batch"] is None
        assert found[norm]["saved_bytes_per_norm"] > 0


def test_peaks_of_two_processes_have_to_agree(settings, monkeypatch):
    first, second = ({"retries": 0, "peak_allocated_gib": gib} for gib in (1.0, 2.0))
    answers = {
        "compare.memory:peak": first,
        "compare.memory:peak_and_largest_batch": {"peak": second, "largest_batch": 40},
    }
    monkeypatch.setattr(memory.child, "call", lambda target, *_, **__: answers[target])
    found = memory.on_gpu(settings, "eager", lambda *_: None, Kept())
    assert found == {**first, "repeat_equal": False, "largest_batch": 40}


def test_a_size_that_fails_for_another_reason_is_said(settings, monkeypatch):
    def fails(*_):
        raise RuntimeError("an index is too large\nand more")

    monkeypatch.setattr(memory, "peak", lambda *_: {"retries": 0})
    monkeypatch.setattr(memory, "largest_batch", fails)
    found = memory.peak_and_largest_batch(settings, lambda *_: None, "eager")
    assert found == {"peak": {"retries": 0}, "largest_batch_note": "an index is too large"}
