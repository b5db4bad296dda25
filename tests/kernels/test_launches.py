"""Every launch that is shipped gives right results, and a bad file of tuned ones does no harm."""

import json
import logging
import os
from dataclasses import asdict

import pytest
import torch

from kernels import launcher, launches, triton_rms_norm
from kernels.launches import Launch
from kernels.tune import save
from tests.kernels.oracle import assert_within, oracle
from tests.running import python

EPS = 1e-6
BITS = {"16-bit": torch.bfloat16, "32-bit": torch.float32}
SHIPPED = {
    (file.stem, key): launch
    for file in sorted(launches.MEASURED.glob("*.json"))
    for found in launches.read_launches(file).values()
    for key, launch in found.items()
}


@pytest.mark.parametrize(("architecture", "key"), SHIPPED, ids="-".join)
def test_shipped_launch(architecture, key, device, monkeypatch):
    launch = SHIPPED[architecture, key]
    kind, n, stream, branch = key.split()
    n, stream, branch = int(n), BITS[stream], BITS[branch]
    monkeypatch.setattr(triton_rms_norm, f"{kind.removeprefix('add_')}_launch", lambda *_: launch)
    rows = launch.rows * max(3, launches.gpu(device).multiprocessors) + 1
    h, dy = (torch.randn(rows, n, device=device).to(dtype) for dtype in (stream, branch))
    dh = torch.randn(rows, n, device=device).to(stream) if kind == "add_backward" else None
    weight = torch.randn(n, device=device)
    dtypes = {"compute": torch.float32, "y": branch, "dx": branch, "dw": torch.float32}
    dtypes["dx"] = stream if dh is None else branch
    expected = oracle(h, weight, EPS, dy, dh, dtypes)

    def run(rows: slice) -> dict[str, torch.Tensor]:
        dh_rows = None if dh is None else dh[rows]
        y, dx = (torch.empty_like(dy[rows], dtype=dtypes[name]) for name in ("y", "dx"))
        rstd, dw = torch.empty(len(y), device=device), torch.empty(n, device=device)
        dr = torch.empty_like(h[rows]) if dtypes["dx"] != stream else None
        triton_rms_norm.forward(h[rows], None, weight, EPS, y, None, rstd)
        triton_rms_norm.backward(dy[rows], dh_rows, h[rows], weight, rstd, dx, dr, dw)
        return {"y": y, "dx": dx, "dw": dw} | ({} if dr is None else {"dr": dr})

    launcher.forget()
    got = run(slice(0, rows))
    if "dr" in got:
        expected["dr"] = oracle(h, weight, EPS, dy, dh, dtypes | {"dx": stream})["dx"]
    for name, tensor in got.items():
        assert_within(tensor, expected[name], name)
    few = slice(rows - 3, rows)
    for name, tensor in run(few).items():
        assert name == "dw" or torch.equal(tensor, got[name][few]), name
    if device.type == "cuda":
        assert launcher.spills(triton_rms_norm._rms_norm_forward_kernel) == 0
        assert launcher.spills(triton_rms_norm._rms_norm_backward_kernel) == 0


@pytest.fixture
def tuned(tmp_path, monkeypatch, device):
    """The path of an empty cache's file of tuned launches, and a look at what is then known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = launches.tuned_file()
    assert tmp_path in file.parents
    launches.known_launches.cache_clear()
    yield file
    launches.known_launches.cache_clear()


def test_a_folder_in_its_place_is_named_and_left_out(tuned, device, caplog):
    tuned.mkdir(parents=True)
    assert launches.known_launches(device) is not None
    assert str(tuned) in caplog.text
    done = python("-c", "import kernels", XDG_CACHE_HOME=os.environ["XDG_CACHE_HOME"])
    assert done.returncode == 0, done.stderr


MINE = {"forward 77 16-bit 16-bit": Launch(4, 128, 2)}


def test_what_was_tuned_here_is_used(tuned, device):
    save(MINE, device, tuned)
    assert launches.known_launches(device).items() >= MINE.items()
    assert [path.name for path in tuned.parent.iterdir()] == [tuned.name]


def test_tuning_again_keeps_what_was_found_before(tuned, device):
    save(MINE, device, tuned)
    save({"forward 78 16-bit 16-bit": Launch(1, 128, 4)}, device, tuned)
    assert launches.read_launches(tuned)[launches.tuned_for(device)].items() > MINE.items()


def test_what_was_tuned_with_another_triton_is_stale(tuned, device):
    tuned.parent.mkdir(parents=True)
    old = {"NVIDIA Old, triton 2.0": {key: asdict(launch) for key, launch in MINE.items()}}
    tuned.write_text(json.dumps(old))
    assert not launches.known_launches(device).keys() & MINE.keys()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"gpu": 3}',
        '{"gpu": {"key": {"rows": 1}}}',
        '{"gpu": {"key": {"rows": -1, "columns": 2, "warps": 4}}}',
        '{"gpu": {"key": {"rows": true, "columns": 2, "warps": 4}}}',
        '{"gpu": {"key": {"rows": 1, "columns": 2, "warps": 3}}}',
    ],
)
def test_a_corrupt_file_is_named_and_left_out(tuned, device, content, caplog):
    tuned.parent.mkdir(parents=True)
    tuned.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert not launches.known_launches(device).keys() & MINE.keys()
    assert str(tuned) in caplog.text


def test_a_corrupt_table_of_the_project_is_named_and_left_out(
    tuned, device, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(launches, "MEASURED", tmp_path)
    file = tmp_path / f"{launches.gpu(device).architecture}.json"
    file.write_text("{")
    save(MINE, device, tuned)
    with caplog.at_level(logging.WARNING):
        assert launches.known_launches(device) == MINE
    assert str(file) in caplog.text


def test_a_folder_that_cannot_be_written_to_is_an_error(tuned, device):
    tuned.parent.parent.joinpath(tuned.parent.name).write_text("a file where the folder should be")
    with pytest.raises(OSError, match=tuned.parent.name):
        save(MINE, device, tuned)
