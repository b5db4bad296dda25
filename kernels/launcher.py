"""Launching Triton kernels with little host time.

Triton's own launch works out the specialisation of a kernel anew for every call, in Python. In
eager training that is most of what a norm costs the host, so the compiled kernel is looked up here
by what the specialisation depends on, and launched directly.
"""

import torch
from torch import Tensor

from kernels import interpreter

_compiled = {}


def launch(kernel, grid: tuple[int, int, int], args: tuple, constants: dict, options: dict) -> None:
    """Run kernel[grid](*args, **constants, **options).

    Args:
        kernel: a @triton.jit function whose integer arguments are in its do_not_specialize.
        args: its leading arguments, tensors, None and integers.
        constants: its constexpr arguments, in the order of its signature.
        options: the compiler's, such as num_warps.
    """
    if interpreter.INTERPRETED:
        interpreter.announce()
        kernel[grid](*args, **constants, **options)
        return
    key = (
        kernel.fn,
        torch.cuda.current_device(),
        *map(_specialisation, args),
        *constants.values(),
        *options.values(),
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **constants, **options)
    else:
        compiled[grid](*args, *constants.values())


def forget() -> None:
    """Drop the compiled kernels, so that `spills` speaks only of what is launched from now on."""
    _compiled.clear()


def spills(kernel) -> int:
    """The most registers that a thread of any compiled version of the kernel spills to memory."""
    return max(found.n_spills for (fn, *_), found in _compiled.items() if fn is kernel.fn)


def _specialisation(arg: Tensor | int | None):
    """What Triton compiles a kernel anew for: dtype, 16-byte alignment, integers over 32 bits."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return arg is None or arg >= 2**31
