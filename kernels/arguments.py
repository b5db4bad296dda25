"""What the norms accept: one check that every implementation makes before it computes."""

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_EPS = torch.finfo(torch.float32).max  # a larger one would be infinite where it is added


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype the arithmetic is done in: float64 if any tensor is float64, else float32."""
    return (
        torch.float64
        if any(t is not None and t.dtype == torch.float64 for t in tensors)
        else torch.float32
    )


def check_arguments(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> None:
    """Raise ValueError naming the first argument that is wrong, what it was and what is allowed."""
    _check_tensor("x", x, x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"x must have a last dimension of at least one feature, but its shape is {_shape(x)}"
        )
    if residual is not None:
        _check_tensor("residual", residual, x)
        if residual.shape != x.shape:
            raise ValueError(
                f"residual must have x's shape {_shape(x)}, but its shape is {_shape(residual)}"
            )
    if weight is not None:
        _check_tensor("weight", weight, x)
        if weight.ndim != 1 or weight.shape[0] != x.shape[-1]:
            raise ValueError(
                f"weight must have the shape ({x.shape[-1]},) of x's last dimension, "
                f"but its shape is {_shape(weight)}"
            )
    check_eps(eps)
    if out_dtype is not None and out_dtype not in DTYPES:
        raise ValueError(f"out_dtype must be one of {_names(DTYPES)}, but it is {out_dtype!r}")


def check_eps(eps: float) -> None:
    """Raise ValueError if eps is no Python number from 0 to the largest of float32."""
    if not isinstance(eps, float | int) or not 0 <= eps <= LARGEST_EPS:
        raise ValueError(
            f"eps must be a Python number from 0 to {LARGEST_EPS:.3g}, but it is {eps!r}"
        )


def _check_tensor(name: str, tensor: Tensor, x: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, but it is a {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a dense tensor, but its layout is {layout}")
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} must have one of the dtypes {_names(DTYPES)}, but it is {tensor.dtype}"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, but it is on {tensor.device}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
