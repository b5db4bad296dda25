"""train.py end to end: what a run leaves behind, resuming, Ctrl-C, and what bad input gets."""

import json
import os
import signal
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import pytest
import torch
import yaml
from lightning import Callback

import train
from data import TextDataModule
from kernels import Norm
from model import GPT
from model.loggers import MetricsFile, read_metrics

ROOT = Path(train.__file__).parent


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """Settings of a model so small that a step takes milliseconds, on a text of its own."""
    folder = tmp_path_factory.mktemp("config")
    text = folder / "text.jsonl"
    lines = (f"The {i}th line tells of {i * i} sheep and {i % 7} goats." for i in range(80))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    settings = {
        "norm": "eager",
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "warmup_steps": 2},
        "data": {
            "source": str(text),
            "tokenizer": "bytes",
            "context": 16,
            "batch_size": 2,
            "val_batches": 2,
            "cache_dir": str(folder / "cache"),
            "num_proc": 1,
        },
        "trainer": {
            "max_steps": 12,
            "val_check_interval": 4,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
        },
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(settings))
    TextDataModule(**settings["data"]).prepare_data()  # whichever test comes first is quiet then
    return path


@pytest.fixture
def run(config, tmp_path):
    """Calls train.py in this process with that config and runs in tmp_path."""

    def call(*flags: str) -> int:
        root = ["--trainer.default_root_dir", str(tmp_path)]
        return train.main(["--config", str(config), *root, *flags])

    return call


def losses(folder: Path, key: str = "loss") -> dict[int, float]:
    rows = read_metrics(folder / "metrics.csv")
    return {step: row[key] for step, row in rows.items() if key in row}


class InterruptAfter(Callback):
    """Sends a signal, Ctrl-C's if not another, while step `step` is running, `times` times."""

    def __init__(self, step: int, times: int = 1, number: int = signal.SIGINT) -> None:
        self.step, self.times, self.number = step, times, number

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == self.step - 1:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def interrupt(step: int, times: int = 1, number: int = signal.SIGINT) -> list[str]:
    arguments = {"step": step, "times": times, "number": int(number)}
    callback = {"class_path": f"{__name__}.InterruptAfter", "init_args": arguments}
    return ["--trainer.callbacks", json.dumps([callback])]


class SpoilWeight(Callback):
    """Makes a weight infinite, or so large that every loss is, in the step before a validation."""

    def __init__(self, value: str) -> None:
        self.value = value

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 8:
            with torch.no_grad():
                pl_module.gpt.blocks[0].mlp.up.weight.fill_(float(self.value))


@pytest.mark.parametrize(
    ("value", "validate", "says"),
    [
        ("3e38", True, "The validation after step 8 has a loss of inf"),
        ("inf", False, "After step 8 not all weights are finite, blocks.0.mlp.up.weight for"),
    ],
)
def test_no_checkpoint_is_saved_of_weights_gone_bad(run, tmp_path, capsys, value, validate, says):
    callbacks = [{"class_path": f"{__name__}.SpoilWeight", "init_args": {"value": value}}]
    if not validate:  # a signal saves before it validates
        callbacks += json.loads(interrupt(8)[1])
    assert run("--trainer.callbacks", json.dumps(callbacks)) == 1
    assert says in capsys.readouterr().err
    for name in ("last", "best"):
        saved = torch.load(tmp_path / "small-eager" / f"{name}.ckpt", weights_only=True)
        assert saved["global_step"] == 4
        assert all(tensor.isfinite().all() for tensor in saved["state_dict"].values())


def test_a_run_leaves_everything_that_is_promised(run, tmp_path, capsys):
    assert run() == 0
    folder = tmp_path / "small-eager"
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "best.ckpt",
        "config.yaml",
        "last.ckpt",
        "loss.png",
        "metrics.csv",
        "summary.json",
    }
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert not any(name.startswith(".") for name in names)  # nothing temporary

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 12
    assert len(summary["step_ms_samples"]) == 12
    assert summary["tokens_per_step"] == 2 * 16
    assert summary["train_loss"] < summary["first_train_loss"]
    assert summary["mfu"] is None
    assert not summary["interrupted"]
    assert summary["environment"]["gpu"] == "n/a" or torch.cuda.is_available()
    assert set(losses(folder)) == set(range(1, 13))
    assert set(losses(folder, "val_loss")) == {4, 8, 12}
    shown = capsys.readouterr().out
    assert f"{summary['val_loss']:.4f}" in shown
    assert "say nothing about the kernel" in shown
    assert "With a GPU the same command" in shown


