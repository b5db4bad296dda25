"""RMSNorm as a module: the norm's learnt weight, with the implementation chosen by name."""

import torch
from torch import Tensor, nn

from kernels.arguments import check_eps
from kernels.registry import load_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with the residual add fused in where a residual is given.

    Args:
        dim: features in the last dimension.
        eps: added to the mean of squares before the root.
        norm: implementation, a name in `kernels.NORMS` or "package.module:name".

    The output has the autocast dtype where autocast is on, else the weight's dtype, so that the
    linear layer that follows can take it as it is.

    Raises:
        ValueError: for an unknown norm, one whose package is missing, dim < 1, or a wrong eps.
    """

    def __init__(self, dim: int, eps: float = 1e-6, norm: str = "triton") -> None:
        super().__init__()
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise ValueError(f"dim must be a whole number of at least 1, but it is {dim!r}")
        check_eps(eps)
        self.dim = dim
        self.eps = eps
        self.norm = load_norm(norm)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm y of x (..., dim); with a residual, (norm of x + residual, x + residual)."""
        out_dtype = self.weight.dtype
        device = self.weight.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            out_dtype = torch.get_autocast_dtype(device)
        if residual is None:
            return self.norm.rms_norm(x, self.weight, self.eps, out_dtype=out_dtype)
        return self.norm.add_rms_norm(x, residual, self.weight, self.eps, out_dtype=out_dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, norm={self.norm.name}"
