"""Tokenises a source once into memory-mapped token files, and finds them again by a key.

A cache is a folder with `train.bin`, `validation.bin` and `meta.json`. It appears under its final
name by one rename, when complete, so what an interrupted run leaves behind is never read.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import tiktoken
from datasets.utils import tqdm

from .encoding import Encoder, in_processes
from .errors import DataError
from .sources import Source
from .tokenizer import tokenizer_fingerprint

# Raise it when the same text and tokenizer would give other token files than before.
FORMAT_VERSION = 1
HELD_OUT = 0.05  # of the documents, where the source has no validation split of its own
_BYTES_PER_PROCESS = 2**23  # of text; below it a process costs more time than it saves
_BYTES_PER_TASK = 2**20  # of text; Ctrl-C waits for the tasks that are under way


@dataclass(frozen=True)
class TokenCache:
    """The tokens of both splits: read-only memory maps, uint16 or uint32, shape (tokens,)."""

    path: Path
    train: np.ndarray
    validation: np.ndarray


def default_cache_dir() -> Path:
    """`triton-rmsnorm-gpt` under $XDG_CACHE_HOME, or else under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "triton-rmsnorm-gpt"


def prepare_tokens(
    source: Source,
    encoding: tiktoken.Encoding,
    cache_dir: Path,
    text_column: str | None = None,
    num_proc: int | None = None,
) -> TokenCache:
    """The tokens of `source`, tokenised by `num_proc` processes unless they are cached already.

    Documents are encoded as plain text, empty ones left out, and an end-of-text token put after
    each. Of processes that ask for the same tokens at once, one works and the others wait.

    Raises DataError for text that cannot be read or is empty, and for a cache folder that cannot
    be written or has no space left.
    """
    meta = {
        "format": FORMAT_VERSION,
        "text": source.fingerprint(),
        "text_column": text_column,
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


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, which the system releases if this process dies.

    A POSIX lock: unlike flock's, it is not inherited by the processes that tokenise, so one that
    outlives us cannot keep it.
    """
    with path.open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            print(f"Waiting for another process to tokenise the same text ({path})", flush=True)
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _open(folder: Path) -> TokenCache | None:
    """The cache in `folder`; None if there is none, or its files are not as it says."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        for split, count in meta["tokens"].items():
            size = (folder / f"{split}.bin").stat().st_size
            if size != count * np.dtype(meta["dtype"]).itemsize:
                return None
    except (FileNotFoundError, ValueError):
        return None
    train, validation = (
        np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r")
        for split in ("train", "validation")
    )
    return TokenCache(folder, train, validation)


def _build(
    final: Path,
    meta: dict,
    source: Source,
    encoding: tiktoken.Encoding,
    num_proc: int | None,
) -> None:
    """Writes the cache folder `final`; the caller holds its lock."""
    dtype = np.dtype("uint16" if encoding.n_vocab <= 2**16 else "uint32")
    needed = None
    try:
        with _partial_folder(final) as partial:
            scratch = partial / "scratch"
            scratch.mkdir()
            documents = source.load(scratch, meta["text_column"])
            # At most a token a byte; those held out are in two files for a moment.
            needed = 2 * dtype.itemsize * sum(rows.data.nbytes for rows in documents.values())
            tokens = {}
            for split, rows in documents.items():
                lengths = _tokenise(partial / f"{split}.bin", rows, encoding, dtype, num_proc)
                if len(lengths) == 0:
                    raise DataError(f"No text in the {split} split: all its documents are empty.")
                tokens[split] = int(lengths.sum())
            if "validation" not in tokens:
                tokens["validation"] = count = _held_out(lengths)
                tokens["train"] -= count
                _move_end(count, dtype, partial / "train.bin", partial / "validation.bin")
            shutil.rmtree(scratch)
            meta = meta | {"dtype": dtype.name, "tokens": tokens}
            _write(partial / "meta.json", [json.dumps(meta, indent=2).encode()])
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


def _tokenise(
    path: Path,
    documents: datasets.Dataset,
    encoding: tiktoken.Encoding,
    dtype: np.dtype,
    num_proc: int | None,
) -> np.ndarray:
    """Writes the ids of all documents that are not empty; returns how many each of them has."""
    size = documents.data.nbytes
    rows = max(1, len(documents) * _BYTES_PER_TASK // max(1, size))
    tasks = [
        range(first, min(first + rows, len(documents))) for first in range(0, len(documents), rows)
    ]
    processes = min(
        num_proc or len(os.sched_getaffinity(0)), 1 + size // _BYTES_PER_PROCESS, max(1, len(tasks))
    )
    lengths = [np.empty(0, dtype=np.int64)]
    with (
        in_processes(processes, Encoder(documents, encoding, dtype)) as encode,
        tqdm(total=len(documents), unit=" documents", desc=f"Tokenising {path.stem}") as progress,
    ):

        def parts() -> Iterator[np.ndarray]:
            for task, (ids, counts) in zip(tasks, encode(tasks), strict=True):
                lengths.append(counts)
                progress.update(len(task))
                yield ids

        _write(path, parts())
    result = np.concatenate(lengths)
    if empty := len(documents) - len(result):
        print(f"Left out {empty:,} empty documents of {len(documents):,} ({path.stem})", flush=True)
    return result


def _held_out(lengths: np.ndarray) -> int:
    """Tokens to hold out: those of the last documents or, of a single one, its last tokens."""
    if len(lengths) == 1:
        return max(1, round(HELD_OUT * int(lengths[0])))
    return int(lengths[-max(1, round(HELD_OUT * len(lengths))) :].sum())


def _move_end(count: int, dtype: np.dtype, source: Path, target: Path) -> None:
    """Moves the last `count` tokens of one file to another."""
    ids = np.memmap(source, dtype=dtype, mode="r")
    left = len(ids) - count
    _write(target, [ids[left:]])
    del ids
    os.truncate(source, left * dtype.itemsize)


def _write(path: Path, parts: Iterable[np.ndarray | bytes]) -> int:
    """Writes the parts one after another, down to the disk; returns the sum of their lengths."""
    count = 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            count += len(part)
        file.flush()
        os.fsync(file.fileno())
    return count
