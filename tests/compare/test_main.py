"""`python -m compare` end to end: what a run leaves behind, single parts, Ctrl-C, bad input."""

import json
from pathlib import Path

import pytest
import yaml

from compare import __main__ as main
from compare import sentences, speed
from tests.compare.sample import parity
from tests.model.test_overview import write_run

PASS = parity()


@pytest.fixture
def outcomes(monkeypatch, in_this_process) -> dict:
    """Parts that do not run here, by the name of their function, with what they return or raise.

    At first, parity, which would take minutes, and all that is tested by itself.
    """
    outcomes = {
        "compare.setup:norm_problems": [],
        "compare.speed:first_call": 1.0,
    }
    here = main.child.call

    def call(target, *arguments, **options):
        if target not in outcomes:
            return here(target, *arguments, **options)
        if isinstance(outcomes[target], BaseException):
            raise outcomes[target]
        return outcomes[target]

    monkeypatch.setattr(main.child, "call", call)
    monkeypatch.setattr(main.parity, "run", lambda *_: {**PASS, **outcomes.get("parity", {})})
    plan = speed.Plan(rounds=2, block_steps=1, warmup_steps=1, processes=1)
    monkeypatch.setattr(speed, "plan", lambda *_: plan)
    return outcomes


@pytest.fixture
def run(config, tmp_path):
    """Calls compare with the small config, results in tmp_path."""
    settings = {
        "model": config["model"],
        "data": config["data"],
        "trainer": {"max_steps": 12, "accelerator": "cpu"},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(settings))
    root = ["--trainer.default_root_dir", str(tmp_path)]

    def call(*arguments: str) -> int:
        part = [arguments[0]] if arguments and not arguments[0].startswith("-") else []
        flags = arguments[len(part) :]
        norms = (
            [] if any(flag.startswith("--norms") for flag in flags) else ["--norms", "eager,aten"]
        )
        return main.main([*part, "--config", str(path), *root, *norms, *flags])

    return call


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_a_run_leaves_everything_that_is_promised(run, outcomes, tmp_path, capsys):
    assert run() == 0
    folder = tmp_path / "compare-small"
    found = results(folder)
    assert found.keys() >= {"speed", "profile", "memory", "parity", "environment", "config"}
    assert found["missing"] == []
    assert (found["scope"], found["baseline"], found["norms"]) == (
        "eager",
        "eager",
        ["eager", "aten"],
    )
    assert found["cpu"] is True
    assert found["command"].startswith("python -m compare --config ")
    assert (folder / "report.html").stat().st_size > 1000
    assert (folder / "report.md").exists()
    assert not any(path.name.startswith(".") for path in folder.iterdir())
    printed = capsys.readouterr().out
    assert "say nothing about the kernel" in printed
    assert f"Written to {folder}/report.html" in printed


def test_several_scopes_have_a_folder_each_and_one_report(run, outcomes, tmp_path):
    outcomes |= {"compare.memory:saved_bytes": {"eager": 1, "aten": 2}}
    assert run("memory", "--scopes", "eager,compiled") == 0
    folder = tmp_path / "compare-small"
    assert results(folder / "eager")["memory"]["aten"]["saved_bytes_per_norm"] == 2
    assert results(folder / "compiled")["scope"] == "compiled"
    assert not (folder / "results.json").exists()
    assert (folder / "report.html").exists()


def test_parity_is_in_the_results_of_every_scope(run, outcomes, tmp_path):
    assert run("parity", "--scopes", "eager,compiled") == 0
    for scope in ("eager", "compiled"):
        found = results(tmp_path / "compare-small" / scope)
        assert found["parity"]["verdict"] == PASS["verdict"]
        assert found["missing"] == []


def test_single_parts_join_a_comparison_with_the_same_settings(run, outcomes, tmp_path):
    outcomes |= {"compare.memory:saved_bytes": {"eager": 1, "aten": 2}}
    assert run("speed,memory") == 0
    assert run("parity") == 0
    found = results(tmp_path / "compare-small")
    assert {"speed", "memory", "parity"} <= found.keys()
    assert "profile" not in found
    assert len(found["command"].splitlines()) == 2
    assert run("memory", "--seed_everything", "1") == 0  # other settings, another folder
    assert "parity" not in results(tmp_path / "compare-small-2")


