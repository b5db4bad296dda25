"""Other people's RMSNorm behind this project's two calls, each through its own autograd function.

A peer is called only where it computes this project's definition: float32 arithmetic, one rounding
at the end, the stream kept in the residual's dtype. What it cannot do is a ValueError that says so.
"""

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.arguments import check_arguments
from kernels.registry import Norm


def aten() -> Norm:
    """torch.nn.functional.rms_norm; the add before it is a separate kernel."""

    def rms_norm(x, weight=None, eps=1e-6, *, out_dtype=None) -> Tensor:
        check_arguments(x, None, weight, eps, out_dtype)
        return _once_rounded(x, weight, eps, out_dtype or x.dtype)

    def add_rms_norm(x, residual, weight=None, eps=1e-6, *, out_dtype=None):
        check_arguments(x, residual, weight, eps, out_dtype)
        compute = torch.promote_types(x.dtype, residual.dtype)
        h = (x.to(compute) + residual.to(compute)).to(residual.dtype).contiguous()
        return _once_rounded(h, weight, eps, out_dtype or x.dtype), h

    def _once_rounded(x, weight, eps, out_dtype) -> Tensor:
        """F.rms_norm rounds to x's dtype: to none that is coarser than the output's."""
        x = x.to(torch.promote_types(x.dtype, out_dtype))
        return F.rms_norm(x, x.shape[-1:], weight, eps).to(out_dtype)

    return Norm("aten", rms_norm, add_rms_norm, add_is_exact=True)


def liger() -> Norm:
    """Liger-Kernel's LigerRMSNormFunction and LigerFusedAddRMSNormFunction.

    Casting mode "gemma", the only one with all arithmetic in float32 and one rounding at the end,
    and in_place=False, so that the upstream gradient is not written to. The environment variable
    LIGER_KERNEL_IMPL chooses among Liger's own implementations, as in Liger itself.
    """
    ops = _import("liger", "liger_kernel.ops")
    no_offset, casting, in_place, row_mode = 0.0, "gemma", False, None

    def rms_norm(x, weight=None, eps=1e-6, *, out_dtype=None) -> Tensor:
        check_arguments(x, None, weight, eps, out_dtype)
        _check_liger(x, None, weight, out_dtype)
        return ops.LigerRMSNormFunction.apply(
            x, weight, eps, no_offset, casting, in_place, row_mode
        )

    def add_rms_norm(x, residual, weight=None, eps=1e-6, *, out_dtype=None):
        check_arguments(x, residual, weight, eps, out_dtype)
        _check_liger(x, residual, weight, out_dtype)
        return ops.LigerFusedAddRMSNormFunction.apply(
            x, residual, weight, eps, no_offset, casting, in_place
        )

    return Norm("liger", rms_norm, add_rms_norm)


def quack() -> Norm:
    """QuACK's rmsnorm, with the residual, its dtype and the output dtype passed through."""
    rmsnorm = _import("quack", "quack").rmsnorm

    def rms_norm(x, weight=None, eps=1e-6, *, out_dtype=None) -> Tensor:
        check_arguments(x, None, weight, eps, out_dtype)
        _check_quack(x, None, weight, out_dtype)
        return rmsnorm(x, weight, out_dtype=out_dtype, eps=eps)

    def add_rms_norm(x, residual, weight=None, eps=1e-6, *, out_dtype=None):
        check_arguments(x, residual, weight, eps, out_dtype)
        _check_quack(x, residual, weight, out_dtype)
        return rmsnorm(
            x,
            weight,
            residual=residual,
            out_dtype=out_dtype,
            residual_dtype=residual.dtype,
            eps=eps,
            prenorm=True,
        )

    return Norm("quack", rms_norm, add_rms_norm)


LIGER_MAX_N = 65536  # one row is one tile of at most this many elements
QUACK_MAX_FLOAT32_N = 128 * 1024  # beyond it the backward's rows do not fit shared memory


def _check_liger(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    _check_no_float64("liger", x, residual, weight)
    if out_dtype not in (None, x.dtype):
        raise ValueError(
            f"norm 'liger' writes its output in x's dtype {_name(x.dtype)}: "
            f"out_dtype cannot be {_name(out_dtype)}"
        )
    if x.shape[-1] > LIGER_MAX_N:
        raise ValueError(
            f"norm 'liger' takes at most {LIGER_MAX_N} features a row, but x has {x.shape[-1]}"
        )
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(
            "norm 'liger' keeps the stream in x's dtype: residual must be "
            f"{_name(x.dtype)} like x, but it is {_name(residual.dtype)}"
        )
    if residual is not None and weight is None:
        raise ValueError("norm 'liger' has no add_rms_norm without a weight")
    _check_gpu("liger", x)


def _check_quack(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    _check_no_float64("quack", x, residual, weight)
    if out_dtype == torch.float64:
        raise ValueError("norm 'quack' computes in float32: out_dtype cannot be float64")
    n = x.shape[-1]
    stream = x if residual is None else residual
    if n > QUACK_MAX_FLOAT32_N and stream.dtype == torch.float32:
        raise ValueError(
            f"norm 'quack' takes at most {QUACK_MAX_FLOAT32_N} float32 features a row, "
            f"but x has {n}"
        )
    if n % 2 and min(x.element_size(), stream.element_size()) == 2:
        raise ValueError(
            "norm 'quack' copies at least 4 bytes at a time: rows of a 16-bit dtype need an even "
            f"number of features, but x has {n}"
        )
    _check_gpu("quack", x)


def _check_gpu(norm: str, x: Tensor) -> None:
    if x.device.type != "cuda":
        raise ValueError(f"norm {norm!r} needs x on a GPU, but it is on {x.device}")


def _check_no_float64(norm: str, *tensors: Tensor | None) -> None:
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        raise ValueError(f"norm {norm!r} computes in float32 and takes no float64 tensor")


def _import(norm: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"norm {norm!r} cannot be loaded: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
