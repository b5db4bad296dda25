"""A checkpoint of a small model with random weights, as train.py saves it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning import Trainer

from data import load_tokenizer
from model import LitGPT
from model.callbacks import Sampler

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context": 16, "vocab_size": 257}


@pytest.fixture
def saved(tmp_path) -> Callable[..., Path]:
    """Saves a LitGPT with these changes to SHAPE; returns the path."""

    def save(**changes) -> Path:
        torch.manual_seed(0)
        model = LitGPT(**{**SHAPE, "norm": "eager", **changes})
        with torch.no_grad():  # norm weights of 1 would hide a missing one
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            callbacks=[Sampler(load_tokenizer("bytes"))],
        )
        trainer.strategy.connect(model)
        model.trainer = trainer
        trainer.save_checkpoint(tmp_path / "model.ckpt")
        return tmp_path / "model.ckpt"

    return save
