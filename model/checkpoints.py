"""Checkpoints: written whole, one of the last step, and checked before they are resumed."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from model.cli import UserError
from model.files import replacing
from model.lit import LitGPT
from model.loggers import MetricsFile

# What training goes on from, besides the weights.
NEEDED = ("optimizer_states", "lr_schedulers", "loops", "hyper_parameters")


class LastCheckpoint(Checkpoint):
    """Saves last.ckpt after every validation, and at the end where there is no validation.

    `metrics` is written before, so that a run resumed from last.ckpt has all rows up to it.
    """

    def __init__(self, path: Path, metrics: MetricsFile) -> None:
        self.path, self.metrics = path, metrics
        self._saved_step = -1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step != self._saved_step:
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
        with replacing(path) as temporary:
            torch.save(checkpoint, temporary)


def read_checkpoint(path: Path, model: LitGPT) -> int:
    """Number of steps that the checkpoint at `path` was trained for, if it fits `model`.

    Raises:
        UserError: if it is no checkpoint of this project or holds a model of another shape.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is a folder; name the checkpoint in it."
            if path.is_dir()
            else f"There is no checkpoint {path}."
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        step, weights = checkpoint["global_step"], dict(checkpoint["state_dict"])
    except (
        RuntimeError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        KeyError,
        TypeError,
        EOFError,
    ):
        raise UserError(f"{path} is not a checkpoint of train.py.") from None
    if missing := [key for key in NEEDED if key not in checkpoint]:
        raise UserError(f"{path} is no checkpoint to go on from: it has no {', '.join(missing)}.")
    saved, asked = checkpoint["hyper_parameters"], model.hparams
    if problems := [
        f"{path} has {key} {saved[key]}, but {asked[key]} is asked for."
        for key in ("n_layer", "n_head", "n_embd", "context", "vocab_size", "qk_norm")
        if key in saved and saved[key] != asked[key]
    ]:
        raise UserError(*problems)
    shapes = {key: weight.shape for key, weight in model.state_dict().items()}
    if shapes != {key: weight.shape for key, weight in weights.items()}:
        raise UserError(f"The weights in {path} are not those of this model.")
    return step
