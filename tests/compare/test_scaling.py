"""Several devices: figures of given samples, and two CPU processes that torchrun starts."""

import json
import subprocess

import pytest
import torch.distributed as dist
import yaml

from compare import scaling
from compare.speed import Plan
from kernels import Norm, reference
from tests.running import python

PLAN = Plan(rounds=3, block_steps=1, warmup_steps=1, processes=1)


def test_summary_of_known_samples(settings):
    def times(*rounds: float) -> dict:
        return {"eager": [[ms] for ms in rounds], "aten": [[ms / 2] for ms in rounds]}

    ranks = [times(11, 11, 11), times(12, 12.5, 13), times(12, 12, 12)]
    found = scaling.summary(settings, PLAN, "ddp", times(10, 10, 10), ranks)
    assert (found["strategy"], found["devices"], found["batch_per_device"]) == ("ddp", 3, 4)
    eager = found["variants"]["eager"]
    assert eager["rank_ms"] == [11, 12.5, 12]
    assert (eager["slowest_rank"], eager["step_ms"]) == (1, 12.5)
    assert eager["one"] == {"step_ms": 10, "tokens_per_s": pytest.approx(4 * 16 / 0.010)}
    assert eager["tokens_per_s"] == pytest.approx(3 * 4 * 16 / 0.0125)
    assert eager["efficiency"]["median"] == pytest.approx(
        eager["tokens_per_s"] / (3 * eager["one"]["tokens_per_s"])
    )
    assert eager["efficiency"]["low"] == pytest.approx(10 / 13)
    assert eager["efficiency"]["high"] == pytest.approx(10 / 12)
    assert found["variants"]["aten"]["step_ms"] == 6.25


def test_a_step_is_the_median_of_the_blocks_medians(settings):
    blocks = {norm: [[1, 2, 30], [4, 4, 4], [5, 5, 6]] for norm in ("eager", "aten")}
    found = scaling.summary(settings, PLAN, "fsdp", blocks, [blocks, blocks])
    assert found["variants"]["eager"]["step_ms"] == 4
    assert found["variants"]["eager"]["rank_steps_ms"] == [blocks["eager"]] * 2


@pytest.fixture
def compare(config, tmp_path):
    """Runs a comparison's scaling in two processes; returns how that ended."""
    path = tmp_path / "small.yaml"
    settings = {"model": config["model"], "data": config["data"]}
    path.write_text(yaml.safe_dump(settings | {"trainer": {"accelerator": "cpu", "max_steps": 9}}))

    def call(*flags: str) -> subprocess.CompletedProcess:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        root = ["--trainer.default_root_dir", str(tmp_path)]
        return python(*torchrun, "-m", "compare", "scaling", "--config", str(path), *root, *flags)

    return call


def test_two_processes_and_the_first_alone_writes(compare, tmp_path):
    """Both strategies; the figures of a second command join those of the first."""
    for strategy in ("ddp,fsdp", "ddp"):
        done = compare("--strategy", strategy, "--norms", "eager,aten", "--rounds", "2")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Written to") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"small.yaml", "compare-small"}
    result = json.loads((tmp_path / "compare-small" / "results.json").read_text())
    assert list(result["scaling"]) == ["ddp-2", "fsdp-2"]
    assert result["missing"] == []
    assert all(
        line.startswith("torchrun --nproc-per-node=2 -m compare scaling")
        for line in result["command"].splitlines()
    )
    for found in result["scaling"].values():
        for norm in ("eager", "aten"):
            variant = found["variants"][norm]
            by_rank = variant["rank_steps_ms"]
            assert len(by_rank) == len(variant["rank_ms"]) == 2
            assert by_rank[0] != by_rank[1]  # each has timed its own steps
            assert all(len(rounds) == 2 for rounds in (*by_rank, variant["one_steps_ms"]))
    report = (tmp_path / "compare-small" / "report.md").read_text()
    assert "### 2 devices, ddp" in report
    assert "### 2 devices, fsdp" in report


def add_but_not_on_rank_1(*arguments, **options):
    if dist.is_initialized() and dist.get_rank() == 1:
        raise RuntimeError("rank 1 is at its end")
    return reference.add_rms_norm(*arguments, **options)


failing = Norm("failing", reference.rms_norm, add_but_not_on_rank_1)


def test_a_rank_that_fails_ends_all_with_its_message(compare, tmp_path):
    done = compare("--norms", f"eager,{__name__}:failing", "--rounds", "2")
    assert done.returncode != 0
    assert "RuntimeError: rank 1 is at its end" in done.stderr
    assert "Written to" not in done.stdout
