"""Files that are either whole or absent, and a directory for every run."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to, which takes its place when the block ends.

    If the block raises, `path` is left as it was and the temporary file is removed.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp's files are private
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def create_run(root: Path, name: str) -> Path:
    """A new directory `root/name`, or `root/name-2`, `root/name-3`, ... if that one is taken.

    Two processes that start at once get two directories: mkdir decides, not a look beforehand.
    """
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        run = root / (name if number == 1 else f"{name}-{number}")
        try:
            run.mkdir()
        except FileExistsError:
            number += 1
        else:
            return run


def newest_run(root: Path, name: str) -> Path | None:
    """The run of that name with the highest number, as `create_run` counts; None without one."""
    pattern = re.compile(re.escape(name) + r"(?:-([1-9]\d*))?")
    runs = {}
    for path in root.iterdir() if root.is_dir() else ():
        if (match := pattern.fullmatch(path.name)) and path.is_dir():
            runs[int(match[1] or 1)] = path
    return runs[max(runs)] if runs else None
