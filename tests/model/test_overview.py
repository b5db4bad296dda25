"""Finished runs side by side."""

import json

import pytest

from model.overview import main

SUMMARY = {
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


def test_table_and_picture(tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "metrics.csv").write_text("step,loss,val_loss\n1,5.7,\n5,1.9324,2.0498\n")
    assert main([str(tmp_path), str(tmp_path), "--out", str(tmp_path / "picture.png")]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    expected = "| triton | 10.0 (9.0 to 11.0) | 2.5 | 102,400 | n/a | n/a / n/a | 1.932 | 2.050 |"
    assert rows == [expected, expected]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_a_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path), "--out", str(tmp_path / "picture.png")])
    assert exit_.value.code == 2
    assert "not a finished run" in capsys.readouterr().err
