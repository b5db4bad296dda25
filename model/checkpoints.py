"""Checkpoints: written whole, one of the last step, and checked before they are read."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from model.errors import UserError
from model.files import replacing
from model.gpt import GPT
from model.lit import LitGPT
from model.loggers import MetricsFile

# What training goes on from, besides the weights.
NEEDED = ("optimizer_states", "lr_schedulers", "loops")
FOREIGN = "is not a checkpoint of train.py."


class LastCheckpoint(Checkpoint):
    """Saves last.ckpt after every validation, and at the end where there is no validation.

    Also as soon as training is told to stop early, before it validates: who sends SIGTERM may not
    wait for that. `metrics` is written before, so that a run resumed from last.ckpt has all rows
    up to it.
    """

    def __init__(self, path: Path, metrics: MetricsFile) -> None:
        self.path, self.metrics = path, metrics
        self._saved_step = -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.should_stop and trainer.global_step < trainer.max_steps:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._saved_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self.metrics.write()
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it.

    Lightning's own goes through the system's temporary directory, from which a move to another
    file system is a copy, and a copy can be cut short.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options=None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # how PyTorch reports that `file` could not be written
                if not isinstance(error.__context__, OSError):
                    raise
                raise error.__context__ from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint at `path`, its tensors left on the disk until they are used.

    Nothing in it is run: what is no tensor or plain value is refused.

    Raises:
        UserError: if it is no checkpoint of this project, or one that is cut short or damaged;
            then with the newest whole one beside it.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is a folder; name the checkpoint in it."
            if path.is_dir()
            else f"There is no checkpoint {path}."
        )
    try:
        return _read(path)
    except ValueError as error:
        damage = str(error)
    raise UserError(f"{path} {damage}", *([] if damage == FOREIGN else [offer(path)]))


def _read(path: Path) -> dict[str, Any]:
    """As `read_checkpoint`; ValueError says what is wrong with the file."""
    with path.open("rb") as file:
        start = file.read(2)
    if start not in (b"PK", b""):
        raise ValueError(FOREIGN)
    try:
        # PyTorch compares no checksums, so that it would read a damaged weight as a wrong one.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError):
        raise ValueError("is cut short or damaged.") from None
    except OSError:
        raise
    except Exception:  # it asks zipfile for what no checkpoint does: a password, another packing
        raise ValueError("is damaged: its table of contents is not what was written.") from None
    if damaged:
        raise ValueError(f"is damaged: {damaged} in it is not what was written.")
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        step, weights = int(checkpoint["global_step"]), dict(checkpoint["state_dict"])
    except pickle.UnpicklingError:
        raise ValueError(
            "holds more than tensors and plain values. It is not loaded, since that could run "
            "code of whoever made it."
        ) from None
    except (RuntimeError, KeyError, TypeError, ValueError):
        raise ValueError(FOREIGN) from None
    return checkpoint | {"global_step": step, "state_dict": weights}


def offer(path: Path) -> str:
    """A sentence about the newest whole checkpoint beside the one at `path`."""
    steps = {}
    for other in path.parent.glob("*.ckpt"):
        try:
            steps[other] = _read(other)["global_step"]
        except (ValueError, OSError):
            continue
    if not steps:
        return f"There is no whole checkpoint beside it in {path.parent}."
    newest = max(steps, key=steps.get)
    return (
        f"{newest}, of step {steps[newest]}, is whole: train.py goes on from it with "
        f"--ckpt_path {newest}."
    )


def step_to_resume(path: Path, model: LitGPT, tokenizer: str, micro_batches: int) -> int:
    """Number of steps that the checkpoint at `path` was trained for.

    Args:
        model: The model that is to go on from it.
        tokenizer: Name of the tokenizer that the data comes from.
        micro_batches: How many of them are a step from now on.

    Raises:
        UserError: as `read_checkpoint`, and for everything because of which this model cannot be
            trained from it.
    """
    checkpoint = read_checkpoint(path)
    if missing := [key for key in (*NEEDED, "hyper_parameters") if key not in checkpoint]:
        raise UserError(f"{path} is no checkpoint to go on from: it has no {', '.join(missing)}.")
    saved, asked = checkpoint["hyper_parameters"], model.hparams
    saved = saved | {"tokenizer": checkpoint.get("tokenizer", tokenizer)}
    asked = {**asked, "tokenizer": tokenizer}
    problems = [
        f"{path} has {key} {saved[key]}, but {asked[key]} is asked for."
        for key in ("n_layer", "n_head", "n_embd", "context", "vocab_size", "qk_norm", "tokenizer")
        if key in saved and saved[key] != asked[key]
    ]
    done = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    if done % micro_batches:
        problems.append(
            f"{path} was saved after {done} micro-batches, which is no whole number of steps of "
            f"{micro_batches} (trainer.accumulate_grad_batches)."
        )
    if problems:
        raise UserError(*problems)
    _check_weights(path, checkpoint, model)
    return checkpoint["global_step"]


def load_gpt(path: Path, norm: str | None = None) -> tuple[GPT, dict[str, Any]]:
    """The GPT in the checkpoint at `path`, on the CPU, and the whole checkpoint.

    Args:
        norm: RMSNorm implementation to use instead of the one that it was trained with.

    Raises:
        UserError: as `read_checkpoint`; for a norm that is not there.
    """
    checkpoint = read_checkpoint(path)
    if "hyper_parameters" not in checkpoint:
        raise UserError(f"{path} does not say which model it holds: it has no hyper_parameters.")
    settings = {**checkpoint["hyper_parameters"], "compile": False}
    try:
        model = LitGPT(**{**settings, "norm": norm or settings["norm"]})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"The model in {path} cannot be built: {error}") from None
    _check_weights(path, checkpoint, model)
    model.load_state_dict(checkpoint["state_dict"])
    return model.gpt.eval(), checkpoint


def _check_weights(path: Path, checkpoint: dict[str, Any], model: LitGPT) -> None:
    shapes = {key: weight.shape for key, weight in model.state_dict().items()}
    if shapes != {key: weight.shape for key, weight in checkpoint["state_dict"].items()}:
        raise UserError(f"The weights in {path} are not those of this model.")
