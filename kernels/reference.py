"""RMSNorm and add+RMSNorm by their definition: every other implementation is judged by it.

Source of the maths: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019
(https://arxiv.org/abs/1910.07467), equation 4, with eps inside the root.
"""

import torch
from torch import Tensor

from kernels.arguments import check_arguments, compute_dtype
from kernels.registry import Norm


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded once, at the end.

    Arguments, result and errors are those of `kernels.rms_norm`. Gradients come from autograd.
    """
    check_arguments(x, None, weight, eps, out_dtype)
    return _normalise(x, weight, eps, out_dtype or x.dtype, compute_dtype(x, weight))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual add and the norm of its rounded sum: (rms_norm(h), h) with h = x + residual.

    Arguments, results and errors are those of `kernels.add_rms_norm`.
    """
    check_arguments(x, residual, weight, eps, out_dtype)
    compute = compute_dtype(x, residual, weight)
    h = (x.to(compute) + residual.to(compute)).to(residual.dtype).contiguous()
    return _normalise(h, weight, eps, out_dtype or x.dtype, compute), h


def _normalise(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, compute: torch.dtype
) -> Tensor:
    x = x.to(compute)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = x * rstd
    if weight is not None:
        y = y * weight.to(compute)
    return y.to(out_dtype).contiguous()


norm = Norm("eager", rms_norm, add_rms_norm, add_is_exact=True)
