"""How tests run things: a Trainer that only trains, and Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import triton
from lightning import Trainer
from packaging.version import Version

ROOT = Path(__file__).parent.parent
# For what is interpreted on a machine with a GPU, too. Without one, nothing works there.
needs_interpreter = pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"),
    reason="Triton 3.6's interpreter fails with NumPy 2.4 or newer",
)


def quiet_trainer(**options) -> Trainer:
    """On the CPU, unless the options say otherwise; it writes and shows nothing of its own."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**quiet, **options})


def python(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """How `python WORDS` ended in the checkout, run with one thread and these variables."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
