"""What a benchmark's figures depend on: GPU, driver, clocks, versions; "n/a" if unknown."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

NOT_AVAILABLE = "n/a"


def environment() -> dict:
    """The current CUDA device and the software around it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    native = getattr(torch.backends, "python_native", None)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        **nvidia_smi("driver_version"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "liger": package_version("liger-kernel"),
        "liger_kernel_impl": os.environ.get("LIGER_KERNEL_IMPL", NOT_AVAILABLE),
        "quack": package_version("quack-kernels"),
        "python_native": list(native.available_dsls) if native else NOT_AVAILABLE,
        "clocks": {"start": clocks()},
    }


def clocks() -> dict[str, str]:
    """The GPU's clocks in MHz, their maxima, why they are held back if they are, and degrees C."""
    return nvidia_smi(
        "clocks.sm",
        "clocks.mem",
        "clocks.max.sm",
        "clocks.max.mem",
        "clocks_event_reasons.active",
        "temperature.gpu",
    )


def nvidia_smi(*fields: str) -> dict[str, str]:
    """These fields of the current GPU, as nvidia-smi prints them without units."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        printed = _output("nvidia-smi", f"--id=GPU-{uuid}", *query)
        return dict(zip(fields, printed.split(", "), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError):
        return dict.fromkeys(fields, NOT_AVAILABLE)


def git_revision() -> str:
    """What GIT_REVISION says, for a copy of a checkout; else the commit.

    Where files were changed, "-dirty" and a digest of the changes follow.
    """
    if revision := os.environ.get("GIT_REVISION"):
        return revision
    try:
        revision = _output("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        if revision.endswith("-dirty"):
            changes = _output("git", "diff", "HEAD").encode()
            revision += f"-{hashlib.sha256(changes).hexdigest()[:8]}"
        return revision
    except (OSError, subprocess.SubprocessError):
        return NOT_AVAILABLE


def _output(*command: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=30, cwd=folder
    )
    return done.stdout.strip()


def package_version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_AVAILABLE
