"""Finished runs side by side."""

import json
from pathlib import Path

import pytest

from model.overview import draw, label, main, read_run

SUMMARY = {
    "name": "tiny-triton",
    "norm": "triton",
    "precision": "32-true",
    "parameters": 812_544,
    "tokens_per_step": 1024,
    "first_step_ms": 2500.0,
    "step_ms": {"p10": 9.0, "p50": 10.04, "p90": 11.0},
    "tokens_per_s": 102_400.0,
    "mfu": None,
    "peak_allocated_gib": None,
    "peak_reserved_gib": None,
    "train_loss": 1.9324,
    "val_loss": 2.0498,
    "environment": {"gpu": "n/a", "torch": "2.14.1", "triton": "3.8.0"},
}


def write_run(folder: Path, **changes) -> str:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY | changes))
    (folder / "metrics.csv").write_text("step,loss,val_loss\n1,5.7,\n5,1.9324,2.0498\n")
    return str(folder)


def test_table_and_picture(tmp_path, capsys):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", norm="eager")]
    assert main([*runs, "--out", str(tmp_path / "picture.png")]) == 0
    rows = capsys.readouterr().out.splitlines()[2:4]
    figures = "| 10.0 (9.0 to 11.0) | 2.5 | 102,400 | n/a | n/a / n/a | 1.932 | 2.050 |"
    assert rows == [f"| triton {figures}", f"| eager {figures}"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_norm_go_by_their_names(tmp_path, capsys):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", name="tiny-triton-2")]
    assert main([*runs, "--out", str(tmp_path / "picture.png")]) == 0
    rows = capsys.readouterr().out.splitlines()[2:4]
    assert [row.split()[1] for row in rows] == ["tiny-triton", "tiny-triton-2"]


def test_the_title_says_where_runs_differ(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", tokens_per_step=256)]
    runs = [read_run(Path(run)) for run in runs]
    label(runs)
    figure = draw(runs)
    assert "1M GPT, 1,024 tokens a step and 256 tokens a step, 32" in figure.get_suptitle()
    assert len(figure.axes) == 2  # no memory of a CPU's runs


@pytest.mark.parametrize(
    ("changes", "out", "expected"),
    [
        ({"step_ms": {"p10": None, "p50": None, "p90": None}}, "x.png", "fewer than two steps"),
        ({}, "no/such/folder/x.png", "cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_drawn_or_written(tmp_path, capsys, changes, out, expected):
    with pytest.raises(SystemExit, match="2"):
        main([write_run(tmp_path / "a", **changes), "--out", str(tmp_path / out)])
    assert expected in capsys.readouterr().err


def test_what_is_not_a_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path), "--out", str(tmp_path / "picture.png")])
    assert exit_.value.code == 2
    assert "not a finished run" in capsys.readouterr().err
