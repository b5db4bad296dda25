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

from .errors import DataError, causes
from .sources import Source
from .tokenizer import tokenizer_fingerprint

# Raise it when the same text and tokenizer would give other token files than before.
FORMAT_VERSION = 1
HELD_OUT = 0.05  # of the documents, where the source has no validation split of its own
_BYTES_PER_PROCESS = 2**23  # of text; below it a process costs more time than it saves


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
            # At most a token a byte, once in Arrow's form and once in ours.
            needed = 2 * dtype.itemsize * sum(rows.data.nbytes for rows in documents.values())
            tokenised = {
                split: _tokenise(split, rows, encoding, dtype, scratch, num_proc)
                for split, rows in documents.items()
            }
            tokens = {
                split: _write(partial / f"{split}.bin", arrays)
                for split, arrays in _with_validation(tokenised).items()
            }
            if without := [split for split, count in tokens.items() if count == 0]:
                raise DataError(f"No text in the {without[0]} split: all its documents are empty.")
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
    split: str,
    documents: datasets.Dataset,
    encoding: tiktoken.Encoding,
    dtype: np.dtype,
    scratch: Path,
    num_proc: int | None,
) -> datasets.Dataset:
    """Rows of token ids, each with the end of text as its last, for all documents not empty."""
    end = encoding.eot_token

    def encode(batch: dict[str, list]) -> dict[str, list[np.ndarray]]:
        (texts,) = batch.values()
        ids = [_encode(text, encoding) for text in texts if text]
        return {"ids": [np.append(row, end).astype(dtype) for row in ids]}

    processes = min(
        num_proc or len(os.sched_getaffinity(0)),
        1 + documents.data.nbytes // _BYTES_PER_PROCESS,
        max(1, len(documents)),
    )
    try:
        ids = documents.map(
            encode,
            batched=True,
            remove_columns=documents.column_names,
            features=datasets.Features({"ids": datasets.List(datasets.Value(dtype.name))}),
            num_proc=processes if processes > 1 else None,
            desc=f"Tokenising {split}",
            cache_file_name=str(scratch / f"{split}-ids.arrow"),
            new_fingerprint=f"{split}-ids",  # spares hashing the tokenizer
            load_from_cache_file=False,
        )
    except Exception as error:
        # Ctrl-C makes `datasets` end its processes, and then complain that they have ended.
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes(error)):
            raise KeyboardInterrupt from error
        raise
    if empty := len(documents) - len(ids):
        print(f"Left out {empty:,} empty documents of {len(documents):,} ({split})", flush=True)
    return ids


def _encode(text: str, encoding: tiktoken.Encoding) -> np.ndarray:
    """The ids of plain text, uint32: an end of text written in it is no special token."""
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError as error:  # tiktoken gives up on a million spaces in a row
        raise DataError(f"Cannot tokenise the text that begins {text[:40]!r}: {error}.") from error


def _with_validation(ids: dict[str, datasets.Dataset]) -> dict[str, Iterable[np.ndarray]]:
    """Holds out the end of "train" unless there is a "validation" already.

    That is the last documents or, of a single document, its last tokens.
    """
    train = ids["train"]
    if "validation" in ids or len(train) == 0:
        return {split: _arrays(rows) for split, rows in ids.items()}
    if len(train) == 1:
        (tokens,) = _arrays(train)
        cut = len(tokens) - max(1, round(HELD_OUT * len(tokens)))
        return {"train": [tokens[:cut]], "validation": [tokens[cut:]]}
    cut = len(train) - max(1, round(HELD_OUT * len(train)))
    return {
        "train": _arrays(train.select(range(cut))),
        "validation": _arrays(train.select(range(cut, len(train)))),
    }


def _arrays(ids: datasets.Dataset) -> Iterator[np.ndarray]:
    """The ids of consecutive rows, concatenated."""
    for table in ids.with_format("arrow").iter(batch_size=1000):
        for chunk in table["ids"].chunks:
            yield chunk.flatten().to_numpy()


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
