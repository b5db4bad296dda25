"""The benchmark without its clock: cases, checks of results, targets, files and command line."""

import csv
import dataclasses
import json
import subprocess

import pytest
import torch

from kernels import Norm, load_norm, reference
from kernels.bench import __main__ as bench
from kernels.bench import environment, report, timing
from kernels.bench.cases import (
    DESIGN_SHAPES,
    Case,
    add_case,
    default_rows,
    design_preset,
    norm_case,
)
from kernels.bench.problem import EPS, Problem
from kernels.bench.targets import TARGETS, by_case, judge

MIXED = Case("mixed", "add_rms_norm", 128, 512, "bfloat16", "float32", "float32", "bfloat16")


# --- cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "direction", "bytes_per_element"),
    [
        (norm_case("", 2, 8), "forward", 4),
        (norm_case("", 2, 8), "backward", 6),
        (norm_case("", 2, 8, "float32"), "backward", 12),
        (add_case("", 2, 8), "forward", 8),
        (add_case("", 2, 8), "backward", 8),
        (MIXED, "forward", 12),
        (MIXED, "backward", 16),  # h 4, dy 2, dh 4 read; dx 2 and dr 4 written
    ],
)
def test_minimum_bytes(case, direction, bytes_per_element):
    assert case.bytes(direction) == case.rows * case.n * bytes_per_element


@pytest.mark.parametrize(("n", "dtype"), [(64, "bfloat16"), (769, "float32"), (32768, "bfloat16")])
def test_default_rows_make_64_mebibytes(n, dtype):
    itemsize = getattr(torch, dtype).itemsize
    rows = default_rows(n, dtype)
    assert rows % 64 == 0
    assert 0 <= 64 * 2**20 - rows * n * itemsize < 64 * n * itemsize


def test_preset_holds_every_case_that_a_target_is_stated_for():
    cases = design_preset()
    assert len(set(cases)) == len(cases)
    assert {case.group for case in cases} == {group for t in TARGETS for group in t.groups}
    for group in ("design", "add"):
        assert [(c.rows, c.n) for c in cases if c.group == group] == list(DESIGN_SHAPES)
    assert {c.n for c in cases if c.group == "widths"} == {1536, 3072, 5120, 12288, 16384, 32768}


# --- results against float64 --------------------------------------------------------------------


@pytest.mark.parametrize("case", [norm_case("", 96, 512), add_case("", 96, 512), MIXED])
@pytest.mark.parametrize("name", ["eager", "triton"])
def test_correct_implementations_pass_the_check(name, case, device):
    candidate = bench.Candidate(name, None, lambda: load_norm(name))
    candidate.check(Problem.random(case, device))
    assert candidate.reason is None
    assert candidate.error.keys() == (
        {"y", "dx", "dw"} | ({"h", "dr"} if "add" in case.op else set())
    )


def test_atomic_norm_is_correct_in_float32(device):
    case = norm_case("", 40, 48, "float32")
    candidate = bench.Candidate(
        "triton-atomic", None, lambda: load_norm("kernels.bench.atomic:norm")
    )
    candidate.check(Problem.random(case, device))
    assert candidate.reason is None


def faulty(fault: str) -> Norm:
    """The definition with one fault in it, all in float32."""

    def rms_norm(x, weight, eps, *, out_dtype):
        rstd = (x.float().square().mean(-1, keepdim=True) + (1 if fault == "eps" else eps)).rsqrt()
        rstd = rstd.detach() if fault == "projection" else rstd
        y = x * rstd * (weight.detach() if fault == "dw" else weight)
        if fault == "dw":
            y = y + 0 * weight
        if fault == "unwritten":
            y = torch.where(torch.arange(y.numel()).view_as(y) == 7, float("nan"), y)
        return y.to(out_dtype)

    return Norm(fault, rms_norm, None)


