"""What a measured number depends on besides the code: hardware, driver, versions, revision."""

import datetime
import platform

import torch

from kernels.bench.environment import NOT_AVAILABLE, git_revision, nvidia_smi, package_version


def environment() -> dict[str, str]:
    """GPU, driver, package versions, git revision and date; "n/a" for what cannot be found out."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else NOT_AVAILABLE,
        "driver": nvidia_smi("driver_version")["driver_version"] if cuda else NOT_AVAILABLE,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{package: package_version(package) for package in ("torch", "triton", "lightning")},
        "git_revision": git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