def test_a_second_run_of_the_same_name_gets_a_directory_of_its_own(run, tmp_path):
    assert run("--trainer.max_steps", "2") == 0
    before = (tmp_path / "small-eager" / "summary.json").read_bytes()
    assert run("--trainer.max_steps", "2") == 0
    assert (tmp_path / "small-eager-2" / "summary.json").exists()
    assert (tmp_path / "small-eager" / "summary.json").read_bytes() == before


def test_what_lightning_would_write_elsewhere_is_in_the_run(run, tmp_path):
    callbacks = ["--trainer.callbacks", "ModelCheckpoint"]
    assert run("--trainer.max_steps", "2", "--trainer.profiler", "simple", *callbacks) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"small-eager"}
    assert "run_training_batch" in (tmp_path / "small-eager" / "fit-profile.txt").read_text()
    assert len(list((tmp_path / "small-eager").glob("epoch*.ckpt"))) == 1


def test_a_run_that_ends_early_says_so(run, capsys):
    ends = "by a callback or another limit than trainer.max_steps"
    assert run("--trainer.max_steps", "4") == 0
    assert ends not in capsys.readouterr().out
    stopping = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val_loss"]
    stopping += ["--trainer.callbacks.patience", "1", "--trainer.callbacks.min_delta", "100"]
    assert run("--trainer.val_check_interval", "2", *stopping) == 0
    assert f"Ended after step 4 of 12, {ends}" in capsys.readouterr().out


def test_a_callback_that_does_not_suit(run, capsys):
    assert run("--trainer.callbacks", "RichProgressBar") == 2
    assert "multiple progress bar callbacks" in capsys.readouterr().err
    averaging = ["--trainer.callbacks", "StochasticWeightAveraging"]
    assert run(*averaging, "--trainer.callbacks.swa_lrs", "1") == 2
    assert "max_epochs" in capsys.readouterr().err


def test_a_printed_config_prints_itself(tmp_path, capsys):
    """With the default config too, whose choice is announced beside it."""
    with pytest.raises(SystemExit):
        train.main(["--print_config"])
    printed = capsys.readouterr().out
    config = tmp_path / "printed.yaml"
    config.write_text(printed)
    with pytest.raises(SystemExit):
        train.main(["--config", str(config), "--print_config"])
    assert capsys.readouterr().out == printed
    assert yaml.safe_load(printed)["norm"] == "triton"


def test_the_resolved_config_starts_the_same_run_again(run, tmp_path):
    assert run("--model.lr", "0.01") == 0
    first = tmp_path / "small-eager"
    assert train.main(["--config", str(first / "config.yaml")]) == 0
    assert losses(tmp_path / "small-eager-2") == losses(first)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_resuming_twice_gives_the_losses_of_the_uninterrupted_run(run, tmp_path, micro_batches):
    accumulate = ["--trainer.accumulate_grad_batches", str(micro_batches)]
    assert run("--name", "whole", *accumulate) == 0
    assert run("--name", "parts", *accumulate, *interrupt(5)) == 130
    resume = ["--name", "parts", "--ckpt_path", "last", *accumulate]
    assert run(*resume, *interrupt(8)) == 130  # where a validation is due anyway
    assert run(*resume) == 0

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert losses(parts) == losses(whole)  # bit for bit: the CSV holds every digit
    validation = losses(parts, "val_loss")
    assert {s: validation[s] for s in losses(whole, "val_loss")} == losses(whole, "val_loss")
    a, b = (torch.load(f / "last.ckpt", weights_only=True)["state_dict"] for f in (whole, parts))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_accumulation_reports_the_losses_of_the_larger_batch(run, tmp_path):
    settings = ["--trainer.max_steps", "4", "--trainer.limit_val_batches", "0", "--data.batch_size"]
    assert run("--name", "whole", *settings, "4") == 0
    assert run("--name", "parts", *settings, "2", "--trainer.accumulate_grad_batches", "2") == 0
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert parts == pytest.approx(whole, rel=1e-5)  # float32 sums in another order


