"""Fixtures for every test: the device that the kernels run on here."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one; elsewhere the CPU, with the kernels interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
