"""The norm and its gradients in float64, each with the error that rounding may leave.

Bounds are elementwise. One rounding to the output dtype costs half an epsilon of the value; the
arithmetic before it costs a few epsilons of the compute dtype, relative to the sum of the
magnitudes that were added (which cancellation makes larger than the value itself).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Epsilons of the compute dtype lost before the last rounding. A blocked or pairwise sum of n terms
# loses at most its depth, about log2(n) + 16 (numpy adds runs of 16 one by one; a GPU thread adds
# at most 32 of a tile), the root and the products a handful more.
ARITHMETIC = 64


@dataclass(frozen=True)
class Expected:
    """A float64 value and how far from it a correct result may lie."""

    value: Tensor
    bound: Tensor


def oracle(
    h: Tensor, weight: Tensor | None, eps: float, dy: Tensor, dh: Tensor | None, dtypes: dict
) -> dict[str, Expected]:
    """y, dx and dw of the norm of h (rows, n), rounded to dtypes["y"], ["dx"] and ["dw"].

    dtypes["compute"] is the dtype of the arithmetic; h and the gradients are taken as exact.
    Where the norm's own gradient is rounded to dtypes["between"] before dh is added to it, as
    autograd does for the definition, that rounding counts too; and where the norm may read h
    before it is rounded to dtypes["unrounded"], the rounding of h does.
    """
    unit = ARITHMETIC * torch.finfo(dtypes["compute"]).eps
    if "unrounded" in dtypes:
        unit += torch.finfo(dtypes["unrounded"]).eps
    h, dy = h.double(), dy.double()
    dh = torch.zeros_like(h) if dh is None else dh.double()
    w = torch.ones_like(h[..., :1]) if weight is None else weight.double()
    rstd = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    x_hat = h * rstd
    g = dy * w
    projection = (g * x_hat).mean(-1, keepdim=True)
    y = x_hat * w
    of_norm = rstd * (g - x_hat * projection)
    dx = of_norm + dh
    terms = (dy * x_hat).reshape(-1, h.shape[-1])
    dw = terms.sum(0)
    magnitude = rstd * (g.abs() + x_hat.abs() * (g * x_hat).abs().mean(-1, keepdim=True)) + dh.abs()
    bound = _rounding(dx, dtypes["dx"]) + unit * magnitude
    if "between" in dtypes:
        bound += _rounding(of_norm, dtypes["between"]) + _rounding(dx, dtypes["between"])
    return {
        "y": Expected(y, _rounding(y, dtypes["y"]) + unit * y.abs()),
        "dx": Expected(dx, bound),
        "dw": Expected(dw, _rounding(dw, dtypes["dw"]) + unit * terms.abs().sum(0)),
    }


def assert_within(actual: Tensor, expected: Expected, name: str) -> None:
    """Fail unless every element lies within its bound; NaN never does."""
    error = (actual.double() - expected.value).abs()
    outside = ~(error <= expected.bound)
    assert not outside.any(), (
        f"{name}: {int(outside.sum())} of {outside.numel()} elements off, "
        f"the worst by {(error / expected.bound).nan_to_num(nan=torch.inf).max():.3g} bounds"
    )


def _rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half an epsilon or half of the smallest step; float64 becomes 16 bits by way of float32."""
    info = torch.finfo(dtype)
    through = torch.finfo(torch.float32).eps if info.bits == 16 else 0.0
    return value.abs() * (info.eps + through) / 2 + info.smallest_normal * info.eps
