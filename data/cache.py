"""Tokenises a source once into memory-mapped token files, and finds them again by a key.

A cache is a folder with `train.bin`, `validation.bin` and `meta.json`. It appears under its final
name by one rename, when complete, so what an interrupted run leaves behind is never read. Files
that were written to since, or copied, are compared with their checksums.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import datasets
import numpy as np
import tiktoken
from datasets.utils import tqdm

from .encoding import Encoder, Texts, in_processes
from .errors import DataError
from .sources import Source, Split
from .tokenizer import tokenizer_fingerprint

# Raise it when the same text and tokenizer would give other token files than before.
FORMAT_VERSION = 2
HELD_OUT = 20  # where the source has no validation split of its own, one document of so many
_OURS = re.compile(r"(?P<name>.+-[0-9a-f]{20})(\.[0-9a-f]{32}\.tmp)?")
_BYTES_PER_PROCESS = 2**23  # of text; below it a process costs more time than it saves
_BYTES_PER_TASK = 2**20  # of text; Ctrl-C waits for the tasks that are under way
_DOCUMENTS_PER_TASK = 100  # of a stream, whose documents have a size that is not known before


@dataclass(frozen=True)
class TokenCache:
    """The tokens of both splits: read-only memory maps, uint16 or uint32, shape (tokens,).

    `documents` says how many there are in each split; one that was cut in two counts in both.
    """

    path: Path
    train: np.ndarray
    validation: np.ndarray
    documents: dict[str, int]


def prepare_tokens(
    source: Source,
    encoding: tiktoken.Encoding,
    cache_dir: Path,
    text_column: str | None = None,
    num_proc: int | None = None,
    max_tokens: int | None = None,
) -> TokenCache:
    """The tokens of `source`, tokenised by `num_proc` processes unless they are cached already.

    Documents are encoded as plain text, empty ones left out, and an end-of-text token put after
    each. With `max_tokens` they are taken in order until a split has that many tokens, the last
    document is cut there, and no more is read. Of processes that ask for the same tokens at once,
    one works and the others wait.

    Where the source holds nothing out itself, the last 5% of the documents are held out; with
    `max_tokens`, which leaves the end unknown, every 20th. Of fewer than 20 documents that is the
    last one, of a single one its last 5%.

    Raises DataError for text that cannot be read or is empty, and for a cache folder that cannot
    be written or has no space left.
    """
    meta = {
        "format": FORMAT_VERSION,
        "text": source.fingerprint(),
        "text_column": text_column,
        "max_tokens": max_tokens,
        "tokenizer": encoding.name,
        "tokenizer_sha256": tokenizer_fingerprint(encoding),
    }
    key = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()[:20]
    final = cache_dir / f"{encoding.name}-{key}"
    try:
        if cached := _open(final):
            return cached
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{final.name}.lock"):
            if not _open(final):
                _build(final, meta, source, encoding, num_proc)
            cached = _open(final)
    except OSError as error:
        raise DataError(f"Cannot keep tokens in {cache_dir}: {error}.") from error
    assert cached is not None, f"{final} is unreadable just after it was written"
    return cached


@dataclass(frozen=True)
class Entry:
    """A folder of a cache: the tokens of a source, or what an interrupted run left of them."""

    path: Path
    size: int  # bytes
    source: str | None  # None if it is not whole, or of another version


def entries(cache_dir: Path) -> list[Entry]:
    """What `prepare_tokens` has put into `cache_dir`, by name.

    Raises DataError for a folder that cannot be read.
    """
    try:
        folders = [path for path in sorted(cache_dir.glob("*-*")) if _OURS.fullmatch(path.name)]
        return [_entry(path) for path in folders if path.is_dir()]
    except OSError as error:
        raise DataError(f"Cannot read {cache_dir}: {error}.") from error


def _entry(path: Path) -> Entry:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    whole = _open(path)
    return Entry(
        path, size, json.loads((path / "meta.json").read_text())["source"] if whole else None
    )


def remove(entry: Entry) -> bool:
    """Deletes it, unless a process is at work on it: then returns False.

    Its lock file stays, empty, since another process may be about to wait for it. Raises
    DataError if it cannot be deleted.
    """
    name = _OURS.fullmatch(entry.path.name)["name"]
    try:
        with _lock(entry.path.with_name(f"{name}.lock"), wait=False) as locked:
            if locked:
                shutil.rmtree(entry.path)
    except OSError as error:
        raise DataError(f"Cannot delete {entry.path}: {error}.") from error
    return locked


@contextmanager
def _lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock, which the system releases if this process dies.

    Yields whether it is held: without `wait`, not if another process holds it. A POSIX lock:
    unlike flock's, it is not inherited by the processes that tokenise, so one that outlives us
    cannot keep it.
    """
    with path.open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if not wait:
                yield False
                return
            print(f"Waiting for another process to tokenise the same text ({path})", flush=True)
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield True


