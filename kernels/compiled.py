"""The definition through torch.compile: what Inductor makes of the reference, norm by norm."""

import functools
import os
import shutil
import types
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import reference
from kernels.arguments import check_arguments
from kernels.registry import Norm


def make() -> Norm:
    """The compiled norm. Raises ValueError where the compiler that Inductor calls is missing."""
    compilers = ("g++", "clang++", os.environ.get("CXX", "g++"))
    if not torch.cuda.is_available() and not any(map(shutil.which, compilers)):
        raise ValueError(
            "norm 'compiled' needs a C++ compiler on a CPU: install g++, or set CXX to one"
        )
    return Norm("compiled", rms_norm, add_rms_norm)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`kernels.reference.rms_norm`, compiled."""
    check_arguments(x, None, weight, eps, out_dtype)
    function = _compiled_for(reference.rms_norm, x, weight, out_dtype)
    return function(x, weight, eps, out_dtype=out_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`kernels.reference.add_rms_norm`, compiled."""
    check_arguments(x, residual, weight, eps, out_dtype)
    function = _compiled_for(reference.add_rms_norm, x, weight, residual.dtype, out_dtype)
    return function(x, residual, weight, eps, out_dtype=out_dtype)


def _compiled_for(function: Callable, x: Tensor, weight: Tensor | None, *dtypes) -> Callable:
    if torch.compiler.is_compiling():  # inside a compiled model the definition is traced through
        return function
    return _compile(function, x.shape[-1:], x.dtype, weight is None or weight.dtype, *dtypes)


@functools.cache
def _compile(function: Callable, *_key) -> Callable:
    """A compiled copy of `function` for one width and set of dtypes.

    Dynamo keys its cache by code object. Without a copy of its own, the second width seen would
    be compiled with a dynamic row length, which costs the persistent reduction, and the ninth
    variant would silently run eagerly.
    """
    code = function.__code__.replace(co_name=function.__name__)
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy)
