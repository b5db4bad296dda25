"""What a measured number depends on besides the code: hardware, driver, versions, revision."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from kernels.bench.environment import NOT_AVAILABLE, git_revision


def environment() -> dict[str, str]:
    """GPU, driver, package versions, git revision and date; "n/a" for what cannot be found out."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else NOT_AVAILABLE,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else NOT_AVAILABLE,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "triton", "lightning")},
        "git_revision": git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_AVAILABLE


def _output(*command: str) -> str:
    """First line that a command prints when run in this checkout."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return NOT_AVAILABLE
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else NOT_AVAILABLE
