"""What the command lines of kernels.bench and kernels.tune have in common."""

import argparse
import sys
from collections.abc import Callable

import torch

from kernels import interpreter


def run(main: Callable[[list[str]], int]) -> None:
    """Exit with what main makes of the command line, or after Ctrl-C, in a sentence, with 130."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("Interrupted. What was measured before is saved.", file=sys.stderr)
        sys.exit(130)


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
