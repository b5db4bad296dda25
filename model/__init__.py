"""The GPT, its LightningModule, and what train.py needs around a training run."""

from model.gpt import GPT, GPTConfig
from model.lit import LitGPT

__all__ = ["GPT", "GPTConfig", "LitGPT"]