def test_the_report_is_rebuilt_from_results_alone(run, outcomes, tmp_path):
    run("parity")
    folder = tmp_path / "compare-small"
    (folder / "report.html").unlink()
    assert main.main(["report", str(folder)]) == 0
    assert (folder / "report.html").exists()


def test_runs_of_train_are_laid_over_each_other(tmp_path, capsys):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", norm="eager")]
    assert main.main(["report", *runs]) == 0
    assert (tmp_path / "overview.png").exists()
    printed = capsys.readouterr().out
    assert "| triton |" in printed
    assert "| eager |" in printed


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("fail", 1), ("inconclusive", 1)])
def test_the_exit_status_is_paritys(run, outcomes, verdict, status):
    outcomes["parity"] = {"verdict": verdict}
    assert run("parity") == status


def test_ctrl_c_keeps_what_was_measured(run, outcomes, tmp_path, capsys):
    outcomes |= {
        "compare.memory:saved_bytes": {"eager": 1, "aten": 2},
        "compare.profile:measure": KeyboardInterrupt(),
    }
    assert run() == 130
    found = results(tmp_path / "compare-small")
    assert "speed" in found
    assert found["missing"] == ["profile", "memory", "parity"]
    assert (tmp_path / "compare-small" / "report.html").exists()
    assert "profile, memory and parity" in capsys.readouterr().out


def test_a_part_that_was_cut_off_is_gone_on_with(run, outcomes, monkeypatch, tmp_path):
    measured, call = [], main.child.call

    def count(target, *arguments, **options):
        measured.append(target)
        return call(target, *arguments, **options)

    monkeypatch.setattr(main.child, "call", count)
    outcomes["compare.speed:first_call"] = KeyboardInterrupt()
    assert run("speed") == 130
    found = results(tmp_path / "compare-small")
    assert found["missing"] == ["speed"]
    assert len(found["unfinished"]["speed"]) == 1
    outcomes["compare.speed:first_call"] = 1.0
    assert run("speed") == 0
    found = results(tmp_path / "compare-small")
    assert found["missing"] == []
    assert "unfinished" not in found
    assert found["speed"]["variants"]["aten"]["first_call_s"] == {"cold": 1.0, "warm": 1.0}
    assert measured.count("compare.speed:measure") == 1
    assert run("speed") == 0  # once it is complete, it is measured anew
    assert measured.count("compare.speed:measure") == 2


def test_a_part_that_fails_does_not_end_the_others(run, outcomes, tmp_path, capsys):
    outcomes |= {
        "compare.memory:saved_bytes": {"eager": 1, "aten": 2},
        "compare.speed:measure": main.ChildError("out of memory"),
        "compare.profile:measure": main.ChildError("no profiler"),
    }
    assert run() == 1
    assert results(tmp_path / "compare-small")["missing"] == ["speed", "profile"]
    assert "error: out of memory" in capsys.readouterr().err


def test_a_part_that_fails_when_it_is_measured_again_is_a_failure(run, outcomes, tmp_path):
    assert run("parity") == 0
    assert run("speed,parity") == 0
    outcomes["compare.speed:measure"] = main.ChildError("out of memory")
    assert run("speed,parity") == 1
    assert "speed" in results(tmp_path / "compare-small")


def test_all_parts_by_name_go_on_and_without_names_begin_anew(run, outcomes, tmp_path):
    outcomes |= {"compare.memory:saved_bytes": {"eager": 1, "aten": 2}}
    outcomes["compare.profile:measure"] = KeyboardInterrupt()
    assert run("speed,profile,memory,parity") == 130
    del outcomes["compare.profile:measure"]
    assert run("speed,profile,memory,parity") == 0
    assert results(tmp_path / "compare-small")["missing"] == []
    assert not (tmp_path / "compare-small-2").exists()
    assert run() == 0
    assert (tmp_path / "compare-small-2").exists()