@pytest.mark.parametrize(
    ("fault", "result"), [("eps", "y"), ("projection", "dx"), ("dw", "dw"), ("unwritten", "y")]
)
def test_check_finds_a_wrong_result(fault, result):
    candidate = bench.Candidate(fault, None, lambda: faulty(fault))
    candidate.check(Problem.random(norm_case("", 64, 512), "cpu"))
    assert candidate.reason.startswith("wrong result: ")
    assert f"{result} is off by" in candidate.reason


def test_what_an_implementation_raises_becomes_its_reason():
    def cannot():
        raise RuntimeError("first line\nsecond line")

    candidate = bench.Candidate("peer", None, cannot)
    candidate.check(Problem.random(norm_case("", 2, 8), "cpu"))
    assert candidate.reason == "RuntimeError: first line"
    candidate = bench.Candidate("quack", None, lambda: load_norm("no.such.module:norm"))
    candidate.check(Problem.random(norm_case("", 2, 8), "cpu"))
    assert candidate.reason.startswith("norm 'no.such.module:norm' cannot be loaded")


@pytest.mark.parametrize(("reads", "writes"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_stream_writes_the_sum_of_what_it_reads(reads, writes, device):
    sources = [torch.randn(5000, device=device) for _ in range(reads)]
    targets = [torch.full((5000,), float("nan"), device=device) for _ in range(writes)]
    timing.stream(sources, targets, block=1024, warps=4)
    for target in targets:
        torch.testing.assert_close(target, sum(sources))


# --- rows and targets -------------------------------------------------------------------------


def row(case: Case, direction: str, impl: str, us: float | None, **changes) -> dict:
    """A row as the benchmark makes it: ten rounds of samples around `us`, a ceiling of 10 us."""
    candidate = bench.Candidate(impl, changes.pop("mode", None), None)
    candidate.host_us = changes.pop("host_us", 100.0)
    candidate.reason = changes.pop("reason", None)
    samples = us and [[us - 0.1, us, us + 0.1] for _ in range(bench.ROUNDS)]
    return bench.make_row(case, direction, candidate, [[10.0] * 3], samples, samples) | changes


DESIGN_CASE = norm_case("design", 1000, 1024)


def verdicts(rows: list[dict], text: str) -> list[tuple[float | None, str]]:
    found = [v for v in judge(rows) if text in v.target.text]
    return [(v.measured and round(v.measured, 3), v.verdict) for v in found]


def test_row_holds_percentiles_bandwidth_and_fraction():
    made = row(DESIGN_CASE, "backward", "triton", 12.5)
    assert made["us"] == {"p10": 12.4, "p50": 12.5, "p90": 12.6}
    assert made["gb_s"] == pytest.approx(6 * 1000 * 1024 / 12.5e-6 / 1e9, abs=0.05)
    assert made["fraction"] == 0.8
    keys = {"op", "pass", "impl", "rows", "n", "x_dtype", "residual_dtype", "weight_dtype"}
    keys |= {"out_dtype", "us", "us_warm", "bytes", "ceiling_us", "host_us", "error", "reason"}
    assert keys <= made.keys()
    json.dumps(made)


def test_percentiles_are_of_all_rounds():
    assert report.percentiles([[0.0, 10.0], [20.0, 30.0], [40.0]][:2]) == pytest.approx(
        {"p10": 3, "p50": 15, "p90": 27}
    )


def test_forward_is_judged_against_the_best_peer_and_copy_speed():
    rows = [
        row(DESIGN_CASE, "forward", "triton", 10.4),
        row(DESIGN_CASE, "forward", "liger", 10.0),
        row(DESIGN_CASE, "forward", "quack", 11.0),
        row(DESIGN_CASE, "forward", "eager", 9.0),  # no peer: the definition, op by op
    ]
    assert verdicts(rows, "best peer") == [(0.962, "missed")]
    assert verdicts(rows, "copy's time") == [(0.962, "missed")]
    rows[1] = row(DESIGN_CASE, "forward", "liger", None, reason="cannot")
    assert verdicts(rows, "best peer") == [(1.058, "met")]


def test_the_faster_mode_counts_as_inductor():
    rows = [
        row(DESIGN_CASE, "backward", "triton", 10.0),
        row(DESIGN_CASE, "backward", "compiled", 15.0, mode="default"),
        row(DESIGN_CASE, "backward", "compiled", 13.0, mode="max-autotune"),
    ]
    assert verdicts(rows, "Inductor's time") == [(1.3, "missed")]
    assert verdicts(rows, "QuACK's time") == [(None, "not measured")]
    ((_, found),) = by_case(rows)
    assert found["compiled"]["mode"] == "max-autotune"


@pytest.mark.parametrize(("n", "at_least"), [(128, 0.87), (768, 0.92)])
def test_backward_target_depends_on_the_row_length(n, at_least):
    rows = [row(norm_case("design", 1000, n), "backward", "triton", 10 / 0.9)]
    (verdict,) = [v for v in judge(rows) if "2-read-1-write" in v.target.text]
    assert verdict.target.at_least == at_least
    assert verdict.verdict == ("met" if at_least < 0.9 else "missed")


def test_host_time_is_judged_once_a_shape():
    rows = [
        row(DESIGN_CASE, direction, impl, 10.0, host_us=host)
        for direction in ("forward", "backward")
        for impl, host in (("triton", 100.0), ("compiled", 150.0), ("quack", 90.0))
    ]
    assert verdicts(rows, "Inductor's host time") == [(1.5, "met")]
    assert verdicts(rows, "QuACK's host time") == [(0.9, "missed")]


@pytest.mark.parametrize(
    ("inductor", "verdict"),
    [(10.5, "met"), (9.0, "missed"), (None, "not measured")],
)
def test_no_cliff(inductor, verdict):
    case = norm_case("odd", 64, 769)
    rows = [row(case, "forward", "triton", 10.0), row(case, "forward", "compiled", inductor)]
    assert [found for _, found in verdicts(rows, "Inductor's time")] == [verdict]


@pytest.mark.parametrize(("inductor", "beyond"), [(13.9, "1.390"), (14.1, "")])
def test_a_target_that_no_kernel_at_the_ceiling_meets_is_said_to_be_so(inductor, beyond):
    rows = [  # the ceiling takes 10 us
        row(DESIGN_CASE, "backward", "triton", 11.0),
        row(DESIGN_CASE, "backward", "compiled", inductor),
    ]
    [line] = [x for x in report.targets_table({"rows": rows}).splitlines() if "| 1.40 |" in x]
    assert line.endswith(f"**missed** | {beyond} |")


def test_equal_within_the_rounds_noise_is_no_cliff():
    case = norm_case("odd", 64, 769)
    ours, theirs = row(case, "forward", "triton", 10.0), row(case, "forward", "compiled", 9.99)
    noise = [0.3, -0.3] * (bench.ROUNDS // 2)
    ours["samples_us"] = [
        [us + shift for us in samples]
        for samples, shift in zip(ours["samples_us"], noise, strict=True)
    ]
    assert verdicts([ours, theirs], "Inductor's time") == [(0.999, "no measurable difference")]


def test_rounds_are_shuffled_and_complete():
    calls = []

    class FakeTimer:
        def gpu_us(self, arm, count, *, cold):
            calls.append((arm, cold))
            return [1.0] * count

    cold, warm = bench.time_in_rounds({"a": "a", "b": "b", "c": "c"}, FakeTimer())
    assert all(len(rounds) == bench.ROUNDS for rounds in [*cold.values(), *warm.values()])
    orders = [tuple(arm for arm, is_cold in calls if is_cold)[i : i + 3] for i in range(0, 30, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1


# --- files ------------------------------------------------------------------------------------


@pytest.fixture
def results() -> dict:
    cases = [norm_case("design", 1000, 1024), norm_case("design", 1000, 2048), MIXED]
    rows = [
        row(case, direction, impl, us, error={"y": 1e-3})
        for case in cases
        for direction in ("forward", "backward")
        for impl, us in (("triton", 11.0), ("compiled", 14.0), ("eager", 50.0))
    ]
    rows.append(row(MIXED, "forward", "liger", None, reason="keeps the stream in x's dtype"))
    return {
        "environment": {"gpu": "Some GPU", "torch": "2.11", "git_revision": "abc"},
        "rows": rows,
    }


def test_results_survive_the_file(results, tmp_path):
    report.save(results, tmp_path / "new")
    assert report.load(tmp_path / "new") == results
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["kernels.json"]


@pytest.mark.parametrize(
    ("content", "lacks"),
    [
        ("{", "Expecting"),
        ("[]", "environment"),
        ('{"environment": {}, "rows": []}', "it lacks gpu"),
        (
            '{"environment": {"gpu": "x"}, "rows": [{"group": "x"}]}',
            "it lacks bytes, ceiling_us, error",
        ),
    ],
)
def test_what_no_benchmark_has_written_is_named(tmp_path, capsys, content, lacks):
    (tmp_path / "kernels.json").write_text(content)
    with pytest.raises(SystemExit) as exit_:
        report.main([str(tmp_path)])
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'kernels.json'} is not what a benchmark writes" in told
    assert lacks in told


@pytest.mark.parametrize(("key", "value"), [("us", 5.0), ("n", "x"), ("rows", None)])
def test_a_damaged_row_is_named(results, tmp_path, capsys, key, value):
    results["rows"][0][key] = value
    report.save(results, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path)])
    assert f"is not what a benchmark writes: {key} is {value!r}" in capsys.readouterr().err


def test_other_measurements_are_not_written_over(results, tmp_path, capsys):
    report.save(results, tmp_path / "all")
    report.save(results | {"rows": results["rows"][:3]}, tmp_path / "some")
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "some"), "--out", str(tmp_path / "all")])
    assert "has other measurements, which would be lost" in capsys.readouterr().err
    assert report.load(tmp_path / "all") == results
    for _ in range(2):
        assert report.main([str(tmp_path / "all"), "--out", str(tmp_path / "some")]) == 0
    assert report.load(tmp_path / "some") == results


