"""What goes on around the training steps: timing, live progress, stopping, sampling."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tiktoken import Encoding

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS_BETWEEN_LINES = 10  # of progress where there is no terminal


class Recorder(Callback):
    """Times every optimizer step and logs a row every `log_every_n_steps` of them.

    A row's `step` is the number of optimizer steps done. Its loss is that of the step's own batch,
    before the update, averaged over micro-batches and devices. Nothing waits for the GPU between
    two rows: step times come from CUDA events, on a CPU from the clock. A step lasts from the end
    of the step before to its own end, waiting for data included, validation and checkpoints
    excluded.

    Attributes:
        step_ms: Milliseconds of every step that this process took, the first one too.
        tokens_per_step: Tokens of one optimizer step, all devices together.
        latest: The newest values that were logged, by name.
        memory: Peak GPU memory in bytes, "allocated" and "reserved"; empty on a CPU.
    """

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.tokens_per_step = 0
        self.latest: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self._marks: list[tuple[Any, Any]] = []  # (start, end) of steps not yet in step_ms
        self._end_of_last: Any = None
        self._losses: list[torch.Tensor] = []  # of the micro-batches of the current step
        self._tokens = 0
        self._lr = 0.0
        self._steps_done = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps_done = trainer.global_step
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._end_of_last is None:
            self._end_of_last = _mark(pl_module.device)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # once the step is over it is the next step's

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        # Lightning has divided the loss by this number, for gradients that are to be averaged.
        self._losses.append(outputs["loss"] * trainer.accumulate_grad_batches)
        self._tokens += batch[:, 1:].numel()
        if trainer.global_step == self._steps_done:
            return  # a micro-batch before the last one of its step
        self._steps_done = trainer.global_step
        mark = _mark(pl_module.device)
        self._marks.append((self._end_of_last, mark))
        self._end_of_last = mark
        self.tokens_per_step = self._tokens * trainer.world_size
        loss = torch.stack(self._losses).mean()
        self._losses, self._tokens = [], 0
        if is_log_step(trainer):
            self._log_row(trainer, pl_module, loss)

    def _log_row(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        new = self._collect_times()
        step_ms = sum(new) / len(new)
        row = {
            "loss": trainer.strategy.reduce(loss, reduce_op="mean").item(),
            "lr": self._lr,
            "grad_norm": pl_module.grad_norm.item(),
            "step_ms": step_ms,
            "tokens_per_s": self.tokens_per_step / step_ms * 1e3,
        }
        if pl_module.device.type == "cuda":
            row["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._log(trainer, row)

    def _log(self, trainer: Trainer, row: dict[str, float]) -> None:
        self.latest |= row
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.global_step)
            logger.save()

    def _collect_times(self) -> list[float]:
        """Move the finished steps' milliseconds to step_ms; returns them."""
        new = [_elapsed_ms(start, end) for start, end in self._marks]
        self._marks.clear()
        self.step_ms += new
        return new

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_of_last = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self._log(trainer, {k: metrics[k].item() for k in ("val_loss", "val_perplexity")})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(pl_module)

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._finish(pl_module)

    def _finish(self, pl_module: LightningModule) -> None:
        self._collect_times()
        if pl_module.device.type == "cuda":
            self.memory = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }


def is_log_step(trainer: Trainer) -> bool:
    """Whether the step that just ended is one to log: the first, every n-th, and the last."""
    step = trainer.global_step
    return step == 1 or step % trainer.log_every_n_steps == 0 or trainer.should_stop


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return (end - start) * 1e3
    end.synchronize()
    return start.elapsed_time(end)


