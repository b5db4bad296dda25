"""What a run reports: figures, MFU, files. Pure functions on inputs whose answer is known."""

import json
import math
import multiprocessing
from pathlib import Path

import pytest

from model import GPT, GPTConfig
from model.environment import environment
from model.files import create_run, newest_run, replacing
from model.loggers import MetricsFile, read_metrics
from model.mfu import flops_per_token, mfu, peak_flops
from model.summary import figures, quantiles, table, write_json

ROWS = {
    1: {"loss": 5.0, "lr": 0.1},
    2: {"loss": 4.0, "val_loss": 4.5, "val_perplexity": 90.0},
    3: {"loss": 3.0},
}


def test_figures_of_a_known_run():
    step_ms = [900.0, *range(10, 111)]
    memory = {"allocated": 2**30, "reserved": 3 * 2**29}
    result = figures(ROWS, step_ms, 600, 10**6, 1e10, n_devices=2, memory=memory)
    assert result["steps"] == 3
    assert (result["first_train_loss"], result["train_loss"]) == (5.0, 3.0)
    assert (result["val_loss"], result["val_perplexity"]) == (4.5, 90.0)
    assert result["first_step_ms"] == 900.0
    assert result["step_ms"] == {"p10": 20.0, "p50": 60.0, "p90": 100.0}
    assert result["tokens_per_s"] == pytest.approx(600 / 0.060)
    assert result["mfu"] == pytest.approx(10_000 * 1e6 / 2e10)
    assert (result["peak_allocated_gib"], result["peak_reserved_gib"]) == (1.0, 1.5)


@pytest.mark.parametrize("step_ms", [[], [5.0]])
def test_what_was_not_measured_is_not_made_up(step_ms):
    result = figures({}, step_ms, 0, 1, None)
    assert result["steps"] == 0
    assert result["step_ms"] == {"p10": None, "p50": None, "p90": None}
    assert result["tokens_per_s"] is result["mfu"] is result["val_loss"] is None
    shown = table({**result, "name": "x", "norm": "eager", "precision": "32-true"})
    assert "n/a" in list(shown.columns[1].cells)


def test_an_unknown_gpu_has_no_mfu():
    assert figures(ROWS, [1.0, 2.0], 10, 10, None)["mfu"] is None


def test_quantiles():
    assert quantiles([7.0], (0.1, 0.9)) == (7.0, 7.0)
    assert quantiles([3.0, 1.0, 2.0], (0.5,)) == (2.0,)
    assert quantiles([0.0, 10.0], (0.1, 0.9)) == (1.0, 9.0)


def test_flops_of_a_token():
    """6 N + 12 L C T, the embedding once as the head: GPT-2 small, counted by hand."""
    config = GPTConfig(2, 4, 64, 32, 100, norm="eager", qk_norm=True)
    matrices = 128 * 64 + 2 * 12 * 64**2
    assert flops_per_token(GPT(config)) == 6 * matrices + 12 * 2 * 64 * 32


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16-mixed", 989),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16-true", 312),
        ("Tesla T4", "16-mixed", 65),
        ("Tesla T4", "bf16-mixed", None),
        ("NVIDIA H200", "32-true", None),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16-mixed", None),
        ("Some GPU of 2031", "bf16-mixed", None),
        (None, "bf16-mixed", None),
    ],
)
def test_peaks_are_known_or_none(gpu, precision, tflops):
    assert peak_flops(gpu, precision) == (tflops and tflops * 1e12)


def test_mfu():
    assert mfu(1000.0, 10**9, 1e13, n_gpus=4) == pytest.approx(1e12 / 4e13)


def test_json_has_null_for_what_is_not_finite(tmp_path):
    write_json({"a": math.nan, "b": {"c": [1.5, math.inf]}}, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": {"c": [1.5, None]}}


def test_environment_names_what_numbers_depend_on():
    about = environment()
    assert about.keys() >= {"gpu", "driver", "torch", "triton", "lightning", "python", "date"}
    assert all(isinstance(value, str) and value for value in about.values())


def _write_half(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("ne")
        raise OSError("the disk is full")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="full"):
        _write_half(path)
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_replaced_is_named(tmp_path):
    folder = tmp_path / "file.txt"
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as error, replacing(folder) as temporary:
        temporary.write_text("new")
    assert (error.value.filename, error.value.filename2) == (str(folder), None)
    assert list(tmp_path.iterdir()) == [folder]


def test_newest_run_counts_as_create_run_does(tmp_path):
    assert newest_run(tmp_path / "none", "a") is None
    for expected in ("a", "a-2", "a-3"):
        assert create_run(tmp_path, "a") == tmp_path / expected
    create_run(tmp_path, "a-b")
    (tmp_path / "a-10").mkdir()
    assert newest_run(tmp_path, "a") == tmp_path / "a-10"
    assert newest_run(tmp_path, "a-b") == tmp_path / "a-b"
    assert newest_run(tmp_path, "b") is None
    assert newest_run(tmp_path, "a", lambda run: run.name != "a-10") == tmp_path / "a-3"


def test_a_new_run_is_the_newest_though_an_older_one_was_deleted(tmp_path):
    for _ in range(3):
        create_run(tmp_path, "a")
    (tmp_path / "a-2").rmdir()
    assert create_run(tmp_path, "a") == tmp_path / "a-4" == newest_run(tmp_path, "a")


def _create(root: Path) -> Path:
    return create_run(root, "same")


def test_simultaneous_starts_get_directories_of_their_own(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        runs = pool.map(_create, [tmp_path] * 20)
    assert len(set(runs)) == 20


def test_metrics_are_one_row_a_step_and_a_resumed_file_goes_on(tmp_path):
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path)
    first.log_metrics({"loss": 0.1 + 0.2}, step=1)
    first.log_metrics({"loss": 2.0}, step=2)
    first.log_metrics({"val_loss": 3.0}, step=2)
    first.finalize("success")
    assert read_metrics(path) == {1: {"loss": 0.1 + 0.2}, 2: {"loss": 2.0, "val_loss": 3.0}}

    second = MetricsFile(path, resume_step=1)  # step 2 came after the checkpoint
    second.log_metrics({"loss": 2.5}, step=2)
    second.finalize("success")
    assert read_metrics(path) == {1: {"loss": 0.1 + 0.2}, 2: {"loss": 2.5}}
