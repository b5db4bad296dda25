"""The Triton kernels as differentiable PyTorch calls, in eager mode and under torch.compile.

Who calls whom. `passes`, which launches the kernels, is the module triton_rms_norm in eager mode:

    rms_norm -> _norm -> _differentiable -> _RMSNorm -> triton_rms_norm.forward, .backward

and its two functions as operators of PyTorch's where calls are traced, so that they are recorded:

    rms_norm -> _norm -> the operator norm                      (recorded by torch.compile's Dynamo)
    norm -> _differentiable -> _RMSNorm -> the operators forward, backward
    forward, backward -> triton_rms_norm.forward, .backward -> launcher.record     (recorded by AOT)

The compiled code launches the kernels by itself. In the interpreter, and under make_fx or
torch.export, forward and backward are recorded, and when they run:

    forward, backward -> triton_rms_norm.forward, .backward -> launcher.launch
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad

from kernels import arguments, interpreter, launcher, launches, triton_rms_norm
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
        once. Differentiable once, backward; dw is summed in a fixed order, so equal inputs give
        equal bits.

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
    if _is_traced(x, residual, weight):
        operator = _exported_norm if torch.compiler.is_exporting() else _traced_norm
        return operator(x, residual, weight, eps, out_dtype)
    return _differentiable(x, residual, weight, eps, out_dtype, triton_rms_norm)


def _is_traced(*tensors) -> bool:
    """Whether what is called has to be an operator of PyTorch's: under torch.compile, in a
    dispatch mode (make_fx, FakeTensorMode, ...), or because a tensor is no plain memory."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.jit.is_tracing()
        or any(type(tensor) not in _PLAIN for tensor in tensors)
    )


_PLAIN = (Tensor, nn.Parameter, type(None))


def _differentiable(x, residual, weight, eps, out_dtype, passes) -> Sequence[Tensor]:
    """`_norm` on top of passes.forward and passes.backward."""
    tensors = (x, residual, weight)
    if forward_ad._current_level >= 0:
        _check_no_tangent(tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _RMSNorm.apply(x, residual, weight, eps, out_dtype, passes)
    outputs = _empty_outputs(x, residual, out_dtype)
    passes.forward(x, residual, weight, eps, *outputs, None)
    return [tensor for tensor in outputs if tensor is not None]


def _check_no_tangent(tensors) -> None:
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("the Triton rms_norm has no forward-mode derivative (jvp)")


def _empty_outputs(x, residual, out_dtype) -> tuple[Tensor, Tensor | None]:
    """For y and h."""
    y = x.new_empty(x.shape, dtype=out_dtype)
    return y, None if residual is None else x.new_empty(x.shape, dtype=residual.dtype)


def _check_device(x: Tensor) -> None:
    if x.is_meta:
        raise ValueError("x must be a tensor with data, but it is on the meta device")
    if not x.is_cuda and not interpreter.INTERPRETED:
        raise ValueError(
            f"x must be on a CUDA device for the Triton kernels, but it is on {x.device}; "
            "set TRITON_INTERPRET=1 to run them through Triton's interpreter"
        )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, out_dtype, passes):
        y, h = _empty_outputs(x, residual, out_dtype)
        rows = x.numel() // x.shape[-1]
        rstd = x.new_empty(rows, dtype=compute_dtype(x, residual, weight))
        passes.forward(x, residual, weight, eps, y, h, rstd)
        ctx.save_for_backward(x if h is None else h, weight, rstd)
        ctx.set_materialize_grads(False)
        if h is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(h)
        ctx.x_dtype, ctx.passes = x.dtype, passes
        return (y,) if h is None else (y, h)

    @staticmethod
    def backward(ctx, dy, dh=None):
        if not torch.is_grad_enabled():
            return *_gradients(ctx, dy, dh), None, None, None
        h, weight, _ = ctx.saved_tensors
        return *_LastGradients.apply(ctx, dy, dh, h, weight), None, None, None


