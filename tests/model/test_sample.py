"""python -m model.sample: what it writes, what it says, and what bad input gets."""

import pytest
import torch

from data import load_tokenizer
from model.checkpoints import load_gpt
from model.command import command
from model.sample import sample


@pytest.fixture
def write(saved, capsys, device):
    """Calls it for a checkpoint with `changes`; returns its text."""

    def write(*flags: str, **changes) -> str:
        path = saved(**changes)
        status = command(sample, "sample", ["--ckpt", str(path), "--device", device.type, *flags])
        shown = capsys.readouterr()
        assert status == 0, shown.err
        write.notes = shown.err
        return shown.out

    return write


def test_the_prompt_and_the_most_probable_tokens_after_it(write, saved, device):
    gpt, _ = load_gpt(saved())
    ids = torch.tensor([list(b"And God")], device=device)
    expected = gpt.to(device).generate(ids, 8, temperature=0.0)[0].tolist()
    text = load_tokenizer("bytes").decode(expected)
    assert write("--prompt", "And God", "--n", "8", "--temperature", "0") == text + "\n"


def test_a_seed_gives_the_same_text_again_and_another_another(write):
    first = write("--seed", "1")
    assert write("--seed", "1") == first
    assert write("--seed", "2") != first


def test_several_samples_differ(write):
    _, one, two = write("--samples", "2", "--prompt", "x").split("---\n")
    assert one.splitlines()[0] != two.splitlines()[0]


@pytest.mark.parametrize("changes", [{"norm": "compiled"}, {"norm": "triton"}, {"compile": True}])
def test_a_checkpoint_of_any_norm_writes_the_same(write, changes):
    flags = ["--prompt", "In the", "--n", "5", "--temperature", "0"]
    expected = write(*flags)
    assert write(*flags, **changes) == expected
    assert write(*flags, "--norm", "eager", **changes) == expected


@pytest.mark.parametrize("norm", ["eager", "triton"])
def test_a_stream_in_bfloat16(write, norm):
    assert write("--n", "3", "--prompt", "x", stream_dtype="bfloat16", norm=norm).startswith("x")


def test_a_prompt_longer_than_the_context_is_cut_and_that_is_said(write):
    flags = ["--n", "10", "--prompt"]
    start = write(*flags, "in the beginning")[len("in the beginning") :]
    assert write.notes.count("note:") == 1
    assert "older half" in write.notes
    longer = "so it was in the beginning"
    assert write(*flags, longer)[len(longer) :] == start
    assert "26 tokens" in write.notes
    assert "last 16" in write.notes


def test_it_stops_at_the_end_of_text_unless_told_otherwise(write):
    flags = ["--n", "2000", "--temperature", "5", "--top_k", "null", "--prompt", "x"]
    endless = write(*flags, "--stop", "false")
    assert "<|endoftext|>" in endless
    assert write(*flags) == endless.split("<|endoftext|>")[0] + "\n"


BAD_INPUT = {
    "numbers": (
        ["--n", "0", "--samples", "0", "--temperature", "-1", "--top_k", "0", "--seed", "-1"],
        ["n is 0", "samples is 0", "temperature is -1", "top_k is 0", "seed is -1"],
    ),
    "type": (["--n", "ten"], ["ten"]),
    "flag": (["--nosuch", "1"], ["--nosuch"]),
    "norm": (["--norm", "nosuch"], ["'nosuch'", "eager"]),
    "device": (["--device", "nosuch"], ["'nosuch'"]),
    "device without data": (["--device", "meta"], ["'meta'"]),
    "tokenizer": (["--tokenizer", "gpt2"], ["257", "gpt2 has 50257"]),
    "unknown tokenizer": (["--tokenizer", "nosuch"], ["'nosuch'"]),
    "no checkpoint": (["--ckpt", "no/such.ckpt"], ["no checkpoint no/such.ckpt"]),
}


@pytest.mark.parametrize(("flags", "expected"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_answered_in_sentences(saved, capsys, flags, expected):
    assert command(sample, "sample", ["--ckpt", str(saved()), *flags]) == 2
    shown = capsys.readouterr().err
    assert all(text in shown for text in expected), shown
    assert all(line.startswith("error: ") for line in shown.splitlines()), shown


def test_weights_that_are_not_finite(saved, capsys):
    path = saved()
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"]["gpt.final_norm.weight"][0] = float("nan")
    torch.save(checkpoint, path)
    assert command(sample, "sample", ["--ckpt", str(path)]) == 2
    assert "weights that are not finite" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_say_its_tokenizer(saved, capsys):
    path = saved()
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["tokenizer"]
    torch.save(checkpoint, path)
    flags = ["--ckpt", str(path), "--n", "2"]
    assert command(sample, "sample", flags) == 2
    assert "name it with --tokenizer" in capsys.readouterr().err
    assert command(sample, "sample", [*flags, "--tokenizer", "bytes"]) == 0
