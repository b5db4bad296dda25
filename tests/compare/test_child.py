"""Processes of their own: results, progress, errors, environment."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compare import child
from compare.child import Child, ChildError, Kept

HERE = "child_functions"


def product(settings, progress, factor):
    print("this is not progress")
    progress("multiplying", 1, 2)
    return {
        "product": factor * settings.data.batch_size,
        "variable": os.environ.get("COMPARE_TEST"),
        "process": os.getpid(),
    }


def wait_for(settings, progress, where):
    """Says that it is there, and ends when the other one is."""
    folder, mine, other = where
    (Path(folder) / mine).touch()
    (Path(folder) / f"{mine}-{os.getpid()}").touch()
    while not (Path(folder) / other).exists():
        time.sleep(0.01)
    return mine


def print_bytes(settings, progress):
    os.write(1, b"\xff\xfe")
    return 1


def fail(settings, progress):
    raise OSError("the disk is on fire")


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Functions of this file in a module that the other process can import."""
    (tmp_path / f"{HERE}.py").write_text(Path(__file__).read_text())
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return lambda function: f"{HERE}:{function}"


def test_a_function_runs_in_another_process(config, target):
    reports = []
    found = child.call(
        target("product"),
        config,
        lambda *report: reports.append(report),
        environment={"COMPARE_TEST": "set"},
        factor=3,
    )
    assert found["product"] == 12
    assert found["variable"] == "set"
    assert found["process"] != os.getpid()
    assert reports == [("multiplying", 1, 2)]


def test_its_errors_come_back(config, target):
    with pytest.raises(ChildError, match="the disk is on fire"):
        child.call(target("fail"), config, lambda *_: None)


def test_several_run_at_a_time_and_no_more(config, target):
    """Each waits for the other one: alone, none would ever end."""
    meet = {name: [config["data"]["cache_dir"], name, *"ab".replace(name, "")] for name in "ab"}
    starts = {
        name: lambda where=where: Child(target("wait_for"), config, lambda *_: None, where=where)
        for name, where in meet.items()
    }
    assert dict(child.call_all(starts, at_once=2)) == {"a": "a", "b": "b"}


def test_one_that_fails_ends_the_others(config, target, tmp_path):
    nowhere = [str(tmp_path), "a", "nobody"]
    starts = {
        "waits": lambda: Child(target("wait_for"), config, lambda *_: None, where=nowhere),
        "fails": lambda: Child(target("fail"), config, lambda *_: None),
    }
    with pytest.raises(ChildError, match="the disk is on fire"):
        dict(child.call_all(starts, at_once=2))


def test_what_is_kept_is_not_asked_for_again():
    saved = []
    keep = Kept(save=lambda: saved.append(dict(keep.found)))
    assert [keep("a", lambda: 1), keep("a", lambda: 2), keep("b", lambda: 3)] == [1, 1, 3]
    assert saved == [{"a": 1}, {"a": 1, "b": 3}]
    assert "a" in keep
    assert "c" not in keep


def test_what_it_prints_need_not_be_text(config, target):
    assert child.call(target("print_bytes"), config, lambda *_: None) == 1


def test_it_ends_with_the_process_that_asked_for_it(config, target, tmp_path):
    """A process that is killed leaves none behind, however long that one would take."""
    where = [str(tmp_path), "there", "nobody"]
    code = (
        f"import sys; sys.path[:] = {sys.path}\n"
        "from compare import child\n"
        f"child.call({target('wait_for')!r}, {config!r}, print, where={where})"
    )
    asker = subprocess.Popen([sys.executable, "-c", code])
    process = wait_until(lambda: next(tmp_path.glob("there-*"), None))
    asker.kill()
    asker.wait()
    number = int(process.name.rpartition("-")[2])
    wait_until(lambda: not Path(f"/proc/{number}").exists())


def wait_until(found):
    end = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return result
