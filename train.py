"""Train a GPT on text: read the settings, build, fit, summarise. See `python train.py --help`."""

import os

# Before torch is loaded: threads that spin while they wait make a CPU run many times slower where
# another process has one of the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import atexit
import contextlib
import errno
import logging
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from model import LitGPT
from model.callbacks import LiveProgress, Recorder, Sampler, Stopper
from model.checkpoints import AtomicCheckpointIO, LastCheckpoint, read_checkpoint
from model.cli import UserError, checked_data, instantiate, last_run, parse
from model.environment import environment
from model.files import create_run, replacing
from model.loggers import EventsFile, MetricsFile
from model.mfu import flops_per_token, peak_flops
from model.summary import NO_FINDING, WITH_A_GPU, figures, plot_loss, table, write_json

BAD_INPUT, INTERRUPTED = 2, 128 + signal.SIGINT
SECONDS_TO_END = 5
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit status: 0, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM."""
    quieten()
    try:
        parser, settings = parse(sys.argv[1:] if argv is None else argv)
        return train(parser, settings)
    except UserError as error:
        print("\n".join(f"error: {sentence}" for sentence in error.args), file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        print(f"error: {error}. What was saved before is whole.", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def train(parser: ArgumentParser, settings: Namespace) -> int:
    """One run from checked settings to the summary; returns the exit status."""
    ready = instantiate(parser, settings)
    data = checked_data(ready)
    seed_everything(settings.seed_everything, verbose=False)
    model = LitGPT(
        **settings.model, context=data.context, vocab_size=data.vocab_size, norm=settings.norm
    )
    run, checkpoint, resume_step = place(settings, model)
    save_config(parser, settings, run)
    recorder, stopper, sampler = Recorder(), Stopper(), Sampler(data.tokenizer)
    metrics = MetricsFile(run / "metrics.csv", resume_step)
    callbacks = [stopper, recorder, sampler]
    if ready.trainer.enable_progress_bar is not False:
        callbacks.append(LiveProgress(recorder))
    loggers = [metrics, EventsFile(run, resume_step)]
    if ready.trainer.enable_checkpointing is not False:
        callbacks += checkpoints(run, metrics)
    trainer = build_trainer(ready.trainer, loggers, callbacks)
    atexit.register(end_other_ranks, trainer)  # after a traceback, if there is one, is shown
    try:
        trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    except SystemExit:  # Lightning's answer to a signal that could not wait
        if stopper.signal is None:
            raise
    summarise(settings, run, trainer, model, recorder, metrics, stopper, sampler)
    return 0 if stopper.signal is None else 128 + stopper.signal


def place(settings: Namespace, model: LitGPT) -> tuple[Path, Path | None, int | None]:
    """The run's directory, the checkpoint to start from if any, and the step it was saved at."""
    root = Path(settings.trainer.default_root_dir)
    resume = settings.ckpt_path == "last"
    if resume:
        run = last_run(root, settings.name)
        checkpoint = run / "last.ckpt"
    else:
        checkpoint = Path(settings.ckpt_path) if settings.ckpt_path else None
    step = read_checkpoint(checkpoint, model) if checkpoint else None
    if step is not None and step >= settings.trainer.max_steps:
        raise UserError(
            f"{checkpoint} has been trained for {step} steps already: "
            f"--trainer.max_steps has to be larger."
        )
    if not resume:
        # The other ranks write nothing, so that they need not know which number the run got.
        run = new_run(root, settings.name) if rank_zero_only.rank == 0 else root / settings.name
    return run, checkpoint, step


def new_run(root: Path, name: str) -> Path:
    try:
        return create_run(root, name)
    except OSError as error:
        raise UserError(f"There cannot be a folder {root / name}: {error.strerror}.") from None


@rank_zero_only
def save_config(parser: ArgumentParser, settings: Namespace, run: Path) -> None:
    """Write the settings in full as config.yaml, from which the same run can be started again."""
    resolved = settings.clone()
    resolved.ckpt_path = resolved.config = None
    with replacing(run / "config.yaml") as temporary:
        temporary.write_text(parser.dump(resolved, skip_unset=False))


def checkpoints(run: Path, metrics: MetricsFile) -> list[Callback]:
    """What saves the checkpoint with the lowest validation loss, and that of the last step."""
    best = ModelCheckpoint(run, filename="best", monitor="val_loss", enable_version_counter=False)
    return [best, LastCheckpoint(run / "last.ckpt", metrics)]


def build_trainer(options: Namespace, loggers: list, callbacks: list[Callback]) -> Trainer:
    """The Trainer that `options` describe, with our loggers and callbacks added."""
    return Trainer(
        **{
            **options,
            "logger": [*loggers, *as_list(options.logger)],
            "callbacks": [*callbacks, *as_list(options.callbacks)],
            "plugins": [AtomicCheckpointIO(), *as_list(options.plugins)],
        }
    )


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
    stopper: Stopper,
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
        "interrupted": stopper.signal is not None,
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
    write_json(summary, run / "summary.json")
    plot_loss(metrics.rows, run / "loss.png", f"{run.name}: norm {settings.norm}")
    console = Console()
    console.print(table(summary))
    if summary["note"]:
        print(summary["note"])
    if sampler.text:
        print(f"\nSample:\n{sampler.text}\n")
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
    sys.exit(main())
