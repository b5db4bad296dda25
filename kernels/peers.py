"""Other people's RMSNorm behind this project's two calls, for comparison."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.arguments import check_arguments
from kernels.registry import Norm


def aten() -> Norm:
    """torch.nn.functional.rms_norm; the add before it is a separate kernel."""

    def rms_norm(x, weight=None, eps=1e-6, *, out_dtype=None) -> Tensor:
        check_arguments(x, None, weight, eps, out_dtype)
        return F.rms_norm(x, x.shape[-1:], weight, eps).to(out_dtype or x.dtype)

    def add_rms_norm(x, residual, weight=None, eps=1e-6, *, out_dtype=None):
        check_arguments(x, residual, weight, eps, out_dtype)
        compute = torch.promote_types(x.dtype, residual.dtype)
        h = (x.to(compute) + residual.to(compute)).to(residual.dtype)
        return F.rms_norm(h, h.shape[-1:], weight, eps).to(out_dtype or x.dtype), h

    return Norm("aten", rms_norm, add_rms_norm)
