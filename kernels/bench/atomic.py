"""The naive Triton RMSNorm, kept for the lesson: dw by one atomic add a row and feature.

Every row adds to the same N addresses, so the rows queue up behind each other, and the order of
the additions, hence the last bits of dw, changes from run to run.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels import interpreter  # noqa: F401  chosen before the first kernel is defined
from kernels.arguments import check_arguments
from kernels.registry import Norm


def rms_norm(x, weight=None, eps=1e-6, *, out_dtype=None):
    """As `kernels.rms_norm`, for a contiguous x and weight, in float32."""
    check_arguments(x, None, weight, eps, out_dtype)
    if weight is None or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("norm 'triton-atomic' needs a weight, which is contiguous, as x is")
    return _AtomicRMSNorm.apply(x, weight, eps, out_dtype or x.dtype)


def add_rms_norm(x, residual, weight=None, eps=1e-6, *, out_dtype=None):
    """Not offered: the lesson is in the plain norm."""
    raise ValueError("norm 'triton-atomic' has no add_rms_norm")


norm = Norm("triton-atomic", rms_norm, add_rms_norm)


class _AtomicRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, out_dtype):
        n = x.shape[-1]
        y = torch.empty_like(x, dtype=out_dtype)
        rstd = x.new_empty(x.numel() // n, dtype=torch.float32)
        launch = {"N": n, "BLOCK": triton.next_power_of_2(n), "num_warps": _warps(n)}
        _forward_kernel[(len(rstd),)](x, weight, y, rstd, EPS=float(eps), **launch)
        ctx.save_for_backward(x, weight, rstd)
        ctx.launch = launch
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight, dtype=torch.float32)
        _backward_kernel[(len(rstd),)](dy.contiguous(), x, weight, rstd, dx, dw, **ctx.launch)
        return dx, dw.to(weight.dtype), None, None


def _warps(n: int) -> int:
    return min(max(triton.next_power_of_2(n) // 1024, 4), 16)


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, EPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.reduce(x * x, 0, _add) / N + EPS)
    tl.store(rstd_ptr + row, rstd)
    y = (x * rstd * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * N + column, y, mask=column < N)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, N: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    x_hat = x * rstd
    g = dy * weight
    dx = (g - x_hat * (tl.reduce(g * x_hat, 0, _add) / N)) * rstd
    tl.store(dx_ptr + row * N + column, dx.to(dx_ptr.dtype.element_ty), mask=column < N)
    tl.atomic_add(dw_ptr + column, dy * x_hat, mask=column < N)


@triton.jit
def _add(a, b):
    return a + b
