"""examples/quickstart.ipynb runs from a copy of the checkout, and is kept without its outputs."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.docs.blocks import ROOT

NOTEBOOK = "examples/quickstart.ipynb"
SECONDS_A_CELL = 300  # a hang ends; a slow machine does not
CHECKOUT = ("train.py", "kernels", "model", "data", "compare", "configs", "examples")


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in the folder that it is in, as Jupyter does."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in CHECKOUT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    notebook = nbformat.read(checkout / NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str((checkout / NOTEBOOK).parent)}}
    NotebookClient(notebook, timeout=SECONDS_A_CELL, resources=folder).execute()
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def test_it_trains_compares_and_draws(executed):
    data = [output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in found for found in data) == 2
    assert sum("dataframe" in found.get("text/html", "") for found in data) == 1
    text = printed(executed)
    assert "quickstart-triton" in text
    assert "compare-quickstart/report.html" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU's times are worth")
def test_it_says_that_times_of_a_cpu_are_no_findings(executed):
    text = printed(executed)
    assert text.startswith("No GPU: losses are right, times are no findings.")
    assert text.count("us a call   (a CPU: no finding)") == 2


def test_it_is_kept_without_outputs():
    notebook = json.loads(Path(ROOT / NOTEBOOK).read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
