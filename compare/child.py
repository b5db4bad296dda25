"""Parts of a comparison in fresh processes, whose memory, caches and compilers start empty."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.setup import from_config

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all
MARK = "compare-progress "  # begins the lines of a child's output that are meant for its parent


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
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        request, result, errors = (Path(name) / file for file in ("request", "result", "errors"))
        request.write_text(json.dumps({"target": target, "config": config, "arguments": arguments}))
        command = [sys.executable, "-m", "compare.child", str(request), str(result)]
        path = os.pathsep.join(filter(None, sys.path))  # it finds the modules that we find
        variables = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables
            ) as process,
        ):
            try:
                _relay(process, progress)
            except BaseException:
                process.kill()
                raise
        if process.returncode or not result.exists():
            lines = errors.read_text().splitlines()[-20:]
            raise ChildError(
                f"{target} failed in its process (exit status {process.returncode}):\n"
                + "\n".join(lines)
            )
        return json.loads(result.read_text())


def _relay(process: subprocess.Popen, progress: Progress) -> None:
    for line in process.stdout:
        if line.startswith(MARK):
            progress(*json.loads(line.removeprefix(MARK)))


def main(request: str, result: str) -> None:
    """The other side of `call`: what the function prints goes to stderr, progress to stdout."""
    channel, sys.stdout = sys.stdout, sys.stderr

    def progress(what: str, done: int, total: int) -> None:
        print(f"{MARK}{json.dumps([what, done, total])}", file=channel, flush=True)

    wanted = json.loads(Path(request).read_text())
    module, _, function = wanted["target"].partition(":")
    found = getattr(importlib.import_module(module), function)(
        from_config(wanted["config"]), progress, **wanted["arguments"]
    )
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