def _open(folder: Path) -> TokenCache | None:
    """The cache in `folder`; None if there is none, or its files are not as it says."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        for split, count in meta["tokens"].items():
            file, written = folder / f"{split}.bin", meta["written"][split]
            if file.stat().st_size != count * np.dtype(meta["dtype"]).itemsize:
                return None
            changed = file.stat().st_mtime_ns != written["mtime_ns"]
            if changed and _sha256(file) != written["sha256"]:
                return None
        documents = meta["documents"]
    except (FileNotFoundError, ValueError, KeyError):
        return None
    train, validation = (
        np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r")
        for split in ("train", "validation")
    )
    return TokenCache(folder, train, validation, documents)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _build(
    final: Path,
    meta: dict,
    source: Source,
    encoding: tiktoken.Encoding,
    num_proc: int | None,
) -> None:
    """Writes the cache folder `final`; the caller holds its lock."""
    dtype = np.dtype("uint16" if encoding.n_vocab <= 2**16 else "uint32")
    encoder = Encoder(encoding, dtype)
    limit, needed = meta["max_tokens"], None
    try:
        with _partial_folder(final) as partial:
            scratch = partial / "scratch"
            scratch.mkdir()
            splits = source.load(scratch, meta["text_column"], stream=limit is not None)
            # Those held out are in two files for a moment.
            needed = 2 * dtype.itemsize * sum(_at_most(rows, limit) for rows in splits.values())
            lengths = {}
            for split, rows in splits.items():
                hold_out = limit is not None and "validation" not in splits
                lengths[split], held_out = _tokenise(
                    partial / f"{split}.bin",
                    partial / "validation.bin" if hold_out else None,
                    _texts(rows, source.explained(scratch)),
                    encoder,
                    _processes(rows, num_proc, limit),
                    limit,
                    _bar(split, rows, limit),
                )
                if len(held_out):
                    lengths["validation"] = held_out
                if len(lengths[split]) == 0:
                    raise DataError(f"No text in the {split} split: all its documents are empty.")
            if "validation" not in lengths:
                lengths["train"], lengths["validation"] = _divided(lengths["train"])
                count = int(lengths["validation"].sum())
                _move_end(count, dtype, partial / "train.bin", partial / "validation.bin")
            shutil.rmtree(scratch)
            meta = meta | {
                "source": str(source),
                "dtype": dtype.name,
                "documents": {split: len(counts) for split, counts in lengths.items()},
                "tokens": {split: int(counts.sum()) for split, counts in lengths.items()},
                "written": {
                    split: {"mtime_ns": file.stat().st_mtime_ns, "sha256": _sha256(file)}
                    for split in lengths
                    for file in [partial / f"{split}.bin"]
                },
            }
            with _written(partial / "meta.json") as file:
                file.write(json.dumps(meta, indent=2).encode())
            os.replace(partial, final)
    except OSError as error:
        if error.errno != errno.ENOSPC or needed is None:
            raise
        free = shutil.disk_usage(final.parent).free
        raise DataError(
            f"No space left in {final.parent}: the tokens need up to {needed:,} bytes "
            f"and {free:,} are free. Free some, or choose another folder with cache_dir."
        ) from error


@contextmanager
def _partial_folder(final: Path) -> Iterator[Path]:
    """A new folder beside `final`; removed at the end unless it was renamed.

    Its name is new each time, since a process that tokenised for a killed run may still write.
    """
    for leftover in [final, *final.parent.glob(f"{final.name}.*.tmp")]:
        shutil.rmtree(leftover, ignore_errors=True)
    partial = final.with_name(f"{final.name}.{uuid.uuid4().hex}.tmp")
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _at_most(rows: Split, limit: int | None) -> int:
    """The tokens of a split at most, which are bytes of its text at least."""
    return limit if isinstance(rows, datasets.IterableDataset) else rows.data.nbytes


def _processes(rows: Split, num_proc: int | None, limit: int | None) -> int:
    """As many as are wanted and have something to do."""
    documents = limit if isinstance(rows, datasets.IterableDataset) else len(rows)
    wanted = num_proc or len(os.sched_getaffinity(0))
    return min(wanted, 1 + _at_most(rows, limit) // _BYTES_PER_PROCESS, max(1, documents))


def _texts(rows: Split, explained: AbstractContextManager[None]) -> Generator[Texts, None, None]:
    """The documents in lists, each the task of a process."""
    length = _DOCUMENTS_PER_TASK
    if isinstance(rows, datasets.Dataset):
        length = max(1, len(rows) * _BYTES_PER_TASK // max(1, rows.data.nbytes))
    with explained:
        for batch in rows.iter(length):
            (texts,) = batch.values()
            yield texts


def _bar(split: str, rows: Split, limit: int | None) -> dict:
    """What a progress bar counts: documents or, where there is a limit, the tokens up to it."""
    total, unit = (limit, " tokens") if limit else (len(rows), " documents")
    return {"total": total, "unit": unit, "desc": f"Tokenising {split}"}


def _tokenise(
    path: Path,
    held_out: Path | None,
    texts: Generator[Texts, None, None],
    encoder: Encoder,
    processes: int,
    limit: int | None,
    bar: dict,
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the ids of documents that are not empty; returns how many each of them has.

    Every 20th goes to `held_out`, if there is one, and is among the second counts. Ends with the
    texts or, within a document, when `path` has `limit` ids.
    """
    kept_counts, held_counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    tokens = documents = empty = 0
    with (
        closing(texts),  # a stream of parquet that is left open can hang Python's exit
        in_processes(processes, encoder) as encode,
        tqdm(**bar) as progress,
        _written(path) as file,
        _written(held_out) if held_out else nullcontext() as held_file,
    ):
        for ids, counts in encode(texts):
            empty += np.count_nonzero(counts == 0)
            progress.update(0 if limit else len(counts))
            counts = counts[counts > 0]
            numbers = documents + np.arange(1, len(counts) + 1)
            kept = numbers % HELD_OUT != 0 if held_out else np.ones(len(counts), dtype=bool)
            if limit:
                ids, counts, kept = _cut(limit - tokens, ids, counts, kept)
            where = np.repeat(kept, counts)
            file.write(ids[where])
            if held_file:
                held_file.write(ids[~where])
            kept_counts.append(counts[kept])
            held_counts.append(counts[~kept])
            documents += len(counts)
            tokens += np.count_nonzero(where)
            progress.update(np.count_nonzero(where) if limit else 0)
            if tokens == limit:
                break
    if empty:
        print(
            f"Left out {empty:,} empty documents of {documents + empty:,} ({path.stem})", flush=True
        )
    return np.concatenate(kept_counts), np.concatenate(held_counts)


def _cut(
    limit: int, ids: np.ndarray, counts: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Leaves out what follows the first `limit` ids of the documents that are kept."""
    ends = np.cumsum(counts * kept)
    last = int(np.searchsorted(ends, limit))
    if last == len(ends):
        return ids, counts, kept
    counts = np.append(counts[:last], counts[last] - (ends[last] - limit))
    return ids[: counts.sum()], counts, kept[: last + 1]


def _divided(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each document to train on, and to hold out: the last ones, or the end of one."""
    if len(lengths) == 1:
        count = np.maximum(1, np.round(lengths / HELD_OUT)).astype(lengths.dtype)
        return lengths - count, count
    held_out = max(1, round(len(lengths) / HELD_OUT))
    return lengths[:-held_out], lengths[-held_out:]


def _move_end(count: int, dtype: np.dtype, source: Path, target: Path) -> None:
    """Moves the last `count` tokens of one file to another."""
    ids = np.memmap(source, dtype=dtype, mode="r")
    left = len(ids) - count
    with _written(target) as file:
        file.write(ids[left:])
    del ids
    os.truncate(source, left * dtype.itemsize)


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A new file, which is on the disk at the end."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
