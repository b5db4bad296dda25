"""Processes of their own: results, progress, errors, environment."""

import os
import sys
from pathlib import Path

import pytest

from compare import child
from compare.child import ChildError

HERE = "child_functions"


def product(settings, progress, factor):
    print("this is not progress")
    progress("multiplying", 1, 2)
    return {
        "product": factor * settings.data.batch_size,
        "variable": os.environ.get("COMPARE_TEST"),
        "process": os.getpid(),
    }


def fail(settings, progress):
    raise OSError("the disk is on fire")


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Functions of this file in a module that the other process can import."""
    (tmp_path / f"{HERE}.py").write_text(Path(__file__).read_text())
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return lambda function: f"{HERE}:{function}"


def test_a_function_runs_in_another_process(config, target):
    reports = []
    found = child.call(
        target("product"),
        config,
        lambda *report: reports.append(report),
        environment={"COMPARE_TEST": "set"},
        factor=3,
    )
    assert found["product"] == 12
    assert found["variable"] == "set"
    assert found["process"] != os.getpid()
    assert reports == [("multiplying", 1, 2)]


def test_its_errors_come_back(config, target):
    with pytest.raises(ChildError, match="the disk is on fire"):
        child.call(target("fail"), config, lambda *_: None)
