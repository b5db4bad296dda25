"""train.py in processes of its own, which can be killed at any moment, and what they leave."""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

from model.checkpoints import AtomicCheckpointIO
from model.loggers import read_metrics

# Its processes are forked from one that has imported train.py and done nothing else, so that a
# start takes a fraction of a second.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["train", __name__])

NAME = "run"
STEPS, INTERVAL = 24, 4  # of a run, and from one validation and checkpoint to the next
SETTINGS = {
    "norm": "eager",
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 32, "warmup_steps": 2, "lr": 0.01},
    "data": {"tokenizer": "bytes", "context": 32, "batch_size": 4, "val_batches": 2, "num_proc": 1},
    "trainer": {
        "max_steps": STEPS,
        "val_check_interval": INTERVAL,
        "log_every_n_steps": 1,
        "accelerator": "cpu",
    },
}


@dataclass
class Result:
    """What a process left: its exit status (negative: the signal it died of) and its words."""

    status: int
    shown: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.shown.splitlines() if line.startswith("error: ")]


@dataclass
class Start:
    """A train.py that is running.

    Attributes:
        steps: Something can be read from it when training starts.
        saves: Something can be read from it when a checkpoint is about to be written.
    """

    process: multiprocessing.Process
    output: Path
    steps: Connection
    saves: Connection

    def end(self, timeout: float = 120) -> Result:
        """Wait for its end."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running: {self.output.read_text()}"
        return Result(self.process.exitcode, self.output.read_text())

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@dataclass
class Trials:
    """Runs of one small config under `folder`, each trial in a folder of its own.

    Attributes:
        may_mount: Whether to mount small file systems where this user may.
        reference: The directory of an undisturbed run.
        seconds: How long that took as a "whole", from its first step on ("training"), how long a
            start needs with nothing cached ("caching"), and to "save" a checkpoint.
    """

    folder: Path
    may_mount: bool = True
    random: Random = field(default_factory=Random)

    def __post_init__(self) -> None:
        text = self.folder / "text.jsonl"
        lines = (f"The {i}th line tells of {i * i} sheep and {i % 7} goats." for i in range(200))
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        data = {"source": str(text), "cache_dir": str(self.folder / "cache")}
        settings = SETTINGS | {"data": SETTINGS["data"] | data}
        self.config = self.folder / "small.yaml"
        self.config.write_text(yaml.safe_dump(settings))
        self._count = 0
        self.reference, self.seconds = self._measure()

    def _measure(self) -> tuple[Path, dict[str, float]]:
        """An undisturbed run, and how long it takes to its end, to training, and for a save."""
        self.start(self.root()).end()  # the cache, and the preloading process
        fresh = ["--data.cache_dir", str(self.folder / "another cache")]
        start = time.perf_counter()
        process = self.start(self.root(), *fresh)
        process.steps.recv()
        caching = time.perf_counter() - start
        process.end()
        root = self.root()
        start = time.perf_counter()
        process = self.start(root)
        process.steps.recv()
        training = time.perf_counter()
        done = process.end()
        end = time.perf_counter()
        assert done.status == 0, done.shown
        save = time.perf_counter()
        io, checkpoint = AtomicCheckpointIO(), torch.load(root / NAME / "last.ckpt")
        io.save_checkpoint(checkpoint, self.folder / "x.ckpt")
        seconds = {
            "whole": end - start,
            "training": end - training,
            "caching": caching,
            "save": time.perf_counter() - save,
        }
        return root / NAME, seconds

    def root(self) -> Path:
        """A new folder for runs."""
        self._count += 1
        root = self.folder / f"trial-{self._count}"
        root.mkdir()
        return root

    def start(
        self, root: Path, *flags: str, file_size: int | None = None, memory: int | None = None
    ) -> Start:
        """Start train.py with runs in `root`.

        Args:
            file_size: Bytes that a file which it writes can have at most.
            memory: Bytes that it can have more than when it starts.
        """
        self._count += 1
        output = self.folder / f"output-{self._count}.txt"
        output.touch()  # it may be killed before it writes
        argv = ["--config", str(self.config), "--name", NAME]
        argv += ["--trainer.default_root_dir", str(root), *flags]
        steps, say_step = CONTEXT.Pipe(duplex=False)
        saves, say_save = CONTEXT.Pipe(duplex=False)
        arguments = (argv, output, say_step, say_save, file_size, memory)
        process = CONTEXT.Process(target=_train, args=arguments)
        process.start()
        say_step.close()
        say_save.close()
        return Start(process, output, steps, saves)

    def again(self, root: Path, *flags: str, **options: Any) -> Start:
        """Start as a user would after a fault: from the last checkpoint, or anew without one."""
        if (root / NAME / "last.ckpt").exists():
            return self.start(root, "--ckpt_path", "last", *flags, **options)
        for path in sorted(root.glob(f"{NAME}*/**/*"), reverse=True):  # what never began
            path.rmdir() if path.is_dir() else path.unlink()
        for path in root.glob(f"{NAME}*"):
            path.rmdir()
        return self.start(root, *flags, **options)

    def kill_within(self, start: Start, seconds: float) -> bool:
        """Kill at a random moment of so many seconds; False if the process was at its end."""
        start.process.join(self.random.uniform(0, seconds))
        start.send(signal.SIGKILL)
        return start.end().status == -signal.SIGKILL

    def differs(self, run: Path, undisturbed: Path | None = None) -> str | None:
        """What differs from an undisturbed run (the reference), bit for bit, or None."""
        undisturbed = undisturbed or self.reference
        if not (run / "last.ckpt").exists():
            return f"there is no {run / 'last.ckpt'}"
        expected, got = (read_metrics(r / "metrics.csv") for r in (undisturbed, run))
        for key in ("loss", "val_loss"):
            values = {step: row[key] for step, row in expected.items() if key in row}
            if any(got.get(step, {}).get(key) != value for step, value in values.items()):
                return f"{key} of {run}"
        a, b = (_weights(r) for r in (undisturbed, run))
        return None if all(torch.equal(a[k], b[k]) for k in a) else f"weights of {run}"


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "last.ckpt", weights_only=True)["state_dict"]


def _train(
    argv: list[str],
    output: Path,
    steps: Connection,
    saves: Connection,
    file_size: int | None,
    memory: int | None,
) -> None:
    """In the new process: train.main, its words in a file, its progress announced."""
    import train
    from model.callbacks import Stopper

    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    _announce(Stopper, "on_train_start", steps)
    _announce(AtomicCheckpointIO, "save_checkpoint", saves, before=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # forked processes may ignore it
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
    if memory is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.RLIM_INFINITY))
    sys.exit(train.main(argv))


def _announce(owner: type, method: str, to: Connection, before: bool = False) -> None:
    """Has every call of the method tell the process that started this one."""
    call: Callable = getattr(owner, method)

    def announced(*args: Any, **kwargs: Any) -> Any:
        if before:
            to.send(None)
        result = call(*args, **kwargs)
        if not before:
            to.send(None)
        return result

    setattr(owner, method, announced)


@contextlib.contextmanager
def small_disk(at: Path, size: int, may_mount: bool) -> Iterator[bool]:
    """A new folder `at`, with a file system of `size` bytes in memory, or False if it has none."""
    at.mkdir()
    if not may_mount:
        yield False
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(at)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(at)], check=True)


def remount(at: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(at)], check=True)
