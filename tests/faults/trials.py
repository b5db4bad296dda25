"""The faults: each brought about for real, and what is asked of train.py under it."""

import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning import Callback

from model.loggers import read_metrics
from tests.faults.processes import INTERVAL, NAME, STEPS, Result, Trials, remount, small_disk


@dataclass
class Outcome:
    """What became of the runs under one fault.

    Attributes:
        fault: What was done to them.
        tried: How often.
        lost: What went wrong, a sentence a trial; nothing should.
        message: What a user is told, or what was seen.
    """

    fault: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    message: str = ""

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.lost.append(otherwise)

    def check_result(self, result: Result, status: int, *words: str) -> None:
        """The exit status, every one of the words in what was said, and no traceback."""
        told = result.status == status and all(word in result.shown for word in words)
        self.check(told and "Traceback" not in result.shown, f"{result.status}: {result.shown}")
        self.message = shortened(result) or self.message


def shortened(result: Result) -> str:
    """The errors, without the folders that their paths lie in."""
    text = " ".join(line.removeprefix("error: ") for line in result.errors)
    return re.sub(r"/\S*/(?=[^/\s]+/[^/\s]+\b)", "", text)


def killed(trials: Trials, fault: str, times: int, kill: Callable[[Path], bool]) -> Outcome:
    """Kills `times` runs, each in a new folder, and starts them again until their end."""
    outcome, seen = Outcome(fault), Counter()
    while outcome.tried < times:
        root = trials.root()
        if not kill(root):
            continue  # it was over before
        outcome.tried += 1
        run = root / NAME
        seen["with a checkpoint"] += (run / "last.ckpt").exists()
        seen["with half a file"] += any(run.glob(".tmp-*"))
        again = trials.again(root).end()
        over = "steps already" in again.shown
        seen["after the last step"] += over
        outcome.check(again.status == 0 or over, again.shown)
        if difference := trials.differs(run):
            outcome.lost.append(difference)
        outcome.check(not any(run.glob(".*")), f"something temporary in {run}")
    outcome.message = "killed " + ", ".join(f"{count} {what}" for what, count in seen.items())
    return outcome


def killed_while_training(trials: Trials, times: int) -> Outcome:
    def kill(root: Path) -> bool:
        return trials.kill_within(trials.start(root), trials.seconds["whole"])

    return killed(trials, "kill -9 at any moment of a run", times, kill)


def killed_while_saving(trials: Trials, times: int) -> Outcome:
    def kill(root: Path) -> bool:
        start = trials.start(root)
        saves = 2 * STEPS // INTERVAL  # best.ckpt improves every time here, and last.ckpt
        for _ in range(trials.random.randint(1, saves)):
            start.saves.recv()
        return trials.kill_within(start, trials.seconds["save"])

    return killed(trials, "kill -9 while a checkpoint is written", times, kill)


def killed_while_caching(trials: Trials, times: int) -> Outcome:
    def kill(root: Path) -> bool:
        start = trials.start(root, "--data.cache_dir", str(root / "cache"))
        return trials.kill_within(start, trials.seconds["caching"])

    outcome = killed(trials, "kill -9 while the text is tokenised", times, kill)
    outcome.message = "tokenised again"
    return outcome


