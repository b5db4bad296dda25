"""The tables of docs/kernel.md are those of results/ and kernels/tuned/."""

import json

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/kernel.md").read_text()


def table(first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins so, without header and rule."""
    lines = PAGE[PAGE.index(f"| {first_column}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("line", table("rows x N"), ids=lambda line: f"{line[0]} {line[1]}")
def test_times_are_those_of_the_results(line):
    shape, name, bytes_a_feature, us, tb_s, fraction = line
    rows, n = map(int, shape.split(" x "))
    results = json.loads((ROOT / "results/h200/kernels.json").read_text())["rows"]
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


@pytest.mark.parametrize("line", table("N, all bfloat16"), ids=lambda line: line[0])
def test_launches_are_those_of_the_table(line):
    n, forward, backward = line
    [launches] = json.loads((ROOT / "kernels/tuned/sm_90.json").read_text()).values()
    keys = ["rows", "warps"], ["rows", "warps", "programs_per_sm", "stages"]
    for direction, cell, shown in zip(
        ("forward", "backward"), (forward, backward), keys, strict=True
    ):
        launch = launches[f"{direction} {n} 16-bit 16-bit"]
        assert [int(number) for number in cell.split(", ")] == [launch[key] for key in shown]
