"""train.py on two devices, here two CPU processes: the same run, whatever their number."""

# ruff: noqa: F811 - the fixtures of test_train are arguments here

import json
import math
import subprocess
import threading

import pytest
import torch
from lightning import Callback

from tests.running import needs_interpreter, python
from tests.test_train import config, interrupt, losses, run  # noqa: F401

DDP = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
FSDP2 = [
    "--trainer.devices=2",
    "--trainer.strategy=ModelParallelStrategy",
    "--trainer.strategy.data_parallel_size=2",
    "--trainer.strategy.tensor_parallel_size=1",
    "--trainer.strategy.save_distributed_checkpoint=false",
]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
# What the processes sum is the same, in another order: some 10 sums of up to 64 float32 terms
# depend on each other in a step, each off by a random walk of 8 roundings, and 12 steps add theirs
# up. The losses are about 6.
TOLERANCE = {"rel": 0, "abs": 6 * 12 * 10 * math.sqrt(64) * torch.finfo(torch.float32).eps}
WHOLE = ["--data.batch_size", "4", "--model.grad_clip", "0.5", "--name", "whole"]
HALF = ["--data.batch_size", "2", "--model.grad_clip", "0.5"]  # of the batch, for each device


@pytest.fixture
def processes(config, tmp_path):
    """Runs train.py with that config in processes of its own; returns how that ended."""

    def call(*flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        root = ["--trainer.default_root_dir", str(tmp_path)]
        words = [*launcher, "train.py", "--config", str(config), *root, *flags]
        return python(*words, TRITON_INTERPRET="1")

    return call


def test_two_processes_train_as_one_and_the_first_alone_writes(run, processes, tmp_path):
    assert run(*WHOLE) == 0
    done = processes(*HALF, *DDP, "--name", "two")
    assert done.returncode == 0, done.stderr
    whole, two = tmp_path / "whole", tmp_path / "two"
    for key in ("loss", "val_loss", "grad_norm"):
        assert losses(two, key) == pytest.approx(losses(whole, key), **TOLERANCE)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "two"}
    assert len(list(two.glob("events.*"))) == 1
    assert done.stdout.count("Written to") == 1
    summary = json.loads((two / "summary.json").read_text())
    assert summary["tokens_per_step"] == 4 * 16


@needs_interpreter
def test_a_run_goes_from_one_device_to_two_that_share_it_and_back(run, processes, tmp_path, capsys):
    """FSDP2 under torchrun: weights, optimizer and data go on where they were."""
    assert run(*WHOLE) == 0
    assert run(*WHOLE[:-1], "parts", *interrupt(4)) == 130
    resume = ["--name", "parts", "--ckpt_path", "last"]
    done = processes(*HALF, *FSDP2, "--norm", "triton", *resume, *interrupt(8), launcher=TORCHRUN)
    assert "Written to" in done.stdout, done.stderr
    checkpoint = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 8
    assert run(*WHOLE[:-2], *resume) == 0
    changed = "trainer.strategy auto instead of lightning.pytorch.strategies.ModelParallelStrategy"
    assert changed in capsys.readouterr().out
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for key in ("loss", "grad_norm"):
        assert losses(parts, key) == pytest.approx(losses(whole, key), **TOLERANCE)


class FailOnRank(Callback):
    """Raises on rank `rank` in step 4, while the others wait for it without an end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 3:
            if trainer.global_rank == self.rank:
                raise RuntimeError(f"rank {self.rank} is at its end")
            threading.Event().wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_all_with_its_message(processes, rank):
    callback = {"class_path": f"{__name__}.FailOnRank", "init_args": {"rank": rank}}
    done = processes(*HALF, *DDP, "--trainer.callbacks", json.dumps([callback]))
    assert done.returncode != 0
    assert f"RuntimeError: rank {rank} is at its end" in done.stderr


def test_graphs_and_shards(run, capsys):
    assert run(*FSDP2, "--model.compile", "reduce-overhead") == 2
    assert "which ModelParallelStrategy gathers anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        FSDP2[:2],
        FSDP2[:-1],
        [*FSDP2[:2], FSDP2[2], "--trainer.strategy.tensor_parallel_size=2", FSDP2[4]],
    ],
)
def test_shards_over_all_devices_and_whole_checkpoints_only(run, capsys, flags):
    assert run(*flags) == 2
    shown = capsys.readouterr().err
    assert "--trainer.strategy.data_parallel_size 2" in shown
    assert "--trainer.strategy.save_distributed_checkpoint false" in shown


LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},
    "srun": {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_that_would_each_train_by_itself_are_refused(
    run, tmp_path, capsys, monkeypatch, launcher
):
    """They would write where an older run of the name has its checkpoints."""
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    assert run("--name", "old") == 2
    shown = capsys.readouterr().err
    assert f"{launcher} has started 2 processes, but trainer.devices is 1" in shown
    assert not (tmp_path / "old").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert run("--name", "old", "--trainer.max_steps", "0") == 2
    assert "processes" not in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_processes_whose_results_stay_with_them_are_refused(run, capsys, strategy):
    assert run("--trainer.devices", "2", "--trainer.strategy", strategy) == 2
    assert "from which no results come back: use ddp" in capsys.readouterr().err
