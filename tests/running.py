"""How tests run things: a Trainer that only trains, and Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from lightning import Trainer

ROOT = Path(__file__).parent.parent


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
