"""Whether the Triton kernels are interpreted: set before they are defined, announced once."""

import functools
import logging
import os
import threading

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ONE_AT_A_TIME = threading.Lock()  # it puts functions of its own into triton.language meanwhile
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def announce() -> None:
    """Say, the first time it is called, that kernels run without a GPU."""
    logging.getLogger(__name__).warning(
        "No GPU in use: the Triton kernels run through Triton's interpreter, "
        "with the same results and without their speed."
    )
