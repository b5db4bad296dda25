"""Less memory for a norm: its output is not kept for the backward pass but made again there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kernels import RMSNorm


def recomputed(
    enabled: bool, norm: RMSNorm, y: Tensor, branch: Tensor | None, stream: Tensor
) -> AbstractContextManager:
    """A context in which operations that would keep y for their backward keep the stream instead.

    The norm keeps the stream anyway, so that nothing more is kept for y. Gradients stay the same
    to the last bit: y is made again, just before it is needed, in the way in which it was made.

    Args:
        enabled: Whether to do so at all; nothing is done either where no gradient is recorded.
        norm: What made y.
        y: Its output, (..., dim).
        branch: What it added to the stream, or None if it added nothing.
        stream: What it normalised, of y's shape: the stream after the add.
    """
    if not enabled or not torch.is_grad_enabled():
        return nullcontext()
    again = _call_again(norm, branch, stream)
    storage = y.untyped_storage().data_ptr()

    def pack(tensor: Tensor):
        if tensor.untyped_storage().data_ptr() != storage:
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else again().as_strided(*packed)

    return saved_tensors_hooks(pack, unpack)


def _call_again(norm: RMSNorm, branch: Tensor | None, stream: Tensor) -> Callable[[], Tensor]:
    """A function that makes y from the stream, every bit as it was.

    A norm that may sum in another order where it adds nothing is given a branch of zeros, and all
    are called with the autocast and the need for gradients that they had: these decide which
    kernels `compiled` and others take.
    """
    stream = stream.detach()
    adds = branch is not None and not norm.norm.add_is_exact
    dtype = branch.dtype if adds else None
    device = stream.device.type
    autocast = {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
    }

    def again() -> Tensor:
        h = stream.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**autocast):
            if not adds:
                return norm(h).detach()
            return norm(torch.zeros_like(h, dtype=dtype).requires_grad_(), h)[0].detach()

    return again
