"""Memory of the same step under every norm: peaks, what a norm keeps for backward, the largest
batch that fits."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from compare import child
from compare.child import Kept, Progress
from compare.setup import Settings, Step, batches, make_model, norm_inputs
from compare.timing import ready_step, synchronize
from kernels import RMSNorm

STEPS = 5  # over which the peak is taken
GIB = 2**30
UNKNOWN = dict.fromkeys(
    ("peak_allocated_gib", "peak_reserved_gib", "retries", "repeat_equal", "largest_batch")
)


def run(settings: Settings, progress: Progress, keep: Kept) -> dict:
    """Each norm's memory, as results.json has it under "memory"; peaks are None without a GPU."""
    found = {norm: dict(UNKNOWN) for norm in settings.norms}
    total = 1 + (2 * len(settings.norms) if settings.device.type == "cuda" else 0)
    progress("bytes kept for backward", 0, total)
    saved = keep(
        "bytes kept",
        lambda: child.call("compare.memory:saved_bytes", settings.config, lambda *_: None),
    )
    for norm in settings.norms:
        found[norm]["saved_bytes_per_norm"] = saved[norm]
    if settings.device.type == "cuda":
        for number, norm in enumerate(settings.norms):
            found[norm] |= on_gpu(
                settings,
                norm,
                lambda what, i, n=number: progress(what, 1 + 2 * n + i, total),
                keep,
            )
    return found


def on_gpu(settings: Settings, norm: str, progress: Callable[[str, int], None], keep: Kept) -> dict:
    """Peaks of two fresh processes, which have to agree, and the largest batch of the second."""

    def call(function: str) -> dict:
        return keep(
            f"{function} of {norm}",
            lambda: child.call(function, settings.config, lambda *_: None, norm=norm),
        )

    progress(f"peak of {norm}", 0)
    first = call("compare.memory:peak")
    progress(f"peak of {norm} again, and its largest batch", 1)
    second = dict(call("compare.memory:peak_and_largest_batch"))
    return {**first, "repeat_equal": second.pop("peak") == first, **second}


def saved_bytes(settings: Settings, progress: Progress) -> dict[str, int]:
    """Bytes that one add and norm of the model keeps for its backward, its weight aside, by norm.

    Every storage counts once and as a whole: it is kept as a whole. The call is the one between
    attention and MLP; in scope "compiled" it is compiled by itself, as in a model it cannot be
    told from what it is fused with.
    """
    return {norm: saved_bytes_of(settings, norm) for norm in settings.norms}


def saved_bytes_of(settings: Settings, norm: str) -> int:
    """`saved_bytes` of one norm."""
    module = RMSNorm(settings.model["n_embd"], settings.model["norm_eps"], norm=norm)
    module.to(settings.device)
    call = torch.compile(module) if settings.scope == "compiled" else module
    sizes = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != module.weight.untyped_storage().data_ptr():
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    for hooked in (False, True):  # the first call may compile, which must not see the hooks
        x, stream = norm_inputs(settings, settings.data.batch_size)
        with settings.autocast():
            if hooked:
                with saved_tensors_hooks(keep, lambda tensor: tensor):
                    call(x, stream)
            else:
                call(x, stream)
    return sum(sizes.values())


def peak(settings: Settings, progress: Progress, norm: str) -> dict:
    """Peak GiB over whole steps after a warm-up, and how often the allocator had to try again.

    To be called in a fresh process: the allocator has then served this model alone.
    """
    data = batches(settings, STEPS, settings.data.seed)
    step = ready_step(settings, norm, data, warmup_steps=STEPS)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    for batch in data:
        step(batch)
    synchronize(settings.device)
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
    }


def peak_and_largest_batch(settings: Settings, progress: Progress, norm: str) -> dict:
    """`peak` under that name, then `largest_batch`, or why it is not known."""
    found = {"peak": peak(settings, progress, norm)}
    try:
        return found | {"largest_batch": largest_batch(settings, norm)}
    except RuntimeError as error:  # a size at which something else than memory fails
        return found | {"largest_batch_note": str(error).splitlines()[0]}


def largest_batch(settings: Settings, norm: str) -> int:
    """Largest batch, in sequences, with which two steps fit into the GPU's memory.

    Doubled until it does not fit, then bisected to within 3%.
    """
    lit = make_model(settings, norm, settings.seed)
    step = Step(settings, lit, lit.optimizer())
    [batch] = batches(settings, 1, settings.data.seed)

    def fits(size: int) -> bool:
        # As at the start of a training: the optimizer's state, which lasts, comes to lie among the
        # tensors of this size's first step. Left from another size, it would keep blocks of memory
        # that nothing of this one fits into.
        step.optimizer.state.clear()
        gc.collect()  # of a size that did not fit, too, whose traceback is gone by now
        torch.cuda.empty_cache()
        repeated = batch[torch.arange(size, device=batch.device) % len(batch)]
        try:
            for _ in range(2):
                step(repeated)
            synchronize(settings.device)
        except torch.OutOfMemoryError:
            step.optimizer.zero_grad()
            return False
        return True

    return bisect_largest(fits, len(batch))


def bisect_largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest size that fits, to within 3%; 0 if not even 1 does.

    Args:
        fits: A function of the size, True up to some size and False above.
        start: Where to begin, at least 1.
    """
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
