"""python -m model.export: what other tools get is the model of the checkpoint."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model.checkpoints import load_gpt
from model.command import command
from model.errors import UserError
from model.export import export, load


def test_an_exported_model_loads_back_equal(saved, tmp_path):
    path, folder = saved(qk_norm=True), tmp_path / "new" / "folder"
    assert command(export, "export", ["--ckpt", str(path), "--out", str(folder)]) == 0
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "config.json"}
    expected, _ = load_gpt(path)
    got = load(folder)
    assert got.config == expected.config
    a, b = expected.state_dict(), got.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert got.head.weight is got.embedding.weight
    tokens = torch.arange(12)[None]
    assert torch.equal(got(tokens), expected(tokens))


def test_other_tools_find_every_matrix_once_and_what_it_is_for(saved, tmp_path):
    assert command(export, "export", ["--ckpt", str(saved()), "--out", str(tmp_path)]) == 0
    weights = load_file(tmp_path / "model.safetensors")
    gpt, _ = load_gpt(tmp_path / "model.ckpt")
    assert weights.keys() == dict(gpt.named_parameters()).keys()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tokenizer"] == "bytes"
    assert config["n_embd"] == 32


def test_bad_input_is_answered_in_sentences(saved, tmp_path, capsys):
    assert command(export, "export", ["--ckpt", "no.ckpt", "--out", str(tmp_path)]) == 2
    assert "no checkpoint no.ckpt" in capsys.readouterr().err
    path = saved()
    assert command(export, "export", ["--ckpt", str(path), "--out", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("field", [6, 8, 10])  # version, flags and packing of its first part
def test_a_checkpoint_whose_table_of_contents_is_damaged_is_refused(saved, tmp_path, capsys, field):
    path = saved()
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + field] ^= 255
    path.write_bytes(content)
    assert command(export, "export", ["--ckpt", str(path), "--out", str(tmp_path)]) == 2
    assert f"{path} is damaged: its table of contents" in capsys.readouterr().err


def test_a_disk_that_is_full(saved, tmp_path, capsys, monkeypatch):
    def full(*_, **__) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("model.export.save_file", full)
    assert command(export, "export", ["--ckpt", str(saved()), "--out", str(tmp_path / "out")]) == 2
    assert "model.safetensors cannot be written: I/O error: No space" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_what_is_no_exported_model_is_refused(saved, tmp_path, damage):
    assert command(export, "export", ["--ckpt", str(saved()), "--out", str(tmp_path)]) == 0
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100]) if damage == "cut" else file.unlink()
    with pytest.raises(UserError, match="no exported model"):
        load(tmp_path)
