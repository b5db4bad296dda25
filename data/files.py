"""Local files of text: which kinds are read, what is wrong with one, and what is in a folder."""

import codecs
import re
import shutil
import tempfile
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pyarrow

from .errors import DataError

READERS = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_UNPACKERS = {".gz": "gzip", ".zst": "zstd"}
KINDS = f"{', '.join(READERS)}; the first three also with {' or '.join(_UNPACKERS)} after it"
# The words by which the hub, too, tells from a file's path which split it belongs to.
_HELD_OUT = {"validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
# What the hub's tools write beside the data.
_NOT_DATA = re.compile(r"(dataset_infos?|dataset_dict|config|state)\.json|cache-.*\.arrow")
_OUT_OF_SIGHT = re.compile(r"^\.|\.tmp$")  # hidden, or being written: a cache may be in there
_LARGEST_TXT = 2**31 - 1  # bytes in one Arrow string
_READ_CHUNK = 2**20  # bytes


def reader_of(path: Path) -> str | None:
    """The reader of `datasets` for a file of this name; None if there is none."""
    name = path.with_suffix("") if path.suffix.lower() in _UNPACKERS else path
    reader = READERS.get(name.suffix.lower())
    return reader if name is path or reader in ("text", "json") else None


def splits_of(path: Path) -> dict[str, list[Path]]:
    """The files of each split of a file or folder, in an order that does not depend on the disk.

    Raises DataError if there are none, one is empty, or they are of several kinds.
    """
    files = [path] if path.is_file() else _files_in(path)
    if empty := [str(file) for file in files if file.stat().st_size == 0]:
        raise DataError(f"Empty: {', '.join(empty)}.")
    splits: dict[str, list[Path]] = {}
    for file in files:
        split = _split_of(file.relative_to(path)) if file != path else "train"
        splits.setdefault(split, []).append(file)
    if "train" not in splits:
        raise DataError(
            f"{path} has no text to train on: its files are all named as "
            f"{' or '.join(sorted(splits))} data."
        )
    return dict(sorted(splits.items()))


def readable(file: Path, scratch: Path) -> Path:
    """The file or, if it is compressed, a copy in the folder `scratch` that is not.

    Raises DataError for text that is not UTF-8, and for a .txt file of more than 2 GiB.
    """
    reader, plain = reader_of(file), file
    if file.suffix.lower() in _UNPACKERS:
        plain = Path(tempfile.mkdtemp(dir=scratch)) / file.stem
        with _opened(file) as packed, plain.open("wb") as copy:
            shutil.copyfileobj(packed, copy, _READ_CHUNK)
        if plain.stat().st_size == 0:
            raise DataError(f"Empty: {file}.")
    if reader in ("text", "json"):
        _check_utf8(plain, file)
    if reader == "text" and plain.stat().st_size > _LARGEST_TXT:
        raise DataError(f"{file} is one document of more than 2 GiB: split it.")
    return plain


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    return pyarrow.input_stream(str(file), compression=_UNPACKERS[file.suffix.lower()])


def _files_in(folder: Path) -> list[Path]:
    """The data files under `folder`, sorted, which must be of one kind."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if reader_of(path)
        and not _NOT_DATA.fullmatch(path.name)
        and not any(map(_OUT_OF_SIGHT.search, path.relative_to(folder).parts))
        and path.is_file()
    )
    if not files:
        raise DataError(f"{folder} has no file of the kinds that are read: {KINDS}.")
    kinds = Counter(reader_of(file) for file in files)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise DataError(f"{folder} has files of several kinds ({counts}): keep one of them.")
    return files


def _split_of(path: Path) -> str:
    for split, words in _HELD_OUT.items():
        if re.search(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)", path.as_posix().lower()):
            return split
    return "train"


def _check_utf8(plain: Path, file: Path) -> None:
    """Raises DataError if `plain`, the content of `file`, is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with plain.open("rb") as content:
        while True:
            # A character cut by the end of the last chunk waits in the decoder.
            start = content.tell() - len(decoder.getstate()[0])
            chunk = content.read(_READ_CHUNK)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8: {error.reason} at byte offset {start + error.start}."
                ) from error
            if not chunk:
                return
