"""Parts of a comparison in fresh processes, whose memory, caches and compilers start empty.

They are forked from a server that has imported everything and done nothing else, so that a
process costs no imports.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from compare.setup import from_config

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all
PRELOADED = [f"compare.{part}" for part in ("speed", "profile", "memory", "exactness", "training")]


class ChildError(RuntimeError):
    """A process that ended without a result; the message has the end of what it printed."""


class Child:
    """A call that runs in a process of its own.

    Args:
        target: "package.module:function"; its arguments and result are plain values (JSON).
        config: Of the settings, as `from_config` takes it.
        progress: Gets what the function reports.
        environment: Variables that are set on top of this process's own.
    """

    def __init__(
        self,
        target: str,
        config: dict,
        progress: Progress,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        # Asks for GPUs without touching CUDA, which would not survive the server's fork.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.receiver, sender = context.Pipe(duplex=False)
        self._target, self._progress, self._result = target, progress, None
        self._folder = tempfile.TemporaryDirectory(prefix="compare-")
        self._printed = Path(self._folder.name) / "printed"
        request = target, config, {**os.environ, **(environment or {})}, arguments
        self._process = context.Process(target=_answer, args=(sender, str(self._printed), *request))
        _start_server()
        self._process.start()
        sender.close()

    def listen(self) -> bool:
        """Wait for what the process says next; returns whether that was all."""
        try:
            report, self._result = self.receiver.recv()
        except EOFError:
            return True
        if report:
            self._progress(*report)
        return self._result is not None

    def result(self) -> Any:
        """What the function returned, once there is no more to listen to.

        Raises:
            ChildError: if the function raised or its process died.
        """
        self._process.join()
        printed = self._printed.read_bytes() if self._printed.exists() else b""
        lines = printed.decode(errors="replace").splitlines()
        self._folder.cleanup()
        if self._result is None:
            raise ChildError(
                f"{self._target} failed in its process (exit status {self._process.exitcode}):\n"
                + "\n".join(lines[-20:])
            )
        return json.loads(self._result)

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def _start_server() -> None:
    """Start the server if there is none, deaf to Ctrl-C, as are the processes that it forks.

    Ctrl-C is for this process, which ends the others.
    """
    resource_tracker.ensure_running()  # which would let the signal through again as it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def call(*request: Any, **options: Any) -> Any:
    """The result of a `Child` made of these arguments.

    Raises:
        ChildError: if the function raises or its process dies.
    """
    [(_, result)] = call_all({"": lambda: Child(*request, **options)}, at_once=1)
    return result


def call_all(starts: dict[Any, Callable[[], Child]], at_once: int) -> Iterator[tuple[Any, Any]]:
    """Name and result of every child, in the order in which they end.

    Args:
        starts: What starts each of them, by name.
        at_once: How many may run at a time.

    Raises:
        ChildError: if one of them fails; the others are ended.
    """
    waiting, running = deque(starts.items()), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, start = waiting.popleft()
                child = start()
                running[child.receiver] = name, child
            for receiver in wait(list(running)):
                name, child = running[receiver]
                if child.listen():
                    del running[receiver]
                    yield name, child.result()
    finally:
        for _, child in running.values():
            child.kill()


@dataclass(frozen=True)
class Kept:
    """Results of calls that are kept until the whole is complete, and then need no second call.

    Args:
        found: By name.
        save: Called after each that is added.
    """

    found: dict[str, Any] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __call__(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was kept under this name, or else what `measure` returns."""
        if name not in self.found:
            self.found[name] = measure()
            self.save()
        return self.found[name]


def _answer(
    sender: Connection, printed: str, target: str, config: dict, variables: dict, arguments: dict
) -> None:
    """The other side of `Child`; all that it prints, or its libraries do, goes to a file."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        file = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # Ctrl-C ended the one that asked before this process was forked
        os._exit(1)
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


def _end_with_parent() -> None:
    """End this process when the one that asked for it is gone, however that ended."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
