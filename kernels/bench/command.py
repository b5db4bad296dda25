"""What the command lines of kernels.bench and kernels.tune have in common."""

import argparse

import torch

from kernels import interpreter


def missing_gpu() -> str | None:
    """Why nothing can be measured here; None if it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here, and the speed of a CPU says nothing about one."
    if interpreter.INTERPRETED:
        return "TRITON_INTERPRET=1 is set, and the interpreter's speed says nothing. Unset it."
    return None


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def integers(text: str) -> list[int]:
    return [integer(number) for number in text.split(",")]


def integer(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
