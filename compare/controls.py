"""Norms with a known fault: a parity check that passes one of them is worth nothing.

Each computes what the definition computes, operation by operation, except for its fault.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import Norm, reference

CONTROLS = {
    "wrong eps": "compare.controls:wrong_eps",
    "dx without its projection term": "compare.controls:no_projection",
    "dw zero": "compare.controls:zero_dw",
    "dw summed in bf16": "compare.controls:bfloat16_dw",
}


def _norm(name: str, normalise: Callable[[Tensor, Tensor, float, torch.dtype], Tensor]) -> Norm:
    """A norm from a function of (h, weight, eps, output dtype), with the definition's add."""

    def rms_norm(x, weight, eps=1e-6, *, out_dtype=None):
        return normalise(x, weight, eps, out_dtype or x.dtype)

    def add_rms_norm(x, residual, weight, eps=1e-6, *, out_dtype=None):
        h = (x.float() + residual.float()).to(residual.dtype)
        return normalise(h, weight, eps, out_dtype or x.dtype), h

    return Norm(name, rms_norm, add_rms_norm)


def _wrong_eps(h: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """Off by 1e-5, the default of other libraries; the model's is 1e-6."""
    return reference.rms_norm(h, weight, eps + 1e-5, out_dtype=out_dtype)


def _no_projection(h: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """rstd taken as a constant, so that dx = rstd * g."""
    h = h.float()
    rstd = torch.rsqrt(h.detach().square().mean(-1, keepdim=True) + eps)
    return (h * rstd * weight).to(out_dtype)


def _zero_dw(h: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    return reference.rms_norm(h, weight.detach() + 0 * weight, eps, out_dtype=out_dtype)


def _bfloat16_dw(h: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    x_hat = reference.rms_norm(h, None, eps, out_dtype=torch.float32)
    return (x_hat * _Rows.apply(weight, x_hat.shape)).to(out_dtype)


class _Rows(torch.autograd.Function):
    """weight (n,) repeated to `shape` (..., n), with its gradient summed in bfloat16."""

    @staticmethod
    def forward(ctx, weight: Tensor, shape: torch.Size) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.expand(shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        rows = gradient.flatten(0, -2).bfloat16()
        while len(rows) > 1:  # torch.sum would add in float32
            odd = rows[-1:] if len(rows) % 2 else rows[:0]
            rows = torch.cat([rows[0 : len(rows) - len(odd) : 2] + rows[1::2], odd])
        return rows[0].to(ctx.dtype), None


wrong_eps = _norm("wrong_eps", _wrong_eps)
no_projection = _norm("no_projection", _no_projection)
zero_dw = _norm("zero_dw", _zero_dw)
bfloat16_dw = _norm("bfloat16_dw", _bfloat16_dw)
