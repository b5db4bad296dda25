"""A folder like a reader's: the checkout's configs and results, texts, a norm of their own."""

import contextlib
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compare import child, memory
from compare.setup import from_config
from tests.docs.blocks import ALL, ROOT

TEXT = "".join(f"The {i}th line tells of {i * i} sheep and {i % 7} goats.\n" for i in range(200))
# Settings after which a run of train.py takes a second, on any machine and whatever was set before.
TINY = {
    "model.n_layer": 1,
    "model.n_head": 2,
    "model.n_embd": 16,
    "model.warmup_steps": 1,
    "model.stream_dtype": "float32",
    "data.context": 16,
    "data.batch_size": 2,
    "data.val_batches": 1,
    "data.num_proc": 1,
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 1,
    "trainer.accumulate_grad_batches": 1,
    "trainer.accelerator": "auto",
    "trainer.devices": 1,
    "trainer.precision": "32-true",
    "trainer.enable_progress_bar": False,
}


def small(settings: dict = TINY) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def python(*words: str) -> int:
    """Runs `python words...` in this process, which has imported everything; its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(word) for word in words])
        try:
            if words[0] == "-m":
                patch.setattr(sys, "argv", sys.argv[1:])
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as exit:
            return exit.code or 0
    return 0


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def reader(tmp_path, cache, monkeypatch) -> Path:
    """The current folder of a reader who has the checkout in it, and nothing run yet."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    for name in ("my.txt", "my-folder/a.txt", "my-folder/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "mypkg").mkdir()
    [norm] = [b.text for b in ALL if b.page.name == "README.md" and "def make()" in b.text]
    (tmp_path / "mypkg" / "norm.py").write_text(norm)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    yield tmp_path
    for name in ("mypkg", "mypkg.norm"):
        sys.modules.pop(name, None)


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """compare's parts run here and not in processes of their own, which take seconds to start."""

    def call(target: str, config: dict, progress: Callable, environment=None, **arguments):
        module, _, name = target.partition(":")
        function = getattr(__import__(module, fromlist=[name]), name)
        return json.loads(json.dumps(function(from_config(config), progress, **arguments)))

    monkeypatch.setattr(child, "call", call)
    monkeypatch.setattr(memory, "largest_batch", lambda *_: 1)  # on a GPU it fills the memory


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, cache) -> Path:
    """The folder of a run of train.py, for commands that want one."""
    root = tmp_path_factory.mktemp("finished")
    (root / "text.txt").write_text(TEXT)
    words = ["--name", "finished", "--data.source", "text.txt", "--data.tokenizer", "bytes"]
    with contextlib.chdir(root), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        assert python("train.py", "--norm", "eager", *words, *small()) == 0
    return root / "runs" / "finished"