def full_disk(trials: Trials, times: int) -> Outcome:
    """On a real full disk where file systems can be mounted, else by a limit on files' sizes."""
    outcome = Outcome("disk full")
    size = (trials.reference / "last.ckpt").stat().st_size
    while outcome.tried < times:
        at = trials.root() / "disk"
        room = trials.random.uniform(1.1, 3.5)  # of checkpoints: two and a temporary one, and more
        with small_disk(at, int(room * size), trials.may_mount) as mounted:
            if mounted:
                result = trials.start(at).end()
                if result.status == 0:
                    continue  # there was room enough
                told = "No space left on device"
            else:
                trials.start(at, *poison(INTERVAL + 2, "memory")).end()
                limit = trials.random.randint(size // 2, size - 1)
                result, told = trials.again(at, file_size=limit).end(), "File too large"
            outcome.tried += 1
            outcome.check_result(result, 2, told, "What was saved before is whole")
            if mounted:
                remount(at, "size=50m")
            again = trials.again(at).end()
            done = "steps already" in again.shown  # there was no room for the summary
            outcome.check(again.status == 0 or done, again.shown)
            if difference := trials.differs(at / NAME):
                outcome.lost.append(difference)
    return outcome


def read_only_folder(trials: Trials, times: int) -> Outcome:
    outcome = Outcome("run folder that cannot be written")
    for _ in range(times):
        outcome.tried += 2
        file = trials.root() / "file"
        file.write_text("not a folder")
        for root in (file / "runs", Path("/proc/runs")):
            fresh = str(trials.root() / "cache")
            result = trials.start(root, "--data.cache_dir", fresh).end()
            outcome.check_result(result, 2, "There cannot be a folder", str(root))
            outcome.check(not Path(fresh).exists(), "the text was tokenised first")
        at = trials.root() / "disk"
        with small_disk(at, 50 * 2**20, trials.may_mount) as mounted:
            if not mounted:
                continue
            outcome.tried += 2
            trials.start(at, "--trainer.max_steps", "4").end()
            remount(at, "ro")
            for result in (trials.start(at).end(), trials.again(at).end()):
                outcome.check_result(result, 2, "Read-only file system", str(at))
    return outcome


def damaged_checkpoint(trials: Trials, times: int) -> Outcome:
    """Cut short, or with a few wrong bytes."""
    outcome = Outcome("checkpoint cut short or damaged")
    for cut in [True, False] * times:
        outcome.tried += 1
        root = trials.root()
        stopped = trials.start(root, "--trainer.max_steps", "8").end()
        outcome.check(stopped.status == 0, stopped.shown)
        whole = Path(shutil.copytree(root, trials.root(), dirs_exist_ok=True))
        path = root / NAME / "last.ckpt"
        content = path.read_bytes()
        place = trials.random.randrange(len(content) - 16)
        damaged = content[:place] + (b"" if cut else bytes(255 - b for b in content[place:][:16]))
        path.write_bytes(damaged if cut else damaged + content[place + 16 :])
        result = trials.again(root).end()
        if not cut and result.status == 0:  # between the parts of the archive nothing is read
            trials.again(whole).end()
            outcome.check(trials.differs(root / NAME, whole / NAME) is None, "another loss")
            continue
        best = root / NAME / "best.ckpt"
        outcome.check_result(result, 2, str(path), f"--ckpt_path {best}")
        other = trials.start(root, "--ckpt_path", str(best), "--name", "other").end()
        outcome.check(other.status == 0, other.shown)
    return outcome


def foreign_code(trials: Trials, times: int) -> Outcome:
    outcome = Outcome("checkpoint with code in it")
    for _ in range(times):
        outcome.tried += 1
        root = trials.root()
        path, proof = root / "x.ckpt", root / "the code ran"
        checkpoint = torch.load(trials.reference / "last.ckpt", weights_only=True)
        torch.save(checkpoint | {"extra": _Touches(proof)}, path)
        result = trials.start(root, "--ckpt_path", str(path)).end()
        outcome.check_result(result, 2, str(path), "could run code")
        outcome.check(not proof.exists(), "the code ran")
    return outcome


class _Touches:
    """When unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def same_second(trials: Trials, times: int) -> Outcome:
    outcome = Outcome("two runs at once: new ones, and twice the same one resumed")
    for _ in range(times):
        outcome.tried += 2
        root = trials.root()
        for result in [start.end() for start in [trials.start(root) for _ in range(2)]]:
            outcome.check(result.status == 0, result.shown)
        for run in (root / NAME, root / f"{NAME}-2"):
            outcome.check(trials.differs(run) is None, f"{run} has another loss")
        more = ["--ckpt_path", "last", "--trainer.max_steps", str(4 * STEPS)]
        first = trials.start(root, *more)
        first.steps.recv()
        outcome.check_result(trials.start(root, *more).end(), 2, f"{NAME}-2 is in use")
        outcome.check(first.end().status == 0, "the first one was disturbed")
    return outcome


def signalled(trials: Trials, times: int, number: signal.Signals, twice: bool) -> Outcome:
    """A signal at a random moment of training; twice, a second one as soon as the step allows."""
    outcome = Outcome(f"{number.name} {'twice' if twice else 'once'}")
    while outcome.tried < times:
        root = trials.root()
        start = trials.start(root)
        start.steps.recv()
        start.process.join(trials.random.uniform(0, trials.seconds["training"]))
        start.send(number)
        if twice:
            start.send(number)
        result = start.end()
        if "Written to" in result.shown and f"{number.name}: finishing" not in result.shown:
            continue  # it was over before
        outcome.tried += 1
        if result.status == 0:
            continue  # it came while the summary was written
        outcome.check_result(result, 128 + number, f"{number.name}: finishing")
        outcome.check(twice or "Written to" in result.shown, f"no report: {result.shown}")
        again = trials.again(root).end()
        done = "steps already" in again.shown  # the signal came in the last step
        outcome.check(again.status == 0 or done, again.shown)
        if difference := trials.differs(root / NAME):
            outcome.lost.append(difference)
    outcome.message = f"exit {128 + number}; " + (
        "stops within the step and reports" if twice else "finishes the step, saves and reports"
    )
    return outcome


def not_finite(trials: Trials, times: int) -> Outcome:
    outcome = Outcome("loss or gradient that is not finite")
    for part in ("output", "gradient", "weight") * times:
        outcome.tried += 1
        root, step = trials.root(), trials.random.randint(INTERVAL + 1, STEPS)
        result = trials.start(root, *poison(step, part)).end()
        outcome.check_result(result, 1, f"Step {step} ", f"the {part} ", "blocks.0.mlp")
        again = trials.again(root).end()
        outcome.check(again.status == 0, again.shown)
        outcome.check(trials.differs(root / NAME) is None, "another loss after it")
    return outcome


class Poison(Callback):
    """Spoils a part of the MLP from step `step` on, or has memory run out in it."""

    def __init__(self, step: int, part: str) -> None:
        self.step, self.part = step, part

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step != self.step - 1:
            return
        mlp = pl_module.gpt.blocks[0].mlp
        if self.part == "output":
            mlp.register_forward_hook(lambda module, inputs, output: output / 0)
        elif self.part == "gradient":
            mlp.down.weight.register_hook(lambda gradient: gradient * float("nan"))
        elif self.part == "weight":
            with torch.no_grad():
                mlp.up.weight[0, 0] = float("inf")
        else:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def poison(step: int, part: str) -> list[str]:
    callback = {"class_path": f"{__name__}.Poison", "init_args": {"step": step, "part": part}}
    return ["--trainer.callbacks", json.dumps([callback])]


def out_of_memory(trials: Trials, times: int) -> Outcome:
    """PyTorch's error for a GPU, raised; and a CPU's memory that does run out."""
    outcome = Outcome("out of memory")
    large = ["--model.n_embd", "512", "--data.batch_size", "200"]
    for flags, memory, status in (
        (["--model.n_embd", "1000000", "--model.n_layer", "1000"], None, 1),
        (large, 2**28, 1),
        (poison(7, "memory"), None, 1),
    ) * times:
        outcome.tried += 1
        result = trials.start(trials.root(), *flags, memory=memory).end()
        outcome.check_result(result, status, "emory ran out")
    return outcome


def changed_settings(trials: Trials, times: int) -> Outcome:
    outcome = Outcome("other settings for a run that is resumed")
    for _ in range(times):
        root = trials.root()
        trials.start(root, "--trainer.max_steps", "7", *poison(6, "memory")).end()
        for flags, words in (
            (["--model.n_embd", "64"], ["n_embd 32", "64 is asked for"]),
            (["--data.tokenizer", "gpt2"], ["vocab_size 257", "tokenizer bytes"]),
            (["--trainer.max_steps", "4"], ["4 steps already", "--trainer.max_steps"]),
            (
                ["--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "6"],
                ["4 micro-batches", "trainer.accumulate_grad_batches"],
            ),
        ):
            outcome.tried += 1
            outcome.check_result(trials.again(root, *flags).end(), 2, *words)
        outcome.tried += 1
        result = trials.again(root, "--model.lr", "0.5", "--data.batch_size", "2").end()
        told = ["model.lr 0.5 instead of 0.01", "data.batch_size 2 instead of 4"]
        outcome.check_result(result, 0, *told)
        rows = read_metrics(root / NAME / "metrics.csv")
        outcome.check(rows[4]["lr"] <= 0.01 < 0.1 < rows[5]["lr"], "the old learning rate")
    outcome.message = "changes are listed and take effect; what cannot work is refused"
    return outcome
