"""Each known fault fails the tiers it should, and what differs from the definition is the fault."""

import dataclasses

import pytest
import torch

from compare import controls, exactness, parity
from compare.controls import CONTROLS
from kernels import load_norm, reference

ROWS = 16  # of the operator's inputs


@pytest.fixture
def small(settings, device):
    return dataclasses.replace(settings, device=device)


def ignore(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("norm", CONTROLS.values(), ids=CONTROLS)
@pytest.mark.parametrize(
    ("precision", "stream"),
    [("32-true", "float32"), ("16-mixed", "float32"), ("bf16-mixed", "bfloat16")],
)
def test_both_cheap_tiers_catch_every_fault(small, norm, precision, stream):
    settings = dataclasses.replace(
        small, model=small.model | {"stream_dtype": stream}, precision=precision
    )
    found = parity.control(exactness.tiers(settings, ignore, [norm], ROWS)[norm])
    assert found["caught"]
    assert found["tier"] == "op"
    assert found["tiers"] == {"op": "fail", "float32": "fail"}


def test_in_bfloat16_inputs_as_small_as_eps_are_what_gives_a_wrong_eps_away(small):
    settings = dataclasses.replace(
        small, model=small.model | {"stream_dtype": "bfloat16"}, precision="bf16-mixed"
    )
    cases = exactness.op_tier(settings, CONTROLS["wrong eps"], ROWS)["cases"]
    failed = {case["case"] for case in cases if case["error"] > case["limit"]}
    assert {"y of norm, small inputs, RMS error", "dx of norm, small inputs, RMS error"} <= failed
    assert "y of norm, RMS error" not in failed


def test_a_norm_without_fault_is_not_caught(small):
    found = parity.control(exactness.tiers(small, ignore, ["aten"], ROWS)["aten"])
    assert not found["caught"]
    assert found["tier"] is None


@pytest.mark.parametrize(
    ("norm", "wrong"),
    [("no_projection", "dx"), ("zero_dw", "dw"), ("bfloat16_dw", "dw")],
)
def test_everything_but_the_fault_is_the_definition(norm, wrong):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 16, generator=generator).requires_grad_()
    weight = torch.randn(16, generator=generator).requires_grad_()
    dy = torch.randn(7, 16, generator=generator)

    def results(norm):
        y = norm.rms_norm(x, weight, 1e-6)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        return {"y": y, "dx": dx, "dw": dw}

    expected, found = results(reference.norm), results(load_norm(f"compare.controls:{norm}"))
    for name in expected:
        equal = torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-6)
        assert equal == (name != wrong)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_bfloat16_dw_is_a_sum_over_all_rows(rows):
    """Powers of two are exact in bfloat16, so that nothing is lost of this sum."""
    weight = torch.ones(3, requires_grad=True)
    controls._Rows.apply(weight, torch.Size((rows, 3))).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), float(rows)))