class _LastGradients(torch.autograd.Function):
    """The gradients where theirs may be asked for as well (create_graph=True): that raises, where
    `once_differentiable` would let a gradient that depends on x or weight pass for a constant."""

    @staticmethod
    def forward(ctx, norm_ctx, dy, dh, h, weight):
        return _gradients(norm_ctx, dy, dh)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("the Triton rms_norm is differentiable once, not twice")


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
    dx = h.new_empty(h.shape, dtype=x_dtype) if need_dx else None
    dr = dx if x_dtype == r_dtype else None
    if need_dr and dr is None:
        dr = h.new_empty(h.shape, dtype=r_dtype)
    dw = torch.empty_like(weight) if need_dw else None
    written = (dr, None) if dx is None else (dx, None if dr is dx else dr)
    ctx.passes.backward(dy, dh, h, weight, rstd, *written, dw)
    return dx, dr if need_dr else None, dw


# The two passes as operators write into tensors that the caller allocates, so that compiled code
# can plan their memory. The norm around them is an operator, too, since PyTorch caches no compiled
# graph with an autograd.Function in it; it is gone when the passes are called. A cached graph knows
# it by its name alone, which therefore says what it was traced from: code and launches. An exported
# program, which keeps it, names the code alone: launches are those of where it runs.

_operators = torch.library.Library("triton_rmsnorm_gpt", "DEF")
_operators.define(
    "forward(Tensor x, Tensor? residual, Tensor? weight, float eps, "
    "Tensor(a!) y, Tensor(b!)? h, Tensor(c!)? rstd) -> ()"
)
_operators.define(
    "backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, "
    "Tensor(a!)? dx, Tensor(b!)? dr, Tensor(c!)? dw) -> ()"
)
_sources = [__file__, *(m.__file__ for m in (arguments, launcher, launches, triton_rms_norm))]
_code = b"".join(Path(source).read_bytes() for source in _sources)
_exported = "exported_" + hashlib.sha256(_code).hexdigest()[:16]
_traced = "traced_" + hashlib.sha256(_code + launches.contents()).hexdigest()[:16]
for _name in (_exported, _traced):
    _operators.define(
        f"norm.{_name}(Tensor x, Tensor? residual, Tensor? weight, float eps, "
        "ScalarType out_dtype) -> Tensor[]"
    )
for _name in ("forward", "backward"):
    _operators.impl(_name, getattr(triton_rms_norm, _name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"triton_rmsnorm_gpt::{_name}", lambda *_: None, lib=_operators)


def _recording(name: str) -> Callable:
    """The rule by which torch.compile replaces the operator by the kernels that it launches."""
    run = getattr(triton_rms_norm, name)

    def rule(mode, operator, types, args, kwargs):
        if torch.compiler.is_exporting():  # a program for other machines keeps the operator
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        if not all(issubclass(t, (FakeTensor, FunctionalTensor)) or t is Tensor for t in types):
            return NotImplemented  # a subclass takes itself apart first
        with mode:
            return run(*args, **kwargs, launch=launcher.record)

    return rule


if not interpreter.INTERPRETED:
    for _name in ("forward", "backward"):
        torch.library.register_torch_dispatch(
            f"triton_rmsnorm_gpt::{_name}", FunctionalTensorMode, _recording(_name), lib=_operators
        )


def _of_operators(x, residual, weight, eps, out_dtype) -> list[Tensor]:
    passes = torch.ops.triton_rmsnorm_gpt
    return list(_differentiable(x, residual, weight, eps, out_dtype, passes))


for _name in (_exported, _traced):
    _operators.impl(f"norm.{_name}", _of_operators, "CompositeImplicitAutograd")
_exported_norm = getattr(torch.ops.triton_rmsnorm_gpt.norm, _exported)
_traced_norm = getattr(torch.ops.triton_rmsnorm_gpt.norm, _traced)

norm = Norm("triton", rms_norm, add_rms_norm, add_is_exact=True)
