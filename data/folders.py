"""Where this package keeps what it has prepared, unless told otherwise."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`triton-rmsnorm-gpt` under $XDG_CACHE_HOME, or else under ~/.cache."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(cache) / "triton-rmsnorm-gpt"


def cache_folder(name: str | None) -> Path:
    """The folder of that name, or else the default one."""
    return Path(os.path.expanduser(name)) if name else default_cache_dir()
