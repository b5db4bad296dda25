"""Every command and every piece of Python in README.md and docs/ is run, made small.

A command that no rule here knows how to make small fails: docs and rules change together.
"""

import contextlib
import io
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from compare import parity, training
from compare.cli import COUNTED
from compare.parity import Effort
from data.sources import SOURCES
from kernels.bench import __main__ as bench
from model.callbacks import Sampler
from tests.docs.blocks import ALL, PAGES, ROOT, Block
from tests.docs.conftest import TINY, python, small

COMMANDS = [(block.page.name, command) for block in ALL for command in block.commands()]
RESULT = "results.json"
OF_COMPARE = {
    option: value
    for option, value in TINY.items()
    if not option.startswith("trainer.") or option.removeprefix("trainer.") in COUNTED
}


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """torch.compile takes half a minute a model and is tested elsewhere: here it does nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def few_words(monkeypatch) -> None:
    """Of a trained model's sample: interpreted, a token of a tiny one takes 50 milliseconds."""
    monkeypatch.setattr(Sampler.__init__, "__defaults__", (3, 1337))


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
@pytest.mark.usefixtures("reader", "in_this_process", "uncompiled", "few_words")
@pytest.mark.parametrize(("page", "command"), dict.fromkeys(COMMANDS), ids=lambda part: part)
def test_a_command_in_the_docs_works(page, command, finished_run, capsys):
    program, *words = shlex.split(command)
    if program == "python" and words[0] == "-m":
        program, words = words[1], words[2:]
    elif program == "python":
        program, words = words[0], words[1:]
    if program not in RULES:
        pytest.fail(f"{page} has `{command}`: say in RULES how to run it, made small")
    prepare(words, finished_run)
    status = RULES[program](words)
    assert status == 0, capsys.readouterr().err


def prepare(words: list[str], finished_run: Path) -> None:
    """Make the texts and the runs that a command speaks of as if they were there."""
    for name in re.findall(r"[\w/.-]+\.txt", " ".join(words)):
        if not Path(name).exists():
            shutil.copy("my.txt", name)
    for name in re.findall(r"runs/[\w-]+", " ".join(words)):
        if not Path(name).exists():
            shutil.copytree(finished_run, name)


def train(words: list[str]) -> int:
    """Two steps of a tiny model; what is to be resumed has taken one step before."""
    words = [without_a_network(word) for word in words]
    if "--ckpt_path" in words:
        at = words.index("--ckpt_path")
        if words[at + 1] == "last":
            once = {**TINY, "trainer.max_steps": 1}
            assert python("train.py", *words[:at], *words[at + 2 :], *small(once)) == 0
    return python("train.py", *words, *small())


def without_a_network(word: str) -> str:
    """A hub set, by its short name or as owner/name, is a local text here."""
    hub = word in {*SOURCES} - {"kjv"} or (
        re.fullmatch(r"[\w.-]+/[\w.-]+(:.*)?", word) and "=" not in word
    )
    return "my.txt" if hub and not Path(word.split(":")[0]).exists() else word


def torchrun(words: list[str]) -> int:
    """One process of those that torchrun would start.

    compare has nothing against its command but that there is only one.
    """
    options = get_args_parser().parse_args(words)
    if options.module:
        assert options.training_script == "compare"
        return only(["each with a process of its own"], *options.training_script_args)
    assert options.training_script == "train.py"
    return train(options.training_script_args)