def test_checkpoints_go_from_a_compiled_model_to_an_eager_one_and_back_twice(
    run, tmp_path, monkeypatch
):
    """With plain names. Dynamo's graphs are run as they are, with the same bits as the model."""
    monkeypatch.setattr(GPT, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    settings = ["--trainer.limit_val_batches", "0", "--model.compile"]
    assert run("--name", "whole", *settings, "false") == 0
    for step in (2, 4, 6, 8, 12):
        resume = ["--ckpt_path", "last"] if step > 2 else []
        compiled = "true" if step in (2, 6, 12) else "false"
        run("--name", "parts", *settings, compiled, *resume, *interrupt(step))
        names = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=True)["state_dict"]
        assert not any("_orig_mod" in name for name in names)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_resuming_without_a_config_uses_the_one_of_the_run(run, tmp_path, capsys):
    assert run("--name", "mine", "--model.n_embd", "24", "--trainer.max_steps", "2") == 0
    flags = ["--name", "mine", "--ckpt_path", "last", "--trainer.max_steps", "3"]
    assert train.main([*flags, "--trainer.default_root_dir", str(tmp_path)]) == 0
    assert set(losses(tmp_path / "mine")) == {1, 2, 3}
    assert "configs/tiny.yaml" not in capsys.readouterr().err


def test_last_is_the_newest_run_that_began_under_this_name(run, tmp_path):
    assert run("--name", "mine", "--trainer.max_steps", "1") == 0
    assert run("--name", "mine-2", "--trainer.max_steps", "2") == 0  # another name
    (tmp_path / "mine-3").mkdir()  # left by a Ctrl-C before anything was written
    assert run("--name", "mine", "--ckpt_path", "last", "--trainer.max_steps", "3") == 0
    assert set(losses(tmp_path / "mine")) == {1, 2, 3}
    assert set(losses(tmp_path / "mine-2")) == {1, 2}


@pytest.mark.parametrize("damage", [lambda file: file.write_text("model: ["), Path.unlink])
def test_last_is_no_older_run_where_the_newest_has_no_name(run, tmp_path, capsys, damage):
    for _ in range(2):
        assert run("--name", "mine", "--trainer.max_steps", "1") == 0
    damage(tmp_path / "mine-2" / "config.yaml")
    assert run("--name", "mine", "--ckpt_path", "last", "--trainer.max_steps", "3") == 2
    told = capsys.readouterr().err
    assert "mine-2/config.yaml cannot be read" in told
    assert f"--ckpt_path {tmp_path / 'mine-2'}/" in told
    assert set(losses(tmp_path / "mine")) == {1}


class Spoil(Callback):
    """Makes the MLP's gradient infinite, in step `step` alone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        spoilt = trainer.global_step == self.step - 1
        pl_module.gpt.blocks[0].mlp.up.weight.register_hook(
            lambda gradient: gradient / 0 if spoilt else gradient
        )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_is_not_finite_is_found_later_and_changes_nothing(
    run, tmp_path, capsys, micro_batches
):
    spoil = {"class_path": f"{__name__}.Spoil", "init_args": {"step": 6}}
    flags = ["--trainer.log_every_n_steps", "5", "--trainer.val_check_interval", "8"]
    flags += ["--trainer.accumulate_grad_batches", str(micro_batches)]
    assert run("--name", "whole", *flags) == 0
    assert run("--name", "parts", *flags, "--trainer.callbacks", json.dumps([spoil])) == 1
    shown = capsys.readouterr().err
    assert "Step 6 has a loss of 4." in shown or "Step 6 has a loss of 5." in shown
    assert "a gradient of norm inf" in shown or "a gradient of norm nan" in shown
    assert set(losses(tmp_path / "parts")) == {1, 5}
    if micro_batches == 2:  # a validation, and with it a checkpoint, came before
        assert run("--name", "parts", *flags, "--ckpt_path", "last") == 0
        assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


class FailAfter(Callback):
    """Raises before step `step` + 1."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("this is the end")


