"""`python -m data`: what inspect shows, what clear deletes and what it leaves alone."""

import fcntl
import json
import multiprocessing

import pytest

from data.__main__ import main

fork = multiprocessing.get_context("fork")


@pytest.fixture
def rows(tmp_path):
    """Forty documents of two bytes."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i:02d}"}) + "\n" for i in range(40)))
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def inspect(rows, cache):
    def inspect(source=rows, *flags):
        return main(["inspect", str(source), "--cache_dir", str(cache), *flags])

    return inspect


def test_inspect_shows_documents_tokens_a_sample_and_the_cache(inspect, cache, capsys, rows):
    assert inspect(rows, "--tokenizer", "bytes") == 0
    shown = capsys.readouterr().out
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert shown.splitlines()[0] == str(rows)
    assert "documents 38, tokens 114" in shown
    assert "documents 2, tokens 6" in shown
    assert "'00<|endoftext|>01<|endoftext|>" in shown
    assert str(folder) in shown


def test_inspect_shows_each_part_of_a_mixture_with_its_share(inspect, tmp_path, rows, capsys):
    (tmp_path / "a.txt").write_text("some text")
    assert inspect(f"{rows}=3,{tmp_path / 'a.txt'}=1", "--max_tokens", "50") == 0
    shown = capsys.readouterr().out
    assert f"{rows}, 75.0% of the blocks" in shown
    assert f"{tmp_path / 'a.txt'}, 25.0% of the blocks" in shown
    assert "tokens 50" in shown


def test_inspect_answers_bad_input_in_sentences(inspect, capsys):
    assert inspect("no/such.txt", "--tokenizer", "runes", "--max_tokens", "1") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)


def test_inspect_names_a_cache_folder_that_cannot_be(rows, tmp_path, capsys):
    (tmp_path / "occupied").touch()
    assert main(["inspect", str(rows), "--cache_dir", str(tmp_path / "occupied")]) == 2
    assert "error: Cannot keep tokens in" in capsys.readouterr().err


def test_clear_lists_with_sizes_and_deletes_what_is_ours_alone(inspect, cache, capsys):
    inspect()
    (mine,) = (path for path in cache.iterdir() if path.is_dir())
    broken = cache / f"{mine.name}.{'0' * 32}.tmp"
    broken.mkdir()
    (broken / "train.bin").write_bytes(bytes(2_000_000))
    others = [cache / "notes.txt", cache / "my-texts", cache / "my-0123456789abcdef01234.txt"]
    others[0].touch()
    others[1].mkdir()
    others[2].touch()
    capsys.readouterr()
    assert main(["clear", "--yes", "--cache_dir", str(cache)]) == 0
    shown = capsys.readouterr().out
    assert f"{mine.name}  (" in shown
    assert "rows.jsonl)" in shown
    assert f"2.0 MB  {broken.name}  (of no use)" in shown
    assert not mine.exists()
    assert not broken.exists()
    assert all(path.exists() for path in others)
    assert main(["clear", "--yes", "--cache_dir", str(cache)]) == 0
    assert "There are no tokens in" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "deleted"), [("y", True), ("n", False), ("", False)])
def test_clear_asks(inspect, cache, monkeypatch, answer, deleted):
    def answered(question):
        asked.append(question)
        return answer

    asked = []
    inspect()
    (mine,) = (path for path in cache.iterdir() if path.is_dir())
    monkeypatch.setattr("builtins.input", answered)
    assert main(["clear", "--cache_dir", str(cache)]) == 0
    assert asked[0].startswith(f"Delete these 1 in {cache}, 0.0 MB?")
    assert mine.exists() != deleted


def test_clear_with_nobody_to_ask_deletes_nothing(inspect, cache, capsys, monkeypatch):
    def end_of_file(question):
        raise EOFError

    inspect()
    monkeypatch.setattr("builtins.input", end_of_file)
    assert main(["clear", "--cache_dir", str(cache)]) == 2
    assert "error: There is nobody to ask: add --yes" in capsys.readouterr().err
    assert any(path.is_dir() for path in cache.iterdir())


def test_clear_leaves_what_another_process_is_at_work_on(inspect, cache, capsys):
    def hold():
        with lock.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            held.set()
            done.wait(60)

    inspect()
    (mine,) = (path for path in cache.iterdir() if path.is_dir())
    lock, held, done = cache / f"{mine.name}.lock", fork.Event(), fork.Event()
    process = fork.Process(target=hold)
    process.start()
    assert held.wait(60)
    try:
        assert main(["clear", "--yes", "--cache_dir", str(cache)]) == 0
    finally:
        done.set()
        process.join()
    assert f"Left {mine.name}: another process is at work on it." in capsys.readouterr().out
    assert mine.exists()