def test_a_folder_that_cannot_be_is_bad_input(results, tmp_path, capsys):
    report.save(results, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path), "--out", str(tmp_path / "file")])
    assert "exists" in capsys.readouterr().err


def test_report_makes_every_file_from_the_json(results, tmp_path, capsys):
    report.save(results, tmp_path)
    assert report.main([str(tmp_path)]) == 0
    assert "**missed**" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {
        "kernels.json",
        "kernels.csv",
        "kernels.png",
        "kernels.md",
    }
    with (tmp_path / "kernels.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(results["rows"])
    assert (table[0]["impl"], table[0]["us_p50"], table[0]["error_y"]) == (
        "triton",
        "11.0",
        "0.001",
    )
    text = (tmp_path / "kernels.md").read_text()
    assert "liger: keeps the stream in x's dtype (mixed: add_rms_norm 128 x 512" in text
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_plot_holds_a_line_for_each_implementation_and_the_ceiling(results):
    lines = report.bandwidth_over_n(results["rows"], "forward")
    assert lines.keys() == {"triton", "compiled", "eager", "ceiling"}
    assert lines["triton"] == [(1024, 372.4), (2048, 744.7)]  # 4 bytes x rows x n / 11 us
    assert lines["ceiling"][0] == (1024, pytest.approx(409.6))


def test_a_revision_tells_one_uncommitted_change_from_another(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_REVISION", raising=False)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "file"))
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    found = []
    for content in ("committed", "one", "another", "one"):
        (tmp_path / "file").write_text(content)
        if content == "committed":
            for command in (["init"], ["add", "file"], [*author, "commit", "--message", content]):
                subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
        found.append(environment.git_revision())
    commit, one, another, again = found
    assert len(commit) == 40
    assert one.startswith(f"{commit}-dirty-")
    assert one == again != another


def test_runs_of_other_cases_are_put_together(results):
    half = len(results["rows"]) // 2
    parts = [
        results | {"rows": results["rows"][:half]},
        results | {"rows": results["rows"][half:]},
    ]
    merged = report.merge(parts)
    assert merged["rows"] == results["rows"]
    assert merged["environment"]["parts"] == [results["environment"]] * 2


def test_runs_that_do_not_belong_together_are_refused(results, tmp_path, capsys):
    other = results | {"environment": results["environment"] | {"torch": "2.12"}}
    with pytest.raises(ValueError, match=r"differ in torch: 2\.11, 2\.12"):
        report.merge([results, other])
    with pytest.raises(ValueError, match="measured in more than one of the runs: design: rms_norm"):
        report.merge([results, results])
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert "several folders need --out" in capsys.readouterr().err


# --- command line -----------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_exits_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--preset", "design", "--out", str(tmp_path)]) == 2
    assert "needs a GPU: torch finds no CUDA GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--n", "256,0"], "'0' is not a whole number of at least 1"),
        (["--dtype", "int8"], "--dtype: there is no int8; there are bfloat16"),
        (["--passes", "sideways"], "--passes: there is no sideways; there are forward"),
        (["--group", "odd"], "give --preset as well"),
        (["--preset", "design", "--group", "even"], "--group: there is no even"),
        (["--preset", "design", "--rows", "64"], "leave out --rows"),
        (["--preset", "design", "--group", "odd", "--n", "64"], "no case is left"),
        (["--norms", "fastest"], "unknown norm 'fastest'"),
    ],
)
def test_bad_flags_exit_2_with_a_sentence(flags, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.parse_arguments(flags)
    assert says in capsys.readouterr().err


def test_results_are_never_written_over(results, tmp_path, capsys):
    report.save(results, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        bench.parse_arguments(["--out", str(tmp_path)])
    assert "holds a kernels.json already" in capsys.readouterr().err


def test_flags_choose_cases_and_implementations():
    arguments = bench.parse_arguments(["--n", "256", "--dtype", "float16,float32", "--rows", "8"])
    assert [(c.op, c.rows, c.n, c.x_dtype) for c in arguments.cases] == [
        ("rms_norm", 8, 256, "float16"),
        ("add_rms_norm", 8, 256, "float16"),
        ("rms_norm", 8, 256, "float32"),
        ("add_rms_norm", 8, 256, "float32"),
    ]
    arguments = bench.parse_arguments(["--preset", "design", "--passes", "add_forward"])
    assert {case.op for case in arguments.cases} == {"add_rms_norm"}
    case = dataclasses.replace(DESIGN_CASE, max_autotune=True)
    found = [(c.impl, c.mode) for c in bench.candidates(case, ["compiled", "triton-atomic"])]
    assert found == [("compiled", "default"), ("compiled", "max-autotune"), ("triton-atomic", None)]
    assert [c.impl for c in bench.candidates(norm_case("", 1, 8, norms=("triton",)), None)] == [
        "triton"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the benchmark itself needs a GPU")
def test_a_small_run_on_a_gpu(tmp_path):
    flags = ["--n", "256", "--rows", "512", "--norms", "eager,triton,compiled,triton-atomic"]
    assert bench.main([*flags, "--out", str(tmp_path)]) == 0
    written = report.load(tmp_path)
    assert len(written["rows"]) == 2 * 5 + 2 * 5
    untimed = {(r["op"], r["impl"]) for r in written["rows"] if r["us"] is None}
    assert untimed == {("add_rms_norm", "triton-atomic")}
    assert all(r["ceiling_us"] > 0 for r in written["rows"])
    assert written["environment"]["clocks"].keys() == {"start", "end"}


def test_reference_is_the_definition_used_for_the_check():
    """Fails if the expected values were rounded: float64 and float32 results then agree exactly."""
    problem = Problem.random(norm_case("", 4, 16, "float32"), "cpu")
    x, weight = (leaf.detach().double() for leaf in problem.leaves)
    expected = reference.rms_norm(x, weight, EPS)
    assert torch.equal(problem.expected["y"], expected)
    assert problem.expected["y"].dtype == torch.float64
