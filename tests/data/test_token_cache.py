"""The token cache: right content, never stale, never half-built, built once."""

import errno
import json
import multiprocessing
import os
import select
import signal
import sys
import time

import datasets
import numpy as np
import pytest
import tiktoken

from data import DataError, TextDataModule, load_tokenizer
from data.encoding import Encoder

TEXTS = [f"document {i} <|endoftext|> \u00e9\n" for i in range(40)]
fork = multiprocessing.get_context("fork")
GENEROUS_S = 60  # after which a process is taken to hang


@pytest.fixture
def file(tmp_path):
    """Forty documents; the last two are held out."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def expected(tokenizer, texts):
    encoding = load_tokenizer(tokenizer)
    return [i for text in texts for i in [*encoding.encode_ordinary(text), encoding.eot_token]]


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
def test_tokens_are_those_of_plain_text_with_an_end_after_each_document(file, prepare, tokenizer):
    tokens = prepare(file, tokenizer=tokenizer).caches[0]
    assert tokens.train.dtype == tokens.validation.dtype == np.uint16
    assert tokens.train.tolist() == expected(tokenizer, TEXTS[:38])
    assert tokens.validation.tolist() == expected(tokenizer, TEXTS[38:])


@pytest.fixture
def two_processes(monkeypatch):
    """Has every row encoded by one of two processes, which calls a function before it does."""

    def two_processes(before_encoding):
        real_call = Encoder.__call__

        def call(encoder, rows):
            before_encoding()
            return real_call(encoder, rows)

        monkeypatch.setattr("data.cache._BYTES_PER_PROCESS", 1)
        monkeypatch.setattr("data.cache._BYTES_PER_TASK", 1)
        monkeypatch.setattr(Encoder, "__call__", call)

    return two_processes


@pytest.fixture
def run_group():
    """Runs a function in a process group of its own; returns its exit status when all have ended.

    None if some have not ended after a while.
    """

    def run_group(function, *args):
        open_while_any_lives, theirs = os.pipe()

        def lead():
            os.setpgid(0, 0)
            function(*args)

        leader = fork.Process(target=lead)
        leader.start()
        os.close(theirs)
        ended, _, _ = select.select([open_while_any_lives], [], [], GENEROUS_S)
        if not ended:
            os.killpg(leader.pid, signal.SIGKILL)
        leader.join()
        os.close(open_while_any_lives)
        return leader.exitcode if ended else None

    return run_group


def test_several_processes_give_the_tokens_of_one(file, prepare, tmp_path, two_processes):
    serial = prepare(file, num_proc=1).caches[0]
    module = TextDataModule(
        str(file), "bytes", context=4, num_proc=2, cache_dir=str(tmp_path / "other")
    )
    together = fork.Barrier(2)
    two_processes(lambda: together.wait(GENEROUS_S))  # with one process there are never two
    module.prepare_data()
    assert module.caches[0].train.tolist() == serial.train.tolist()
    assert module.caches[0].validation.tolist() == serial.validation.tolist()


@pytest.fixture
def custom_tokenizer(monkeypatch):
    """Makes tiktoken know one tokenizer, "custom", whose id for byte b is `first` + b."""

    def custom_tokenizer(first, end):
        encoding = tiktoken.Encoding(
            "custom",
            pat_str=r"(?s).",
            mergeable_ranks={bytes([i]): first + i for i in range(256)},
            special_tokens={"<|endoftext|>": end},
        )
        monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["custom"])
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
        load_tokenizer.cache_clear()

    yield custom_tokenizer
    load_tokenizer.cache_clear()


@pytest.mark.parametrize(("end", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_ids_beyond_16_bits_are_kept_in_32(file, prepare, custom_tokenizer, end, dtype):
    custom_tokenizer(first=65000, end=end)
    tokens = prepare(file, tokenizer="custom").caches[0]
    assert tokens.train.dtype == dtype
    assert tokens.train.tolist() == expected("custom", TEXTS[:38])


def test_a_tokenizer_that_changed_under_its_name_gets_new_tokens(file, prepare, custom_tokenizer):
    for first in (0, 1000):
        custom_tokenizer(first, end=5000)
        tokens = prepare(file, tokenizer="custom").caches[0]
        assert tokens.train.tolist() == expected("custom", TEXTS[:38])


def test_a_text_that_the_tokenizer_cannot_take_is_quoted(tmp_path, prepare):
    (tmp_path / "a.txt").write_text("Once" + " " * 10**6 + "upon")
    with pytest.raises(DataError, match="Cannot tokenise the text that begins 'Once  "):
        prepare(tmp_path / "a.txt", tokenizer="gpt2")


def test_the_second_time_no_text_is_read(file, prepare, monkeypatch):
    first = prepare(file).caches[0].train.tolist()
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert prepare(file).caches[0].train.tolist() == first


def test_an_edit_that_keeps_size_and_time_stamp_is_noticed(file, prepare):
    prepare(file)
    before = file.stat()
    file.write_text(file.read_text().replace("document 0", "DOCUMENT 0"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    changed = [TEXTS[0].replace("document", "DOCUMENT"), *TEXTS[1:38]]
    assert prepare(file).caches[0].train.tolist() == expected("bytes", changed)


def test_tokenizers_and_columns_have_caches_of_their_own(tmp_path, prepare):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "aaaa", "other": "bbbb"}\n' * 2)
    assert bytes(prepare(file).caches[0].train[:-1].tolist()) == b"aaaa"
    assert bytes(prepare(file, text_column="other").caches[0].train[:-1].tolist()) == b"bbbb"
    prepare(file, tokenizer="gpt2", context=1)
    assert len(folders(tmp_path)) == 3


def test_the_default_folder_follows_the_users_setting(file):
    module = TextDataModule(str(file), "bytes")
    module.prepare_data()
    parent = os.path.join(os.environ["XDG_CACHE_HOME"], "triton-rmsnorm-gpt")
    assert str(module.caches[0].path.parent) == parent


def lines(tmp_path, count):
    """A folder of the hub's form; no file holds the documents from number `count` on."""
    folder = tmp_path / "lines"
    folder.mkdir()
    texts = [f"{i:04d} <|endoftext|>" for i in range(count)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "train-0.jsonl").write_text(rows)
    return folder, [[*text.encode(), 256] for text in texts]


