#!/usr/bin/env python3
"""Train a GPT on text: read the settings, build, fit, summarise. See `python train.py --help`."""

import os
import signal

# Before torch is loaded: threads that spin while they wait make a CPU run many times slower where
# another process has one of the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while libraries load needs no traceback

import atexit
import contextlib
import errno
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from data import TextDataModule
from model import LitGPT
from model.callbacks import LiveProgress, Recorder, Sampler, Stopper
from model.checkpoints import AtomicCheckpointIO, LastCheckpoint, step_to_resume
from model.checks import sentence
from model.cli import changed_settings, checked_data, instantiate, last_run, parse
from model.environment import environment
from model.errors import TrainingError, UserError
from model.faults import FiniteCheck, memory_advice, out_of_memory
from model.files import InUse, create_run, owned, replacing
from model.loggers import EventsFile, MetricsFile
from model.mfu import flops_per_token, peak_flops
from model.summary import NO_FINDING, WITH_A_GPU, figures, plot_loss, table, write_json

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 128 + signal.SIGINT
SECONDS_TO_END = 5
PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
CANNOT_WRITE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # not allowed
    *(errno.ENOENT, errno.ENOTDIR),  # no folder, where another logger wants one
    *(errno.EIO, errno.ESTALE, errno.ENODEV),  # gone or broken
)


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit status.

    0 at the end, 1 if training cannot go on, 2 for bad input or a disk that cannot be written, 130
    after Ctrl-C, 143 after SIGTERM.
    """
    quieten()
    try:
        parser, settings = parse(sys.argv[1:] if argv is None else argv)
        return train(parser, settings)
    except (UserError, TrainingError) as error:
        print("\n".join(f"error: {sentence}" for sentence in error.args), file=sys.stderr)
        return BAD_INPUT if isinstance(error, UserError) else FAILED
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        print(f"error: {error}. What was saved before is whole.", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def train(parser: ArgumentParser, settings: Namespace) -> int:
    """One run from parsed settings, checked here, to the summary; returns the exit status."""
    ready = instantiate(parser, settings)
    data = checked_data(ready)
    model = build(settings, data)
    with place(settings, model, data.tokenizer.name) as (run, checkpoint, resume_step):
        if checkpoint:
            tell_changes(parser, settings, checkpoint, resume_step)
        save_config(parser, settings, run)
        return fit(ready, model, data, run, checkpoint, resume_step)


def build(settings: Namespace, data: TextDataModule) -> LitGPT:
    """The model that the settings describe, with the weights of its seed."""
    seed_everything(settings.seed_everything, verbose=False)
    try:
        return LitGPT(
            **settings.model, context=data.context, vocab_size=data.vocab_size, norm=settings.norm
        )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise TrainingError("Memory ran out while the model was built: make it smaller.") from None


def fit(
    settings: Namespace,
    model: LitGPT,
    data: TextDataModule,
    run: Path,
    checkpoint: Path | None,
    resume_step: int | None,
) -> int:
    """Train in the directory `run` and summarise; returns the exit status."""
    recorder, stopper, sampler = Recorder(), Stopper(), Sampler(data.tokenizer)
    metrics = MetricsFile(run / "metrics.csv", resume_step)
    callbacks = [stopper, FiniteCheck(), recorder, sampler]
    if settings.trainer.enable_progress_bar is not False:
        callbacks.append(LiveProgress(recorder))
    loggers = [metrics, EventsFile(run, resume_step)]
    if settings.trainer.enable_checkpointing is not False:
        callbacks += checkpoints(run, metrics)
    trainer = build_trainer(settings.trainer, loggers, callbacks, run)
    atexit.register(end_other_ranks, trainer)  # after a traceback, if there is one, is shown
    try:
        trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    except MisconfigurationException as error:  # a callback that does not suit this training
        raise UserError(sentence(error)) from None
    except SystemExit:  # Lightning's answer to a signal that could not wait
        if stopper.signal is None:
            raise
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise advice(settings, trainer, model, recorder) from None
    ended_by = stopper.signal
    try:
        with stopper.listening():
            summarise(settings, run, trainer, model, recorder, metrics, ended_by, sampler)
    except KeyboardInterrupt:  # the second signal
        ended_by = stopper.signal
    return 0 if ended_by is None else 128 + ended_by


def advice(
    settings: Namespace, trainer: Trainer, model: LitGPT, recorder: Recorder
) -> TrainingError:
    """What to say when memory has run out."""
    options = settings.trainer
    return memory_advice(
        trainer.global_step + 1,
        settings.data.batch_size,
        options.accumulate_grad_batches,
        options.val_check_interval,
        sum(p.numel() for p in model.gpt.parameters()),
        recorder.memory.get("allocated"),
    )


@contextlib.contextmanager
def place(
    settings: Namespace, model: LitGPT, tokenizer: str
) -> Iterator[tuple[Path, Path | None, int | None]]:
    """The run's directory, the checkpoint to start from if any, and the step it was saved at.

    The directory is this process's meanwhile: a checkpoint in it is read when no other can write.
    """
    root = Path(settings.trainer.default_root_dir)
    if settings.ckpt_path == "last":
        run = last_run(root, settings.name)
        with kept(run):
            checkpoint = run / "last.ckpt"
            yield run, checkpoint, start_step(checkpoint, settings, model, tokenizer)
        return
    checkpoint = Path(settings.ckpt_path) if settings.ckpt_path else None
    step = start_step(checkpoint, settings, model, tokenizer) if checkpoint else None
    # The other ranks write nothing, so that they need not know which number the run got.
    run = new_run(root, settings.name) if rank_zero_only.rank == 0 else root / settings.name
    with kept(run):
        yield run, checkpoint, step


def start_step(checkpoint: Path, settings: Namespace, model: LitGPT, tokenizer: str) -> int:
    """The step that training goes on from."""
    step = step_to_resume(checkpoint, model, tokenizer, settings.trainer.accumulate_grad_batches)
    if step >= settings.trainer.max_steps:
        raise UserError(
            f"{checkpoint} has been trained for {step} steps already: "
            f"--trainer.max_steps has to be larger."
        )
    return step


def new_run(root: Path, name: str) -> Path:
    try:
        return create_run(root, name)
    except OSError as error:
        raise UserError(f"There cannot be a folder {root / name}: {error.strerror}.") from None


@contextlib.contextmanager
def kept(run: Path) -> Iterator[None]:
    """The run's directory for this process alone, and for the other ranks that belong to it."""
    if rank_zero_only.rank != 0:
        yield
        return
    try:
        with owned(run):
            yield
    except InUse:
        raise UserError(f"{run} is in use: another process trains in it.") from None


