"""What a norm computes: the tiers of single calls and of a float32 model."""

import dataclasses

import pytest
import torch

from compare import exactness

ROWS = 16  # of the operator's inputs


@pytest.fixture
def small(settings, device):
    return dataclasses.replace(settings, device=device)


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
    found = exactness.op_tier(
        dataclasses.replace(small, model=model, precision=precision), norm, ROWS
    )
    assert found["verdict"] == "pass", found["detail"]
    named = " ".join(case["case"] for case in found["cases"])
    for part in ("dw of QK-norm", "h of add and norm", "dr of add and norm, odd shape", "small"):
        assert part in named


def test_op_tier_sees_one_wrong_element_and_nan(small, monkeypatch):
    for value in (2.0, float("nan")):

        def results(self, norm, autocast, honest=exactness.Operands.results, value=value):
            found = honest(self, norm, autocast)
            if norm.name == "aten":
                found["dx"][0, 0] = value * found["dx"].abs().max()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(exactness.Operands, "results", results)
            assert exactness.op_tier(small, "aten", ROWS)["verdict"] == "fail"
    assert exactness.op_tier(small, "aten", ROWS)["verdict"] == "pass"


def test_float32_tier_passes_triton_and_finds_the_reference_equal_to_itself(small):
    triton = exactness.float32_tier(small, "triton")
    assert triton["verdict"] == "pass", triton["detail"]
    if small.device.type == "cpu":  # a GPU has no deterministic algorithm for some operations
        assert all(case["error"] == 0 for case in exactness.float32_tier(small, "eager")["cases"])


def test_float32_tier_covers_every_parameter_and_step(small):
    cases = {case["case"] for case in exactness.float32_tier(small, "aten")["cases"]}
    assert {"gradient of blocks.0.norm1.weight", "gradient of embedding.weight"} <= cases
    assert {"loss of step 0", f"loss of step {exactness.SGD_STEPS - 1}"} <= cases


def test_float32_tier_restores_the_switches_it_turns():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with exactness.reproducible_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(before)