def flat(documents):
    return [token for document in documents for token in document]


@pytest.mark.parametrize(("max_tokens", "read"), [(19 * 19 + 1, 21), (5000, 277)])
def test_documents_are_taken_up_to_max_tokens_and_every_20th_is_held_out(
    tmp_path, prepare, max_tokens, read
):
    folder, documents = lines(tmp_path, 1000)
    tokens = prepare(folder, max_tokens=max_tokens).caches[0]
    kept = [document for i, document in enumerate(documents, 1) if i % 20]
    assert tokens.train.tolist() == flat(kept)[:max_tokens]
    assert tokens.validation.tolist() == flat(documents[19:read:20])
    assert tokens.documents == {"train": read - read // 20, "validation": read // 20}


def test_of_fewer_than_20_documents_up_to_max_tokens_the_last_is_held_out(tmp_path, prepare):
    folder, documents = lines(tmp_path, 1000)
    tokens = prepare(folder, max_tokens=19 * 18 + 7).caches[0]
    assert tokens.train.tolist() == flat(documents[:18])
    assert tokens.validation.tolist() == documents[18][:7]


def test_more_tokens_never_move_a_document_to_the_other_split(tmp_path, prepare):
    folder, _ = lines(tmp_path, 1000)
    some, more = (prepare(folder, max_tokens=count).caches[0] for count in (1000, 3000))
    for split in ("train", "validation"):
        few, many = getattr(some, split).tolist(), getattr(more, split).tolist()
        assert many[: len(few)] == few


def test_what_is_held_out_of_a_stream_does_not_depend_on_processes(
    tmp_path, prepare, two_processes, monkeypatch
):
    folder, _ = lines(tmp_path, 1000)
    serial = prepare(folder, max_tokens=7000, num_proc=1).caches[0]
    monkeypatch.setattr("data.cache._DOCUMENTS_PER_TASK", 7)
    together = fork.Semaphore(0)
    two_processes(together.release)
    module = TextDataModule(
        str(folder),
        "bytes",
        context=4,
        num_proc=2,
        max_tokens=7000,
        cache_dir=str(tmp_path / "other"),
    )
    module.prepare_data()
    assert together.acquire(block=False)
    assert module.caches[0].train.tolist() == serial.train.tolist()
    assert module.caches[0].validation.tolist() == serial.validation.tolist()


def test_a_stream_is_read_no_further_than_needed(tmp_path, prepare):
    folder, _ = lines(tmp_path, 300)
    (folder / "train-1.jsonl").write_text('{"text": ')
    assert len(prepare(folder, max_tokens=5000).caches[0].train) == 5000
    with pytest.raises(DataError, match=r"Cannot read .*lines as json"):
        prepare(folder, max_tokens=50_000)


def test_a_source_with_less_than_max_tokens_is_read_to_its_end(tmp_path, prepare):
    folder, documents = lines(tmp_path, 50)
    tokens = prepare(folder, max_tokens=10**9).caches[0]
    held_out = [documents[19], documents[39]]
    assert tokens.validation.tolist() == flat(held_out)
    assert tokens.train.tolist() == flat(d for d in documents if d not in held_out)


def test_a_validation_split_of_its_own_is_cut_to_max_tokens_too(tmp_path, prepare):
    folder, documents = lines(tmp_path, 50)
    (folder / "validation.jsonl").write_text((folder / "train-0.jsonl").read_text())
    tokens = prepare(folder, max_tokens=500).caches[0]
    assert tokens.train.tolist() == tokens.validation.tolist() == flat(documents)[:500]


def test_one_document_is_cut_to_max_tokens_before_its_end_is_held_out(tmp_path, prepare):
    (tmp_path / "a.txt").write_text("0123456789" * 100)
    tokens = prepare(tmp_path / "a.txt", max_tokens=200).caches[0]
    assert bytes([*tokens.train.tolist(), *tokens.validation.tolist()]) == b"0123456789" * 20
    assert len(tokens.validation) == 10
    assert tokens.documents == {"train": 1, "validation": 1}


def truncate(folder):
    os.truncate(folder / "validation.bin", os.path.getsize(folder / "validation.bin") - 2)


def drop_meta(folder):
    (folder / "meta.json").unlink()


def garble_meta(folder):
    (folder / "meta.json").write_text("{")


def drop_tokens(folder):
    (folder / "train.bin").unlink()


def drop_documents(folder):
    meta = json.loads((folder / "meta.json").read_text())
    del meta["documents"]
    (folder / "meta.json").write_text(json.dumps(meta))


def change_a_token(folder):
    with (folder / "train.bin").open("r+b") as file:
        file.seek(4)
        file.write(b"\xff\xff")


DAMAGES = [truncate, drop_meta, garble_meta, drop_tokens, drop_documents, change_a_token]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_built_again(file, prepare, damage):
    damage(prepare(file).caches[0].path)
    tokens = prepare(file).caches[0]
    assert tokens.train.tolist() == expected("bytes", TEXTS[:38])
    assert tokens.validation.tolist() == expected("bytes", TEXTS[38:])


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupted_build_leaves_nothing(file, prepare, tmp_path, monkeypatch, moment):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(file)
    assert folders(tmp_path) == []
    assert prepare(file).caches[0].train.tolist() == expected("bytes", TEXTS[:38])


@pytest.mark.parametrize("moment", ["starting", "encoding"])
def test_ctrl_c_among_several_processes_ends_them_all(
    file, prepare, tmp_path, two_processes, run_group, capfd, moment
):
    once = fork.Semaphore(1)

    def interrupt_all(this_moment):
        if this_moment == moment and once.acquire(block=False):
            os.killpg(0, signal.SIGINT)

    def build():
        real_start = multiprocessing.process.BaseProcess.start

        def start(process):
            real_start(process)
            interrupt_all("starting")

        multiprocessing.process.BaseProcess.start = start
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            prepare(file, num_proc=2)
        except KeyboardInterrupt:
            sys.exit(130)

    two_processes(lambda: interrupt_all("encoding"))
    assert run_group(build) == 130
    assert "Traceback" not in capfd.readouterr().err
    assert folders(tmp_path) == []


def test_processes_that_tokenise_end_when_the_first_is_killed(
    file, prepare, two_processes, run_group
):
    once = fork.Semaphore(1)

    def kill_the_first():
        if once.acquire(block=False):
            os.kill(os.getppid(), signal.SIGKILL)

    two_processes(kill_the_first)
    assert run_group(lambda: prepare(file, num_proc=2)) == -signal.SIGKILL


def test_a_process_that_is_killed_while_it_tokenises_is_reported(
    file, prepare, tmp_path, two_processes
):
    two_processes(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match=r"One of 2 processes .* set num_proc lower"):
        prepare(file, num_proc=2)
    assert folders(tmp_path) == []


def test_a_killed_build_is_not_trusted_and_is_cleared_away(file, prepare, tmp_path):
    def build_and_die():
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        prepare(file)

    process = fork.Process(target=build_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (leftover,) = folders(tmp_path)
    tokens = prepare(file).caches[0]
    assert tokens.train.tolist() == expected("bytes", TEXTS[:38])
    assert folders(tmp_path) == [tokens.path.name] != [leftover]


def test_a_killed_builds_lock_is_free_even_while_its_child_lives(file, prepare, tmp_path):
    ready, pid = fork.Event(), fork.Value("i")

    def build_and_hang():
        def hang(*args, **options):
            if child := os.fork():
                pid.value = child
                ready.set()
            while True:
                time.sleep(60)

        datasets.load_dataset = hang
        prepare(file)

    holder = fork.Process(target=build_and_hang)
    holder.start()
    assert ready.wait(60)
    holder.kill()
    holder.join()
    try:
        waiting = fork.Process(target=prepare, args=(file,))
        waiting.start()
        waiting.join(60)
        assert waiting.exitcode == 0
    finally:
        waiting.kill()
        os.kill(pid.value, signal.SIGKILL)


def test_two_processes_at_once_build_once(file, prepare, tmp_path):
    together, builds = fork.Barrier(2), fork.Value("i", 0)
    real_replace = os.replace

    def counted_replace(source, target):
        if str(target).startswith(str(tmp_path / "cache" / "bytes-")):
            with builds.get_lock():
                builds.value += 1
        real_replace(source, target)

    def build():
        os.replace = counted_replace
        together.wait()
        tokens = prepare(file).caches[0]
        assert tokens.train.tolist() == expected("bytes", TEXTS[:38])

    processes = [fork.Process(target=build) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert builds.value == 1
    assert len(folders(tmp_path)) == 1


def test_a_full_disk_is_reported_with_bytes_and_leaves_nothing(
    file, prepare, tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"No space left in .*/cache: .* up to [\d,]+ bytes"):
            prepare(file)
    assert folders(tmp_path) == []
    prepare(file)


def test_a_disk_that_fills_up_while_text_is_read_is_reported_as_such(file, prepare, monkeypatch):
    def full(*args, **options):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise datasets.exceptions.DatasetGenerationError("generating failed") from error

    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(DataError, match=r"No space left on the disk of .*/cache/.*\d bytes"):
        prepare(file)


def test_a_cache_folder_that_cannot_be_made_is_named(file, tmp_path):
    (tmp_path / "occupied").touch()
    module = TextDataModule(str(file), "bytes", cache_dir=str(tmp_path / "occupied"))
    with pytest.raises(DataError, match=r"Cannot keep tokens in .*occupied"):
        module.prepare_data()
