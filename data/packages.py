"""Finds data files that other packages install, without importing those packages."""

from importlib import metadata
from pathlib import Path

from .errors import DataError


def package_file(package: str, name: str) -> Path:
    """The path of file `name` (as in the package's RECORD) of an installed distribution.

    Raises DataError if the package or the file is missing.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.as_posix() == name and (path := Path(file.locate())).is_file():
            return path
    raise DataError(f"{name} of the package {package} is missing: pip install {package}")
