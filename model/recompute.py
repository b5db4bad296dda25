"""Less memory for a norm: its output is not kept for the backward pass but made again there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kernels import Norm, RMSNorm


def recompute_problems(norm: Norm) -> list[str]:
    """Why this norm's output cannot be made again from the stream, if it cannot."""
    if norm.add_is_exact:
        return []
    return [
        f"norm_recompute is not for norm {norm.name!r}: made again from the stream, its output "
        "may differ in the last bit (it does not say add_is_exact). Turn it off, or take a norm "
        "like triton or eager."
    ]


def recomputed(enabled: bool, norm: RMSNorm, y: Tensor, stream: Tensor) -> AbstractContextManager:
    """A context in which operations that would keep y for their backward keep the stream instead.

    Memory is saved by norms that keep the stream anyway, as the fused ones do; the norm op by op
    keeps a bfloat16 stream as float32. Gradients stay the same to the last bit: y is made again
    just before it is needed, by a norm that has no `recompute_problems`.

    Args:
        enabled: Whether to do so at all; nothing is done either where no gradient is recorded.
        norm: What made y.
        y: Its output, (..., dim).
        stream: What it normalised, of y's shape: the stream after the add.
    """
    if not enabled or not torch.is_grad_enabled():
        return nullcontext()
    again = _call_again(norm, stream)
    storage = y.untyped_storage().data_ptr()

    def pack(tensor: Tensor):
        if tensor.untyped_storage().data_ptr() != storage:
            # Detached, or an operation that saves its output would hold on to itself through it,
            # and a graph that never ran backward (out of memory) would stay.
            return tensor.detach()
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else again().as_strided(*packed)

    return saved_tensors_hooks(pack, unpack)


def _call_again(norm: RMSNorm, stream: Tensor) -> Callable[[], Tensor]:
    """A function that makes y from the stream.

    The norm is called with the autocast and the need for gradients that it had: these may decide
    which kernels it takes.
    """
    stream = stream.detach()
    device = stream.device.type
    autocast = {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
    }

    def again() -> Tensor:
        h = stream.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**autocast):
            return norm(h).detach()

    return again