def test_parts_join_the_newest_with_the_same_settings(run, outcomes, tmp_path):
    assert run("parity") == 0
    assert run("parity", "--seed_everything", "1") == 0
    (tmp_path / "compare-small-3").mkdir()  # of a command that was killed early
    outcomes |= {"compare.memory:saved_bytes": {"eager": 1, "aten": 2}}
    assert run("memory") == 0
    assert {"memory", "parity"} <= results(tmp_path / "compare-small").keys()


def test_what_is_measured_again_is_said(run, outcomes, capsys):
    assert run("parity") == 0
    assert "Measured again" not in capsys.readouterr().out
    assert run("parity") == 0
    assert "Measured again, in place of what is there: parity." in capsys.readouterr().out


def test_a_norm_of_ones_own_that_has_changed_begins_anew(run, outcomes, tmp_path, monkeypatch):
    (tmp_path / "edited_norms").mkdir()
    module = tmp_path / "edited_norms" / "norm.py"
    module.write_text("from kernels.reference import norm\n")
    monkeypatch.syspath_prepend(tmp_path)
    norms = ["--norms", "eager,edited_norms.norm:norm"]
    for _ in range(2):
        assert run("parity", *norms) == 0
    assert not (tmp_path / "compare-small-2").exists()
    module.write_text("from kernels.reference import norm  # but not the same\n")
    assert run("parity", *norms) == 0
    assert (tmp_path / "compare-small-2" / "results.json").exists()


def test_two_at_a_time_in_one_folder_are_refused(run, outcomes, tmp_path, capsys):
    assert run("parity") == 0
    before = results(tmp_path / "compare-small")
    with main.owned(tmp_path / "compare-small"):
        assert run("parity") == 2
    assert "Another comparison is at work in" in errors(capsys)
    assert results(tmp_path / "compare-small") == before


def test_a_full_disk_is_said(run, outcomes, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr(main.report, "write", full)
    assert run("parity") == 2
    assert errors(capsys).endswith("error: report.html: No space left on device\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unfinished", None),
        ("unfinished", {"speed": None}),
        ("missing", None),
        ("missing", [5]),
        ("norms", "eager"),
        ("scope", "weird"),
        ("baseline", "aten2"),
        ("environment", None),
        ("speed", []),
    ],
)
def test_results_that_somebody_damaged_are_bad_input(run, outcomes, tmp_path, capsys, key, value):
    assert run("parity") == 0
    path = tmp_path / "compare-small" / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    for command in (lambda: run("parity"), lambda: main.main(["report", str(path.parent)])):
        assert command() == 2
        assert f"is damaged: {key} should" in errors(capsys)


def errors(capsys) -> str:
    return capsys.readouterr().err