def test_no_row_before_the_last_checkpoint_is_lost_by_kill_9(run, tmp_path, monkeypatch):
    fail = {"class_path": f"{__name__}.FailAfter", "init_args": {"step": 5}}
    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "finalize", lambda *_: None)  # kill -9 leaves no time for it
        with pytest.raises(RuntimeError, match="the end"):
            run("--trainer.callbacks", json.dumps([fail]))
    assert run("--ckpt_path", "last") == 0
    assert set(losses(tmp_path / "small-eager")) == set(range(1, 13))


def test_a_checkpoint_given_by_its_path_starts_a_new_run(run, tmp_path):
    assert run("--name", "first", "--trainer.max_steps", "4") == 0
    checkpoint = tmp_path / "first" / "best.ckpt"
    assert run("--name", "second", "--ckpt_path", str(checkpoint)) == 0
    assert set(losses(tmp_path / "second")) == set(range(5, 13))
    assert (tmp_path / "second" / "best.ckpt").exists()


def test_the_first_and_the_last_step_are_logged_whatever_the_interval(run, tmp_path):
    assert run("--trainer.log_every_n_steps", "5", *interrupt(8)) == 130
    assert set(losses(tmp_path / "small-eager")) == {1, 5, 8}


def test_ctrl_c_twice_stops_at_once_and_still_summarises(run, tmp_path):
    assert run(*interrupt(3, times=2)) == 130
    summary = json.loads((tmp_path / "small-eager" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["interrupted"]
    assert set(losses(tmp_path / "small-eager")) == {1, 2}


def test_sigterm_ends_a_run_in_good_order(run, tmp_path):
    assert run("--name", "whole") == 0
    assert run("--name", "parts", *interrupt(5, number=signal.SIGTERM)) == 143
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["steps"] == 5
    checkpoint = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 5
    assert run("--name", "parts", "--ckpt_path", "last") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_sigterm_twice_stops_at_once(run, tmp_path):
    assert run(*interrupt(3, times=2, number=signal.SIGTERM)) == 143
    assert set(losses(tmp_path / "small-eager")) == {1, 2}


def test_ctrl_c_at_a_terminal(config, tmp_path):
    """The signal from outside, to a process of its own, as the terminal sends it."""
    command = [sys.executable, "train.py", "--config", str(config), "--trainer.max_steps", "100000"]
    process = subprocess.Popen(
        [*command, "--trainer.default_root_dir", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "validation perplexity" in rest
    folder = tmp_path / "small-eager"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] is not None
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == summary["steps"]


def test_without_a_validation_there_is_still_a_checkpoint_to_resume(run, tmp_path):
    no_validation = ["--trainer.limit_val_batches", "0"]
    assert run("--name", "whole", *no_validation) == 0
    assert run("--name", "parts", *no_validation, *interrupt(5)) == 130
    assert run("--name", "parts", *no_validation, "--ckpt_path", "last") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_the_step_that_is_looked_at_again_is_counted_over_epochs(run, monkeypatch):
    looked_at, train_batch = [], TextDataModule.train_batch

    def record(data, step, *place):
        looked_at.append(step)
        return train_batch(data, step, *place)

    monkeypatch.setattr(TextDataModule, "train_batch", record)
    spoil = {"class_path": f"{__name__}.Spoil", "init_args": {"step": 6}}
    epochs = ["--trainer.limit_train_batches", "4", "--trainer.accumulate_grad_batches", "2"]
    assert run(*epochs, "--trainer.callbacks", json.dumps([spoil])) == 1
    assert looked_at[-1] == 10  # the first micro-batch of step 6, of the second epoch


def one_dtype(x, residual, *_, out_dtype):
    if x.dtype != residual.dtype:
        raise ValueError("branch and stream differ")
    return x.to(out_dtype), x


RAISES = Norm("raises", lambda *_, **__: 1 / 0, lambda *_, **__: 1 / 0)
FLAT = Norm("flat", lambda x, *_, **__: x.flatten(), lambda x, r, *_, **__: (x, r))
ONE_DTYPE = Norm("one dtype", lambda x, *_, out_dtype: x.to(out_dtype), one_dtype)
BAD_INPUT = {
    "norm that cannot take a float32 stream": (
        ["--norm", f"{__name__}:ONE_DTYPE", "--trainer.precision", "bf16-mixed"],
        ["fails in a first call: ValueError: branch and stream differ"],
    ),
    "norm and head count": (
        ["--norm", "nosuch", "--model.n_head", "5"],
        ["'nosuch'", "eager, compiled, triton", "n_head is 5"],
    ),
    "odd head dimension": (["--model.n_embd", "10"], ["10 / 2 = 5", "even"]),
    "unknown flag and norm": (["--model.nosuch", "1", "--norm", "foo"], ["model.nosuch", "'foo'"]),
    "wrong type": (["--model.n_head", "two"], ["model.n_head", "two"]),
    "optimizer": (
        ["--model.lr", "-1", "--model.betas", "[0.9, 1.0]"],
        ["lr is -1", "betas is (0.9, 1.0)"],
    ),
    "float16 on a CPU": (["--trainer.precision", "16-mixed"], ["16-mixed, which is for GPUs"]),
    "recomputing what is compiled": (
        ["--model.compile", "true", "--model.norm_recompute", "true"],
        ["norm_recompute is for a model that is not compiled"],
    ),
    "recomputing what is not exact": (
        ["--norm", "compiled", "--model.norm_recompute", "true", "--model.lr", "-1"],
        ["norm_recompute is not for norm 'compiled'", "lr is -1"],
    ),
    "graphs of a CPU": (["--model.compile", "reduce-overhead"], ["CUDA graphs", "needs a GPU"]),
    "compile mode": (["--model.compile", "fastest"], ["model.compile", "reduce-overhead"]),
    "name": (["--name", "a/b"], ["'a/b'"]),
    "name above": (["--name", ".."], ["'..'"]),
    "size": (["--model.n_layer", "0"], ["n_layer is 0"]),
    "stream dtype": (["--model.stream_dtype", "float8"], ["'float8'", "float32 or bfloat16"]),
    "stream and precision": (
        ["--model.stream_dtype", "bfloat16"],
        ["32-true", "--trainer.precision bf16-mixed"],
    ),
    "clipping and no end": (
        ["--trainer.gradient_clip_val", "1", "--trainer.max_steps", "-1"],
        ["model.grad_clip", "max_steps has to be at least 1"],
    ),
    "validation within a step": (
        ["--trainer.accumulate_grad_batches", "3", "--trainer.log_every_n_steps", "0"],
        ["val_check_interval is 4", "steps of 3", "log_every_n_steps"],
    ),
    "trainer": (["--trainer.val_check_interval", "often"], ["val_check_interval"]),
    "source and tokenizer": (
        ["--data.source", "no/such/file.txt", "--data.tokenizer", "runes"],
        ["no/such/file.txt", "'runes'"],
    ),
    "context and norm": (["--data.context", "100000", "--norm", "nosuch"], ["100001", "'nosuch'"]),
    "mixture": (
        ["--data.source", "kjv=half,no/such.txt=1,kjv"],
        ["'kjv' is 'half'", "'no/such.txt'", "'kjv' has no weight"],
    ),
    "max_tokens": (["--data.max_tokens", "0"], ["max_tokens is 0"]),
    "several flags": (
        ["--model.n_layers", "3", "--trainer.max_step", "3", "--model.n_head", "two"],
        ["model.n_layers", "trainer.max_step ", "model.n_head"],
    ),
    "negative seed": (["--seed_everything", "-5"], ["seed_everything is -5", "4294967295"]),
    "large seed": (["--seed_everything", "99999999999"], ["seed_everything is 99999999999"]),
    "a root that is a file": (["--trainer.default_root_dir", __file__], [__file__]),
    "a root that cannot be": (["--trainer.default_root_dir", "/proc/nope"], ["/proc/nope"]),
    "no root": (["--trainer.default_root_dir", "null"], ["default_root_dir"]),
    "long name": (["--name", "n" * 300], ["too long"]),
    "no validation interval": (["--trainer.val_check_interval", "0"], ["val_check_interval is 0"]),
    "a part of endless data": (["--trainer.val_check_interval", "0.5"], ["val_check_interval"]),
    "accelerator": (["--trainer.accelerator", "tpu"], ["torch_xla"]),
    "nothing to train": (
        ["--trainer.max_epochs", "0", "--trainer.limit_train_batches", "0"],
        ["max_epochs is 0", "limit_train_batches is 0"],
    ),
    "overfitting": (["--trainer.overfit_batches", "2"], ["overfit_batches"]),
    "monitor": (
        [
            "--trainer.callbacks",
            '[{"class_path": "EarlyStopping", "init_args": {"monitor": "loss"}}]',
        ],
        ["'loss'", "val_loss"],
    ),
    "callback": (
        [
            "--trainer.callbacks",
            '[{"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss", "mode": "x"}}]',
        ],
        ["mode"],
    ),
    "a norm that raises": (["--norm", f"{__name__}:RAISES"], ["ZeroDivisionError", "by zero"]),
    "a norm of another shape": (["--norm", f"{__name__}:FLAT"], ["shape", "(2, 3, 16)"]),
    "a folder for a checkpoint": (["--ckpt_path", "."], ["is a folder"]),
    "no such run": (["--ckpt_path", "last", "--name", "never"], ["no run", "never"]),
    "empty flags": (["--ckpt_path", "", "--name", ""], ["--name is empty", "--ckpt_path is empty"]),
    "no such checkpoint": (["--ckpt_path", "no/such.ckpt"], ["no checkpoint no/such.ckpt"]),
    "no checkpoint": (["--ckpt_path", __file__], [f"{__file__} is not a checkpoint"]),
}


@pytest.mark.parametrize(("flags", "expected"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_answered_in_sentences(run, tmp_path, capsys, flags, expected):
    assert run(*flags) == 2
    shown = capsys.readouterr().err
    assert all(text in shown for text in expected), shown
    assert all(line.startswith("error: ") for line in shown.splitlines()), shown
    assert list(tmp_path.iterdir()) == []  # no directory of a run that never began


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  nlayer: 3\n", "nlayer"),
        ("modle:\n  n_layer: 3\n", "modle"),
        ("model: [\n", "config"),
        (None, "does not exist"),
        (b"\x80\xff", "config"),
        ("", "faulty.yaml is empty"),
        ("# nothing but this\n", "faulty.yaml is empty"),
        ("- norm\n", "faulty.yaml holds ['norm'], which are no settings"),
    ],
)
def test_a_config_with_a_fault(tmp_path, capsys, text, expected):
    path = tmp_path / "faulty.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert train.main(["--config", str(path)]) == 2
    assert expected in capsys.readouterr().err


def test_a_mixture_with_a_limit_trains_and_resumes(run, config, tmp_path):
    (tmp_path / "own.txt").write_text("A text of its own. " * 200)
    source = yaml.safe_load(config.read_text())["data"]["source"]
    flags = ["--data.source", f"{source}=1,{tmp_path / 'own.txt'}=2", "--data.max_tokens", "2000"]
    assert run("--name", "whole", *flags) == 0
    assert run("--name", "parts", *flags, *interrupt(5)) == 130
    assert run("--name", "parts", *flags, "--ckpt_path", "last") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_one_mistake_is_named_once(run, capsys):
    assert run("--data.context", "0") == 2
    assert capsys.readouterr().err.count("context is 0") == 1


def test_all_faults_of_a_config_and_of_flags_are_named(tmp_path, capsys):
    path = tmp_path / "faulty.yaml"
    path.write_text("model: {nlayer: 3, nhead: 2, n_embd: wide}\nmodle: {lr: 1}\n")
    assert train.main(["--config", str(path), "--data.contxt", "3"]) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("nlayer", "nhead", "n_embd", "modle", "contxt")), shown


@pytest.mark.parametrize(
    "missing", ["optimizer_states", "lr_schedulers", "loops", "hyper_parameters"]
)
def test_a_checkpoint_of_weights_alone(run, tmp_path, capsys, missing):
    assert run("--trainer.max_steps", "1") == 0
    path = tmp_path / "small-eager" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint[missing]
    torch.save(checkpoint, path)
    assert run("--ckpt_path", str(path)) == 2
    assert missing in capsys.readouterr().err


def test_a_checkpoint_that_only_looks_like_one(run, tmp_path, capsys):
    torch.save({"global_step": 3, "state_dict": 5}, tmp_path / "x.ckpt")
    assert run("--ckpt_path", str(tmp_path / "x.ckpt")) == 2
    assert "is not a checkpoint of train.py" in capsys.readouterr().err


def test_a_checkpoint_of_another_shape(run, tmp_path, capsys):
    assert run("--name", "narrow", "--trainer.max_steps", "1") == 0
    checkpoint = str(tmp_path / "narrow" / "last.ckpt")
    assert run("--ckpt_path", checkpoint, "--model.n_embd", "32", "--model.n_layer", "2") == 2
    shown = capsys.readouterr().err
    assert "n_embd 16, but 32" in shown
    assert "n_layer 1, but 2" in shown


def test_a_resumed_run_follows_the_new_learning_rate(run, tmp_path, capsys):
    assert run("--name", "whole", "--model.lr", "0.02") == 0
    assert run("--name", "parts", *interrupt(5)) == 130
    assert run("--name", "parts", "--ckpt_path", "last", "--model.lr", "0.02") == 0
    assert "model.lr 0.02 instead of 0.001" in capsys.readouterr().out
    parts, whole = (losses(tmp_path / name, "lr") for name in ("parts", "whole"))
    assert {step: parts[step] for step in range(6, 13)} == {s: whole[s] for s in range(6, 13)}
    assert parts[5] < whole[5]


@pytest.mark.parametrize(
    "content", [b"", b"a,b\n1,2\n", b"step,loss\n1,x\n", b"\xff\xfe\x00", None]
)
def test_resuming_keeps_the_curve_or_says_why_not(run, tmp_path, capsys, content):
    assert run("--name", "parts", *interrupt(5)) == 130
    metrics = tmp_path / "parts" / "metrics.csv"
    metrics.unlink()
    if content is None:
        metrics.mkdir()
    else:
        metrics.write_bytes(content)
    assert run("--name", "parts", "--ckpt_path", "last") == 2
    shown = capsys.readouterr().err
    assert str(metrics) in shown
    assert "Without that file, training goes on." in shown


def test_a_last_checkpoint_that_is_gone(run, tmp_path, capsys):
    assert run("--trainer.max_steps", "4") == 0
    (tmp_path / "small-eager" / "last.ckpt").unlink()
    assert run("--ckpt_path", "last") == 2
    shown = capsys.readouterr().err
    assert "last.ckpt, of the newest run of this name, is gone" in shown
    assert "best.ckpt, of step 4, is whole" in shown


def test_a_run_that_is_finished_is_not_resumed(run, capsys):
    assert run() == 0
    assert run("--ckpt_path", "last") == 2
    assert "12 steps already" in capsys.readouterr().err


def test_a_full_disk(run, tmp_path, capsys, monkeypatch):
    def full(checkpoint, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert run() == 2
    assert "No space left on device" in capsys.readouterr().err
    folder = tmp_path / "small-eager"
    assert not list(folder.glob("*.ckpt"))
    assert not list(folder.glob(".*"))
    assert set(losses(folder)) == {1, 2, 3, 4}  # what was measured is kept


def test_the_issue_command_as_a_user_types_it():
    """Exit code and stderr of a process: nothing prints a traceback on the way out."""
    command = [sys.executable, "train.py", "--norm", "nosuch", "--model.n_head", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "nosuch" in done.stderr
    assert "n_head is 5" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_help_has_a_sentence_for_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        train.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    options = [word for word in shown.split() if word.startswith(("--model.", "--data."))]
    assert {"--model.n_layer", "--data.source"} <= set(options)
    for option in set(options):
        after = shown.split(f"{option} ", 1)[1]
        words_before_type = after.split("(type:")[0].split()
        assert len(words_before_type) > 4, option
