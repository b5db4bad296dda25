"""The tables of README.md and docs/kernel.md are those of results/ and kernels/tuned/."""

import itertools
import json

import pytest

from tests.docs.blocks import ROOT

KERNEL, README = "docs/kernel.md", "README.md"
H200 = ROOT / "results/h200"


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table on a page whose header begins so, without header and rule."""
    text = (ROOT / page).read_text()
    lines = text[text.index(f"| {header}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("line", table(KERNEL, "rows x N"), ids=lambda line: f"{line[0]} {line[1]}")
def test_times_are_those_of_the_results(line):
    shape, name, bytes_a_feature, us, tb_s, fraction = line
    rows, n = map(int, shape.split(" x "))
    results = json.loads((H200 / "kernels.json").read_text())["rows"]
    [found] = [
        row
        for row in results
        if (row["rows"], row["n"], row["impl"]) == (rows, n, "triton")
        and row["group"] == ("add" if name.startswith("add") else "design")
        and row["pass"] == name.removeprefix("add ")
    ]
    assert found["bytes"] == rows * n * int(bytes_a_feature)
    assert us == f"{found['us']['p50']:.1f}"
    assert tb_s == f"{found['gb_s'] / 1000:.2f}"
    assert fraction == f"{found['fraction']:.2f}"


@pytest.mark.parametrize("line", table(KERNEL, "N, all bfloat16"), ids=lambda line: line[0])
def test_launches_are_those_of_the_table(line):
    n, forward, backward = line
    [launches] = json.loads((ROOT / "kernels/tuned/sm_90.json").read_text()).values()
    keys = ["rows", "warps"], ["rows", "warps", "programs_per_sm", "stages"]
    for direction, cell, shown in zip(
        ("forward", "backward"), (forward, backward), keys, strict=True
    ):
        launch = launches[f"{direction} {n} 16-bit 16-bit"]
        assert [int(number) for number in cell.split(", ")] == [launch[key] for key in shown]


@pytest.mark.parametrize("line", table(README, "run | ms a step"), ids=lambda line: line[0])
def test_runs_of_the_readme(line):
    found = json.loads((H200 / f"train/{line[0]}/summary.json").read_text())
    ms = found["step_ms"]
    assert line[1:] == [
        f"{ms['p50']:.1f} ({ms['p10']:.1f} to {ms['p90']:.1f})",
        f"{found['first_step_ms'] / 1000:.1f}",
        f"{found['tokens_per_s']:,.0f}",
        f"{found['mfu']:.1%}",
        f"{found['peak_allocated_gib']:.2f} / {found['peak_reserved_gib']:.2f}",
        f"{found['train_loss']:.3f}",
        f"{found['val_loss']:.3f}",
    ]


@pytest.mark.parametrize("line", table(README, "rows x N"), ids=lambda line: line[0])
def test_backward_passes_of_the_readme(line):
    rows, n = map(int, line[0].split(" x "))
    measured = {
        row["impl"]: row
        for row in json.loads((H200 / "kernels.json").read_text())["rows"]
        if (row["group"], row["pass"], row["rows"], row["n"]) == ("design", "backward", rows, n)
    }
    us = [measured[name]["us"]["p50"] for name in ("triton", "compiled", "quack", "liger", "aten")]
    assert line[1:] == [f"{figure:.1f}" for figure in (*us, measured["triton"]["ceiling_us"])]


def test_comparisons_of_the_readme():
    lines = iter(table(README, "model, stream"))
    for model, stream in itertools.product(("eager", "compiled"), ("bfloat16", "float32")):
        file = H200 / f"compare-{stream}-{model}" / "results.json"
        result = json.loads(file.read_text())
        for norm in ("eager", "compiled", "triton"):
            variant = result["speed"]["variants"][norm]
            speedup, memory = variant.get("speedup"), result.get("memory", {}).get(norm)
            assert next(lines) == [
                f"{model}, {stream}" if norm == "eager" else "",
                norm,
                f"{variant['step_ms']['p50']:.1f}",
                "{median:.3f} [{low:.3f}, {high:.3f}]".format(**speedup) if speedup else "",
                f"{result['profile'][norm]['norm_share']:.1%}",
                f"{memory['peak_allocated_gib']:.2f}" if memory else "",
            ]


def test_small_batches_of_the_readme():
    for scope, *shown in table(README, "model of 4 x 1024"):
        file = ROOT / f"results/h200-batch4/{scope}/results.json"
        variants = json.loads(file.read_text())["speed"]["variants"]
        triton = variants["triton"]
        assert [cell.replace("*", "") for cell in shown] == [
            *(
                f"{variants[norm]['step_ms']['p50']:.2f}"
                for norm in ("eager", "compiled", "triton")
            ),
            "{median:.3f} [{low:.3f}, {high:.3f}]".format(**triton["vs"]["compiled"]),
            f"{triton['busy']:.0%}",
        ]


def test_two_gpus_of_the_readme():
    lines = iter(table(README, "model on two GPUs"))
    for scope in ("eager", "compiled"):
        file = ROOT / f"results/h200-x2/scaling-{scope}/results.json"
        scaling = json.loads(file.read_text())["scaling"]
        for norm in ("eager", "compiled", "triton"):
            both = [scaling[strategy]["variants"][norm] for strategy in ("ddp-2", "fsdp-2")]
            assert next(lines) == [
                scope if norm == "eager" else "",
                norm,
                *itertools.chain.from_iterable(
                    (f"{found['tokens_per_s']:,.0f}", f"{found['efficiency']['median']:.1%}")
                    for found in both
                ),
            ]