def only(mistakes: list[str], *words: str) -> int:
    """0 if these are all that compare finds wrong with the command."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = python("-m", "compare", *words, *small(OF_COMPARE))
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    assert status == 2
    assert len(lines) == len(mistakes), lines
    assert all(mistake in line for mistake, line in zip(mistakes, lines, strict=True)), lines
    return 0


def data(words: list[str]) -> int:
    if words[0] == "clear":
        assert python("-m", "data", "inspect", "my.txt", "--cache_dir", "cache") == 0
        return python("-m", "data", *words, "--yes", "--cache_dir", "cache")
    return python("-m", "data", *map(without_a_network, words), "--num_proc", "1")


def compare(words: list[str]) -> int:
    """The part that is quick, where no other is named; a report over results that are there."""
    if words[:1] == ["report"]:
        for folder in map(Path, words[1:]):
            if not (folder / RESULT).exists():
                assert compare(["memory", "--name", "earlier"]) == 0
                shutil.copytree("runs/compare-earlier", folder, dirs_exist_ok=True)
        return python("-m", "compare", *words)
    if not words or words[0].startswith("-"):
        words = ["memory", *words]
    if "graphs" in " ".join(words) and bench.missing_gpu():
        return only(["which are CUDA graphs and so need a GPU"], *words)
    few = ["--rounds", "2"] if words[0] == "speed" else []
    with pytest.MonkeyPatch.context() as patch:
        little = Effort(steps=training.WINDOW, seeds=2, tokens=32, rows=16)
        patch.setattr(parity, "ON_CPU", little)
        patch.setattr(parity, "ON_GPU", little)
        status = python("-m", "compare", *words, *few, *small(OF_COMPARE))
    if words[0] == "parity" and status == 1:  # so few steps may show nothing: there is a result
        assert list(Path("runs").rglob(RESULT))
        return 0
    return status


def needs_a_gpu(module: str) -> Callable[[list[str]], int]:
    """Without a GPU the command says so; with one it would take minutes, so it is read only."""

    def rule(words: list[str]) -> int:
        if bench.missing_gpu() is None:
            parse = __import__(module, fromlist=["parse_arguments"])
            parse.parse_arguments(words)
            return 0
        assert python("-m", module, *words) == 2
        return 0

    return rule


def make(words: list[str]) -> int:
    """CI itself runs these: here the target only has to be there."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    return 0 if set(words) <= set(targets) else 2


def as_it_is(module: str) -> Callable[[list[str]], int]:
    """A command that is quick once its files are there."""
    return lambda words: python("-m", module, *words)


RULES = {
    "train.py": train,
    "torchrun": torchrun,
    "make": make,
    "compare": compare,
    "data": data,
    "kernels.bench": needs_a_gpu("kernels.bench.__main__"),
    "kernels.tune": needs_a_gpu("kernels.tune"),
    **{
        module: as_it_is(module)
        for module in ("kernels.bench.report", "model.overview", "model.sample", "model.export")
    },
}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
@pytest.mark.parametrize("module", ["kernels.bench", "kernels.tune"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_what_needs_one_says_so(module, reader, capsys):
    assert python("-m", module) == 2
    assert f"python -m {module} needs a GPU" in capsys.readouterr().err


PYTHON = [block for block in ALL if block.is_python]
QUOTES = [block for block in ALL if block.quoted_file]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_in_the_docs_runs(page, reader, device):
    """Block after block in one namespace, which has the tensors that the docs speak of."""
    branch, stream, x = (torch.randn(2, 3, 768, requires_grad=True).to(device) for _ in range(3))
    names = {"torch": torch, "branch": branch, "stream": stream, "x": x}
    names |= {"weight": torch.ones(768, device=device), "__name__": "docs"}
    for block in PYTHON:
        if block.page == page:
            with torch.device(device):
                exec(compile(block.text, page.name, "exec"), names)


@pytest.mark.parametrize("block", QUOTES, ids=lambda block: block.info)
def test_quoted_source_is_the_source(block: Block):
    source = [line.strip() for line in block.quoted_file.read_text().splitlines()]
    quoted = [line.strip() for line in block.text.splitlines()]
    assert any(source[at : at + len(quoted)] == quoted for at in range(len(source)))


def test_the_example_of_a_norm_is_the_same_wherever_it_is_shown():
    examples = {block.text for block in ALL if "def make()" in block.text}
    assert len(examples) == 1


def test_there_are_commands_and_python():
    assert len(COMMANDS) > 10
    assert len(PYTHON) >= 2
