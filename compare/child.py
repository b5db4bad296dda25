"""Parts of a comparison in fresh processes, whose memory, caches and compilers start empty.

They are forked from a server that has imported everything and done nothing else, so that a
process costs no imports.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compare.setup import from_config

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all
PRELOADED = ["compare.speed", "compare.profile", "compare.memory", "compare.parity"]


class ChildError(RuntimeError):
    """A process that ended without a result; the message has the end of what it printed."""


def call(
    target: str,
    config: dict,
    progress: Progress,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """What `target(settings, progress, **arguments)` returns in a process of its own.

    Args:
        target: "package.module:function"; its arguments and result are plain values (JSON).
        config: Of the settings, as `from_config` takes it.
        progress: Gets what the function reports.
        environment: Variables that are set on top of this process's own.

    Raises:
        ChildError: if the function raises or its process dies.
    """
    # Asks for GPUs without touching CUDA, which would not survive the server's fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        printed = Path(folder) / "printed"
        request = target, config, {**os.environ, **(environment or {})}, arguments
        process = context.Process(target=_answer, args=(sender, str(printed), *request))
        process.start()
        sender.close()
        try:
            result = _relay(receiver, progress)
            process.join()
        except BaseException:
            process.kill()
            process.join()
            raise
        if result is None:
            lines = printed.read_text().splitlines()[-20:] if printed.exists() else []
            raise ChildError(
                f"{target} failed in its process (exit status {process.exitcode}):\n"
                + "\n".join(lines)
            )
    return json.loads(result)


def _relay(receiver: Connection, progress: Progress) -> str | None:
    """The other side's result, None if it ends without one; its reports go to `progress`."""
    while True:
        try:
            report, result = receiver.recv()
        except EOFError:
            return None
        if result is not None:
            return result
        progress(*report)


def _answer(
    sender: Connection, printed: str, target: str, config: dict, variables: dict, arguments: dict
) -> None:
    """The other side of `call`; all that it prints, or its libraries do, goes to a file."""
    file = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.environ.clear()
    os.environ.update(variables)
    module, _, function = target.partition(":")
    found = getattr(importlib.import_module(module), function)(
        from_config(config),
        lambda what, done, total: sender.send(((what, done, total), None)),
        **arguments,
    )
    sender.send((None, json.dumps(found)))
