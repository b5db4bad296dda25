"""The Triton kernels as differentiable PyTorch calls, in eager mode and under torch.compile."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import interpreter, triton_rms_norm
from kernels.arguments import check_arguments, compute_dtype
from kernels.registry import Norm


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in one pass over x.

    Args:
        x: (..., N), N >= 1, float16, bfloat16, float32 or float64. Rows may be strided (a slice
            of a fused QKV is read in place); other layouts than that are copied first.
        weight: (N,) of any of these dtypes, or None for no scaling.
        eps: added to the mean of squares, at least 0.
        out_dtype: dtype of the result; x's by default.

    Returns:
        (..., N), contiguous. Computed in float32 (float64 if x or weight is float64) and rounded
        once. Differentiable once; dw is summed in a fixed order, so equal inputs give equal bits.

    Raises:
        ValueError: for a wrong shape, dtype, device or eps, naming the argument.
    """
    check_arguments(x, None, weight, eps, out_dtype)
    _check_device(x)
    return _norm(x, None, weight, eps, out_dtype or x.dtype)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual add and the norm of its sum in one pass: (rms_norm(h), h), h = x + residual.

    Args:
        x: (..., N), the branch that is added to the stream.
        residual: the stream, of x's shape and any of x's dtypes.
        weight, eps, out_dtype: as for `rms_norm`.

    Returns:
        y (..., N) in out_dtype and h (..., N) in residual's dtype, both contiguous. y is the norm
        of the rounded h, so with x and residual of one dtype it equals rms_norm(x + residual).

    Raises:
        ValueError: for a wrong shape, dtype, device or eps, naming the argument.
    """
    if residual is None:
        raise ValueError("residual must be a tensor, but it is None: rms_norm is without one")
    check_arguments(x, residual, weight, eps, out_dtype)
    _check_device(x)
    y, h = _norm(x, residual, weight, eps, out_dtype or x.dtype)
    return y, h


def _norm(x, residual, weight, eps, out_dtype) -> Sequence[Tensor]:
    """[y], or [y, h] with a residual."""
    if torch.compiler.is_compiling():
        return torch.ops.triton_rmsnorm_gpt.norm(x, residual, weight, eps, out_dtype)
    return _differentiable(x, residual, weight, eps, out_dtype, triton_rms_norm)


def _differentiable(x, residual, weight, eps, out_dtype, passes) -> Sequence[Tensor]:
    """`_norm` on top of passes.forward and passes.backward."""
    tensors = (x, residual, weight)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _RMSNorm.apply(x, residual, weight, eps, out_dtype, passes)
    return passes.forward(x, residual, weight, eps, out_dtype, False)


def _check_device(x: Tensor) -> None:
    if x.is_meta or x.layout != torch.strided:
        raise ValueError(f"x must be a dense tensor with data, but it is {x.layout} on {x.device}")
    if not x.is_cuda and not interpreter.INTERPRETED:
        raise ValueError(
            f"x must be on a CUDA device for the Triton kernels, but it is on {x.device}; "
            "set TRITON_INTERPRET=1 to run them through Triton's interpreter"
        )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, out_dtype, passes):
        *outputs, rstd = passes.forward(x, residual, weight, eps, out_dtype, True)
        ctx.save_for_backward(x if residual is None else outputs[1], weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.x_dtype, ctx.passes = x.dtype, passes
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):
        return *_gradients(ctx, dy, dh), None, None, None


def _gradients(ctx, dy, dh) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, the residual's gradient and dw, None for each that is not wanted.

    The sum of the norm's own gradient and dh is that of x and of the residual: it is computed
    once, and written a second time only where their dtypes differ.
    """
    h, weight, rstd = ctx.saved_tensors
    need_dx, need_dr, need_dw = ctx.needs_input_grad[:3]
    x_dtype, r_dtype = ctx.x_dtype, h.dtype
    if dy is None:  # only the stream was used: the norm has no gradient
        dx = dh.to(x_dtype) if need_dx and dh is not None else None
        return dx, dh if need_dr else None, None
    both = need_dx and need_dr and x_dtype != r_dtype
    first = x_dtype if need_dx else r_dtype if need_dr else None
    second = r_dtype if both else None
    found = iter(ctx.passes.backward(dy, dh, h, weight, rstd, first, second, need_dw))
    dx, dr, dw = (next(found) if wanted else None for wanted in (first, second, need_dw))
    if not both:
        dx, dr = (dx if need_dx else None), (dx if need_dr else None)
    return dx, dr, dw


# In a compiled model the two passes are opaque operators: the launch, which torch.compile could not
# trace in full (dependent launch, for one), then is the same as in eager mode. The norm around
# them is an operator, too, since PyTorch caches no compiled graph with an autograd.Function in it;
# it is gone when the passes are called, which carry no gradients that would cost the host time.

_operators = torch.library.Library("triton_rmsnorm_gpt", "DEF")
_operators.define(
    "forward(Tensor x, Tensor? residual, Tensor? weight, float eps, ScalarType out_dtype, "
    "bool save_rstd) -> Tensor[]"
)
_operators.define(
    "backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, ScalarType? dx_dtype, "
    "ScalarType? dr_dtype, bool need_dw) -> Tensor[]"
)
_operators.define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, float eps, ScalarType out_dtype) -> Tensor[]"
)
_operators.impl("forward", triton_rms_norm.forward, "CompositeExplicitAutograd")
_operators.impl("backward", triton_rms_norm.backward, "CompositeExplicitAutograd")


@torch.library.impl(_operators, "norm", "CompositeImplicitAutograd")
def _(x, residual, weight, eps, out_dtype):
    passes = torch.ops.triton_rmsnorm_gpt
    return list(_differentiable(x, residual, weight, eps, out_dtype, passes))


@torch.library.register_fake("triton_rmsnorm_gpt::forward", lib=_operators)
def _(x, residual, weight, eps, out_dtype, save_rstd):
    outputs = [x.new_empty(x.shape, dtype=out_dtype)]
    if residual is not None:
        outputs.append(x.new_empty(x.shape, dtype=residual.dtype))
    if save_rstd:
        rows = x.numel() // x.shape[-1]
        outputs.append(x.new_empty(rows, dtype=compute_dtype(x, residual, weight)))
    return outputs


@torch.library.register_fake("triton_rmsnorm_gpt::backward", lib=_operators)
def _(dy, dh, h, weight, rstd, dx_dtype, dr_dtype, need_dw):
    outputs = [h.new_empty(h.shape, dtype=dtype) for dtype in (dx_dtype, dr_dtype) if dtype]
    return [*outputs, torch.empty_like(weight)] if need_dw else outputs


norm = Norm("triton", rms_norm, add_rms_norm, add_is_exact=True)
