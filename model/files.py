"""Files that are either whole or absent, and a directory for every run."""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_TEMPORARY = ".tmp-"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to, which takes its place when the block ends.

    If the block raises, `path` is left as it was and the temporary file is removed. An OSError
    that says no file, as a full disk's does, or the temporary one gets the name of this one.
    """
    prefix = f"{_TEMPORARY}{path.stem}-"
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=path.suffix)
    temporary = Path(name)
    try:
        yield temporary
        os.fsync(fd)  # a rename that outlives a power cut should not outlive the content
        temporary.chmod(0o666 & ~_umask())  # mkstemp's files are private
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, name):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class InUse(Exception):
    """A folder that another process has."""


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keeps `folder` for this process, and removes what a killed one left half-written in it.

    The system takes the lock back when the process dies, however it dies.

    Raises:
        InUse: if another process has the folder.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(folder) from None
        except OSError:
            pass  # some network file systems lock no folders
        for leftover in folder.glob(f"{_TEMPORARY}*"):
            leftover.unlink()
        yield
    finally:
        os.close(fd)


def create_run(root: Path, name: str) -> Path:
    """A new directory `root/name`, or `root/name-N` with N above that of every run of this name.

    Two processes that start at once get two directories: mkdir decides, not a look beforehand.

    Raises:
        OSError: if there can be no such directory.
    """
    root.mkdir(parents=True, exist_ok=True)
    number = max(_runs(root, name), default=0) + 1
    while True:
        run = root / (name if number == 1 else f"{name}-{number}")
        try:
            run.mkdir()
        except FileExistsError:
            number += 1
        else:
            return run


def newest_run(root: Path, name: str, accept: Callable[[Path], bool] = Path.is_dir) -> Path | None:
    """The accepted run of that name with the highest number, as `create_run` counts, or None."""
    runs = {number: path for number, path in _runs(root, name).items() if accept(path)}
    return runs[max(runs)] if runs else None


def _runs(root: Path, name: str) -> dict[int, Path]:
    """The directories in `root` of that name, by number."""
    pattern = re.compile(re.escape(name) + r"(?:-([1-9]\d*))?")
    matches = (
        {path: pattern.fullmatch(path.name) for path in root.iterdir()} if root.is_dir() else {}
    )
    return {int(match[1] or 1): path for path, match in matches.items() if match and path.is_dir()}