def test_everything_that_is_wrong_is_said_at_once(run, capsys, tmp_path):
    flags = [
        "--norms",
        "unknown,eager",
        "--scopes",
        "lazy",
        "--rounds",
        "1",
        "--model.n_layer",
        "0",
    ]
    assert run(*flags) == 2
    printed = errors(capsys)
    for fragment in ("unknown norm 'unknown'", "'lazy'", "rounds is 1", "n_layer is 0"):
        assert fragment in printed
    assert printed.count("unknown norm") == 1
    assert "Traceback" not in printed
    assert not list(tmp_path.glob("compare-*"))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--norms", "eager"], "at least two"),
        (["--norms", "eager,eager"], "each once"),
        (["--norms", "eager,no.such:norm"], "cannot be loaded"),
        (["--scopes", "eager,eager"], "some of eager, compiled, graphs, each once"),
        (["--scopes", "eager,graphs"], "graphs, which are CUDA graphs and so need a GPU"),
        (["memory", "--scopes", "graphs"], "memory is not measured in scope graphs"),
        (["scaling"], "start it with torchrun --nproc-per-node 2 -m compare scaling"),
        (["scaling", "--strategy", "horovod"], "some of ddp, fsdp"),
        (["speed", "--strategy", "ddp"], "--strategy is for the part scaling"),
        (["scaling", "--strategy", "fsdp", "--trainer.precision", "16-mixed"], "overflow"),
        (["--trainer.precision", "64-true"], "32-true, bf16-mixed, 16-mixed"),
        (
            ["--model.norm_recompute", "true", "--scopes", "eager,compiled"],
            "norm_recompute is true, which is not for a compiled model",
        ),
        (["--model.norm_recompute", "true", "--norms", "eager,compiled"], "for norm 'compiled'"),
        (["--no_such_flag", "3"], "no_such_flag"),
        (["--norm", "eager"], "--norm is train.py's; a comparison has --norms."),
        (["--ckpt_path=last"], "--ckpt_path is train.py's"),
        (["velocity"], "There is no part 'velocity'"),
        (["speed,velocity"], "There is no part 'speed,velocity'"),
        ([","], "There is no part ','"),
        (["speed,scaling"], "scaling is measured by itself"),
        (["--trainer.max_steps=3"], "--trainer.max_steps has no effect on a comparison"),
        (["--trainer.strategy", "ddp"], "--trainer.strategy has no effect on a comparison"),
    ],
)
def test_bad_input(run, capsys, arguments, fragment):
    assert run(*arguments) == 2
    printed = errors(capsys)
    assert fragment in printed
    of_data = ("", "Generating", "Tokenising")  # progress of the first test that prepares the text
    lines = [line for line in printed.splitlines() if line.split(" ")[0] not in of_data]
    assert all(line.startswith("error: ") for line in lines)


def test_a_norm_that_does_not_run_here_is_bad_input(run, outcomes, capsys, tmp_path):
    outcomes["compare.setup:norm_problems"] = ["norm 'liger' needs x on a GPU"]
    assert run() == 2
    assert "error: norm 'liger' needs x on a GPU" in errors(capsys)
    assert not list(tmp_path.glob("compare-*"))


def test_a_norm_that_ends_its_process_is_bad_input(run, outcomes, capsys):
    outcomes["compare.setup:norm_problems"] = main.ChildError("failed in its process")
    assert run() == 2
    assert "error: failed in its process" in errors(capsys)


def test_torchrun_is_for_scaling(run, monkeypatch, capsys):
    places = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {"TORCHELASTIC_RUN_ID": "id", **places}.items():
        monkeypatch.setenv(name, value)
    dismissed = []
    monkeypatch.setattr(main.scaling, "dismiss", lambda: dismissed.append(True))
    assert run("speed") == 2
    assert "error: speed: measured by one process, and torchrun started 2." in errors(capsys)
    assert dismissed  # the other ranks do not wait


def test_graphs_have_no_profile_and_no_memory(run, outcomes, monkeypatch, tmp_path, capsys):
    """What is asked for on a GPU, whose times are made up here."""
    monkeypatch.setattr(main.speed, "run", lambda *_: {"variants": {}, "from": "graphs"})
    monkeypatch.setattr(main.report, "write", lambda *_: None)
    settings = main.parse(["--config", str(tmp_path / "small.yaml")]).settings
    request = main.Request(settings, ("graphs",), sentences.PARTS, False, None, ("ddp",), tmp_path)
    with main.Comparison.open(request, "command") as comparison:
        assert main.compare(comparison) == 0
    found = results(tmp_path / "compare-small")
    assert found["speed"]["from"] == "graphs"
    assert not {"profile", "memory"} & found.keys()
    assert found["missing"] == []
    assert "Missing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "one folder of results"),
        (["{}", "{}"], "one folder of results"),
        (["{}"], "no results.json"),
        (["{}/broken"], "cannot be read"),
        (["{}/other"], "is no result of a comparison: it lacks some of name, scope"),
    ],
)
def test_bad_input_of_report(tmp_path, capsys, arguments, fragment):
    for name, content in (("broken", "{"), ("other", '{"a": 1}')):
        (tmp_path / "some" / name).mkdir(parents=True)
        (tmp_path / "some" / name / "results.json").write_text(content)
    folder = tmp_path / ("nothing" if arguments == ["{}"] else "some")
    assert main.main(["report", *(argument.format(folder) for argument in arguments)]) == 2
    assert fragment in errors(capsys)