@rank_zero_only
def tell_changes(parser: ArgumentParser, settings: Namespace, checkpoint: Path, step: int) -> None:
    """Print what is other than in the run that the checkpoint is from."""
    changes = changed_settings(checkpoint.parent / "config.yaml", dump(parser, settings))
    print(f"Going on from {checkpoint}, of step {step}{', with' if changes else '.'}")
    for change in changes:
        print(f"  {change}")


@rank_zero_only
def save_config(parser: ArgumentParser, settings: Namespace, run: Path) -> None:
    """Write the settings in full as config.yaml, from which the same run can be started again."""
    with replacing(run / "config.yaml") as temporary:
        temporary.write_text(dump(parser, settings))


def dump(parser: ArgumentParser, settings: Namespace) -> str:
    resolved = settings.clone()
    resolved.ckpt_path = resolved.config = None
    return parser.dump(resolved, skip_unset=False)


def checkpoints(run: Path, metrics: MetricsFile) -> list[Callback]:
    """What saves the checkpoint with the lowest validation loss, and that of the last step."""
    best = ModelCheckpoint(run, filename="best", monitor="val_loss", enable_version_counter=False)
    return [best, LastCheckpoint(run / "last.ckpt", metrics)]


def build_trainer(
    options: Namespace, loggers: list, callbacks: list[Callback], run: Path
) -> Trainer:
    """The Trainer that `options` describe, with our loggers and callbacks added.

    What its checkpoints and profiles would write to a place of Lightning's goes to the run.
    """
    own, profiler = as_list(options.callbacks), options.profiler
    for callback in own:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(run)
    if isinstance(profiler, str):
        profiler = PROFILERS[profiler](dirpath=run, filename="profile")
    try:
        return Trainer(
            **{
                **options,
                "logger": [*loggers, *as_list(options.logger)],
                "callbacks": [*callbacks, *own],
                "plugins": [AtomicCheckpointIO(), *as_list(options.plugins)],
                "profiler": profiler,
            }
        )
    except MisconfigurationException as error:  # a callback that does not go with ours
        raise UserError(sentence(error)) from None


def end_other_ranks(trainer: Trainer) -> None:
    """See to it that the processes that Lightning started for other ranks end with this one.

    If this one fails they would wait for it, in the middle of a collective. If one of them has
    failed, it is given time to say why.
    """
    deadline = time.monotonic() + SECONDS_TO_END
    for process in getattr(trainer.strategy.launcher, "procs", []):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def as_list(option) -> list:
    """A Trainer option that may be one, several or none (None, or a bool) as a list."""
    if option is None or isinstance(option, bool):
        return []
    return list(option) if isinstance(option, list | tuple) else [option]


@rank_zero_only
def summarise(
    settings: Namespace,
    run: Path,
    trainer: Trainer,
    model: LitGPT,
    recorder: Recorder,
    metrics: MetricsFile,
    ended_by: signal.Signals | None,
    sampler: Sampler,
) -> None:
    """Print the table and the sample; write summary.json and loss.png."""
    about = environment()
    on_gpu = trainer.strategy.root_device.type == "cuda"
    gpu = about["gpu"] if on_gpu else None
    summary = {
        "name": run.name,
        "norm": settings.norm,
        "precision": settings.trainer.precision,
        "stream_dtype": settings.model.stream_dtype,
        "compile": settings.model.compile,
        "norm_recompute": settings.model.norm_recompute,
        "interrupted": ended_by is not None,
        "parameters": sum(p.numel() for p in model.gpt.parameters()),
        **figures(
            metrics.rows,
            recorder.step_ms,
            recorder.tokens_per_step,
            flops_per_token(model.gpt),
            peak_flops(gpu, settings.trainer.precision),
            trainer.world_size,
            recorder.memory,
        ),
        "note": None if on_gpu else f"{NO_FINDING} {WITH_A_GPU}",
        "sample": sampler.text,
        "environment": about,
        "step_ms_samples": recorder.step_ms,
    }
    Console().print(table(summary))
    if ended_by is None and trainer.global_step < trainer.max_steps:
        print(
            f"Ended after step {trainer.global_step} of {trainer.max_steps}, by a callback or "
            "another limit than trainer.max_steps."
        )
    if summary["note"]:
        print(summary["note"])
    if sampler.text:
        print(f"\nSample:\n{sampler.text}\n")
    write_json(summary, run / "summary.json")
    plot_loss(metrics.rows, run / "loss.png", f"{run.name}: norm {settings.norm}")
    print(f"Written to {run}/")


def quieten() -> None:
    """Hold back what Lightning says about choices that are made here on purpose."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*exists and is not empty.*",  # a run's directory has its config.yaml
        ".*The dirpath has changed.*",  # a checkpoint of another run
        ".*isinstance.treespec, LeafSpec.*",  # Lightning's own use of PyTorch
    ):
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
