"""What stops a training run by itself: values that are not finite, and memory that runs out."""

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.callbacks import is_log_step
from model.errors import TrainingError
from model.gpt import GPT
from model.lit import LitGPT

BYTES_PER_PARAMETER = 4 * 4  # weight, gradient and AdamW's two moments, all in float32
ADVICE = (
    "Checkpoints saved before are kept, and finite. A lower model.lr, a longer model.warmup_steps "
    "or another trainer.precision may help: settings can change when a run is resumed. If a "
    "checkpoint fails again, its weights had grown too far already: then start anew."
)


class FiniteCheck(Callback):
    """Stops at the first step whose loss or gradient is not finite; says which tensor was first.

    It looks only when a GPU is waited for anyway: before a row is logged, which the Recorder after
    this one does, and before a validation. That is soon enough, as LitGPT changes no weight from
    that step on. No checkpoint is saved of weights that are not finite, nor after a validation
    whose loss is not.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []  # a micro-batch each, since the last look
        self._grad_norms: list[Tensor] = []  # a step each
        self._first_batch = 0  # micro-batches before those
        self._steps_done = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps_done = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if not self._losses:
            self._first_batch = trainer.fit_loop.epoch_loop.batch_progress.total.processed - 1
        self._losses.append(outputs["loss"])
        if trainer.global_step == self._steps_done:
            return  # a micro-batch before the last one of its step
        self._steps_done = trainer.global_step
        self._grad_norms.append(pl_module.grad_norm)
        if is_log_step(trainer):
            self._look(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._look(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and not loss.isfinite() and not trainer.sanity_checking:
            raise TrainingError(
                f"The validation after step {trainer.global_step} has a loss of {loss.item():.4g}.",
                ADVICE,
            )

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        bad = weights_not_finite(pl_module.gpt)
        if trainer.strategy.reduce_boolean_decision(bool(bad), all=False):
            raise TrainingError(
                f"After step {trainer.global_step} not all weights are finite"
                + (f", {bad[0]} for one." if bad else "."),
                ADVICE,
            )

    def _look(self, trainer: Trainer, model: LitGPT) -> None:
        if not self._grad_norms:
            return
        losses = torch.stack(self._losses).view(len(self._grad_norms), -1)
        grad_norms = torch.stack(self._grad_norms)
        bad = ~losses.isfinite().all(1)
        if not has_scaler(trainer):  # which tries scales until the gradient fits, by design
            bad |= ~grad_norms.isfinite()
        if trainer.strategy.reduce_boolean_decision(bool(bad.any()), all=False):
            first = int(bad.int().argmax())
            step = self._steps_done - len(grad_norms) + first + 1
            micro_batches = losses.shape[1]
            start = self._first_batch + first * micro_batches
            batches = range(start, start + micro_batches)
            loss = losses[first].mean().item() * micro_batches
            raise TrainingError(
                f"Step {step} has a loss of {loss:.4g} and a gradient of norm "
                f"{grad_norms[first].item():.4g}.",
                self._diagnosis(trainer, model, batches),
                f"No weight was changed by that step or after it. {ADVICE}",
            )
        self._losses, self._grad_norms = [], []

    def _diagnosis(self, trainer: Trainer, model: LitGPT, batches: range) -> str:
        for index in batches:
            batch = trainer.datamodule.train_batch(index, trainer.global_rank, trainer.world_size)
            with trainer.precision_plugin.forward_context():
                name = first_not_finite(model, batch.to(model.device))
            if name is not None:
                return f"The first tensor in it that is not finite: {name}."
        return "Done again, that step has no tensor that is not finite."


def weights_not_finite(gpt: GPT) -> list[str]:
    """Names of the weights, or of this device's parts of them, that hold something not finite."""
    weights = dict(gpt.named_parameters())
    parts = [w.to_local() if isinstance(w, DTensor) else w for w in weights.values()]
    finite = torch.stack([part.isfinite().all() for part in parts]).tolist()
    return [name for name, good in zip(weights, finite, strict=True) if not good]


def has_scaler(trainer: Trainer) -> bool:
    """Whether the loss is scaled, as float16 needs, and steps that overflow are left out."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def first_not_finite(model: LitGPT, batch: Tensor) -> str | None:
    """Name of the first tensor that is not finite in a forward and backward pass, or None.

    Looks at the weights, then at every module's output, then at their gradients in the order in
    which they are computed. Leaves the weights' gradients cleared.

    Args:
        batch: int64 (B, context + 1), on the model's device.
    """
    found: list[str] = []

    def look(name: str, tensor: Tensor) -> None:
        if not found and not tensor.isfinite().all():
            found.append(name)

    def watch(name: str) -> Any:
        gradient_name = f"the gradient of the output of {name}"

        def after_forward(module, inputs, output) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                look(f"the output of {name}", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: look(gradient_name, gradient))

        return after_forward

    handles = []
    for name, weight in model.gpt.named_parameters():
        look(f"the weight {name}", weight)
        what = f"the gradient of {name}"
        handles.append(weight.register_hook(lambda gradient, what=what: look(what, gradient)))
    for name, module in model.gpt.named_modules():
        if name:
            handles.append(module.register_forward_hook(watch(name)))
    try:
        with torch.enable_grad():
            # forward() and not __call__, of which torch.compile may have made something else.
            loss = model.gpt.forward(batch[:, :-1], batch[:, 1:])
            look("the loss", loss)
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return found[0] if found else None


def out_of_memory(error: Exception) -> bool:
    """Whether this is a GPU's or PyTorch's CPU allocator's way to say that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def memory_advice(
    step: int,
    batch_size: int,
    micro_batches: int,
    interval: int | None,
    parameters: int,
    peak: int | None,
) -> TrainingError:
    """What to say when memory ran out in step `step`.

    Args:
        batch_size: Sequences of a micro-batch.
        micro_batches: How many of them are a step.
        interval: Micro-batches between validations.
        parameters: Of the model.
        peak: Bytes that were allocated at most, None on a CPU.
    """
    if peak is None:
        where, at, fixed = "Memory", "", ""
    else:
        where, at = "The GPU's memory", f", with {peak / 2**30:.2f} GiB allocated at the peak"
        size = parameters * BYTES_PER_PARAMETER / 2**30
        fixed = f" Weights, gradients and optimizer take {size:.2f} GiB for any batch."
    happened = f"{where} ran out in step {step}{at}, for micro-batches of {batch_size} sequences."
    happened += fixed
    if batch_size == 1:
        return TrainingError(
            happened,
            "Not even one sequence fits: a smaller data.context, model.n_layer or model.n_embd is "
            "needed, or a 16-bit trainer.precision.",
        )
    parts = next(n for n in range(2, batch_size + 1) if batch_size % n == 0)
    flags = [
        f"--data.batch_size {batch_size // parts}",
        f"--trainer.accumulate_grad_batches {micro_batches * parts}",
        *([f"--trainer.val_check_interval {interval * parts}"] if interval else []),
    ]
    return TrainingError(happened, f"{' '.join(flags)} trains on the same steps with less memory.")