class Stopper(Callback):
    """Ends training in good order: with a validation and a checkpoint of the very last step.

    That is so after `max_steps`, and after Ctrl-C (SIGINT) or SIGTERM, which let the running step
    finish. A second signal interrupts at once. Comes before the Recorder, which logs the last step.

    Attributes:
        signal: The first of those signals that came, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._steps_done = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps_done = trainer.global_step
        # Instead of Lightning's own, which puts back those of before when the training is over.
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Let what comes after the training finish in the same way."""
        previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(
            f"{self.signal.name}: finishing this step, saving, validating and reporting. "
            f"Ctrl-C, or another signal, stops at once."
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._steps_done:
            return  # a step is not left half accumulated
        self._steps_done = trainer.global_step
        stop = self.signal is not None
        if trainer.world_size > 1:  # all processes have to stop after the same step
            stop = is_log_step(trainer) and trainer.strategy.reduce_boolean_decision(
                stop, all=False
            )
        if stop or trainer.global_step == trainer.max_steps:
            trainer.should_stop = True  # Lightning validates before it stops

    def on_exception(self, trainer, pl_module, exception) -> None:
        if self.signal is None and isinstance(exception, KeyboardInterrupt):
            self.signal = signal.SIGINT
        if isinstance(exception, SIGTERMException):  # it came before training started
            self.signal = signal.SIGTERM


class Sampler(Callback):
    """Lets the trained model write a little, on all ranks, since each may hold but a part of it.

    Notes in checkpoints which tokenizer the model speaks.

    Attributes:
        text: What it wrote; empty if training did not get that far.
    """

    def __init__(self, tokenizer: Encoding, n_new: int = 120, seed: int = 1337) -> None:
        self.tokenizer, self.n_new, self.seed = tokenizer, n_new, seed
        self.text = ""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        checkpoint["tokenizer"] = self.tokenizer.name

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = pl_module.device
        start = torch.tensor([self.tokenizer.encode_ordinary("\n")], device=device)
        generator = torch.Generator(device).manual_seed(self.seed)
        with trainer.precision_plugin.forward_context():
            tokens = pl_module.gpt.generate(
                start, self.n_new, temperature=0.8, top_k=50, generator=generator
            )
        self.text = self.tokenizer.decode(tokens[0].tolist()).strip()


class LiveProgress(ProgressBar):
    """Loss, ms a step, tokens/s, GPU memory and time left.

    One live line on a terminal; elsewhere a plain line every few seconds.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._console = Console(file=sys.stdout)
        self._enabled = True
        self._bar: Progress | None = None
        self._last_line = float("-inf")
        self._steps_done = 0
        self._started: tuple[float, int] | None = None  # time and step after the first step

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps_done = trainer.global_step
        if self._enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "first step ...", total=trainer.max_steps, completed=self._steps_done
            )
            self._bar.start()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if not self._enabled or trainer.global_step == self._steps_done:
            return
        self._steps_done = trainer.global_step
        if self._started is None:
            self._started = time.monotonic(), self._steps_done
        if self._bar is not None:
            self._bar.update(self._task, completed=self._steps_done, description=self._text())
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or trainer.should_stop:
            self._last_line = time.monotonic()
            print(f"step {self._steps_done}/{trainer.max_steps}  {self._text()}", flush=True)

    def _text(self) -> str:
        latest = self._recorder.latest
        parts = [
            f"{label} {latest[key]:.4f}"
            for key, label in (("loss", "loss"), ("val_loss", "val loss"))
            if key in latest
        ]
        if "step_ms" in latest:
            parts += [f"{latest['step_ms']:.1f} ms/step", f"{latest['tokens_per_s']:,.0f} tokens/s"]
        if "gpu_gib" in latest:
            parts.append(f"GPU {latest['gpu_gib']:.1f} GiB")
        if (left := self._seconds_left()) is not None:
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        return "  ".join(parts)

    def _seconds_left(self) -> float | None:
        """From the steps after the first one, whose time is mostly compilation."""
        started, first_step = self._started
        steps = self._steps_done - first_step
        if steps == 0:
            return None
        seconds_per_step = (time.monotonic() - started) / steps
        return seconds_per_step * (self.trainer.max_steps - self._steps_done)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
