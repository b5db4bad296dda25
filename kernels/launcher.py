"""Launching Triton kernels with little host time.

Triton's own launch works out the specialisation of a kernel anew for every call, in Python. In
eager training that is most of what a norm costs the host, so the compiled kernel is looked up here
by what the specialisation depends on, and launched directly.
"""

import torch
import triton
from torch import Tensor
from triton import knobs

from kernels import interpreter

_compiled = {}


def launch(
    kernel,
    device: int,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int, ...],
    constants: dict,
    options: dict,
) -> None:
    """Run kernel[grid](*tensors, *integers, **constants, **options) on the current device.

    Args:
        kernel: a @triton.jit function whose integer arguments are in its do_not_specialize.
        device: index of the current device.
        tensors, integers: its leading arguments.
        constants: its constexpr arguments, in the order of its signature.
        options: the compiler's, such as num_warps.
    """
    if interpreter.INTERPRETED:
        interpreter.announce()
        with interpreter.ONE_AT_A_TIME:
            kernel[grid](*tensors, *integers, **constants, **options)
        return
    # Triton specialises on dtypes, 16-byte alignment and integers beyond 32 bits. Only the usual
    # case of the last two is looked up here.
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    usual = addresses % 16 == 0 and max(integers) < 2**31
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    key = (kernel.fn, device, *dtypes, *constants.values(), *options.values())
    compiled = _compiled.get(key) if usual else None
    if compiled is None or knobs.runtime.launch_enter_hook.calls:
        compiled = kernel[grid](*tensors, *integers, **constants, **options)
        if usual:
            _compiled[key] = compiled
        return
    compiled.run(
        *grid,
        triton.runtime.driver.active.get_current_stream(device),
        compiled.function,
        compiled.packed_metadata,
        None,  # launch metadata and the two hooks are for profilers, which take the way above
        None,
        None,
        *tensors,
        *integers,
        *constants.values(),
    )


def record(kernel, device, grid, tensors, integers, constants, options) -> None:
    """`launch` while torch.compile traces: the code that it makes will launch the kernel.

    A recorded kernel holds no inline assembly, and so no dependent launch: PyTorch would not see
    what it writes to, and copy all that it is given.
    """
    torch.library.wrap_triton(kernel)[grid](*tensors, *integers, **constants, **options)


def forget() -> None:
    """Drop the compiled kernels, so that `spills` speaks only of what is launched from now on."""
    _compiled.clear()


def spills(kernel) -> int:
    """The most registers that a thread of any compiled version of the kernel spills to memory."""
    return max(found.n_spills for (fn, *_), found in _compiled.items() if fn is kernel.fn)
