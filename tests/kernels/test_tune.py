"""The search for launches: what it tries, and how it answers what it cannot do."""

import re

import pytest
import torch

from kernels.tune import FORMS, all_searches, compiled_once, main
from tests.kernels.layouts import H200


@pytest.mark.parametrize("n", [64, 769, 8192, 32768])
def test_candidates_fit_the_gpu(n):
    for search in all_searches([n], FORMS):
        candidates = list(search.candidates(H200))
        assert candidates
        assert len(candidates) == len(set(candidates))
        for launch in candidates:
            elements = launch.rows * launch.columns / (32 * launch.warps)
            assert elements * search.stream.itemsize >= 16
            assert elements <= 32
            if search.direction == "forward":
                assert launch.columns >= min(n, 256)
            if search.direction == "backward":
                reads = (getattr(torch, dtype) for dtype in search.case.traffic("backward")[0])
                tile = launch.rows * launch.columns * sum(dtype.itemsize for dtype in reads)
                buffers = launch.programs_per_sm * (launch.stages - 1) * tile
                assert buffers <= H200.shared_memory


def test_only_what_differs_in_the_code_is_compiled():
    search = next(s for s in all_searches([768], ["norm"]) if s.direction == "backward")
    candidates = list(search.candidates(H200))
    compiled = compiled_once(candidates)
    assert len(compiled) < len(candidates)
    assert {launch.programs_per_sm for launch in compiled} == {1}


def test_keys_are_those_that_launches_are_looked_up_by():
    keys = [search.key for search in all_searches([768], ["norm", "add", "mixed"])]
    assert keys == [
        "forward 768 16-bit 16-bit",
        "backward 768 16-bit 16-bit",
        "add_backward 768 16-bit 16-bit",
        "forward 768 32-bit 16-bit",
        "add_backward 768 32-bit 16-bit",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "768,65536"], r"--n: \[65536\] is more than 32768"),
        (["--n", "0,768"], "--n: '0' is not a whole number of at least 1"),
        (["--n", "wide"], "--n: 'wide' is not a whole number of at least 1"),
        (["--forms", "norm,nosuch"], "--forms: there is no nosuch; there are norm, add"),
        (["--n", "65536", "--forms", "nosuch"], r"(?s)there is no nosuch.*--n: \[65536\]"),
        (["--out", "."], r"--out: \. is a folder"),
        (["--passes", "sideways"], "--passes: there is no sideways; there are forward, backward"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu(capsys):
    assert main([]) == 2
    assert "python -m kernels.tune needs a GPU" in capsys.readouterr().err
