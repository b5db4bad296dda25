"""Progress of a comparison: which part, what in it, and how long that part will still take."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def live(title: str) -> Iterator["Part"]:
    """Progress of one part, to be called with what is done, steps done and steps in all.

    One live line on a terminal; elsewhere a plain line every few seconds.
    """
    started, console = time.monotonic(), Console(file=sys.stdout)
    if console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn()
        left = TextColumn("{task.fields[left]}")
        with Progress(*columns, left, console=console, transient=True) as bar:
            yield Part(title, bar)
    else:
        print(f"{title} ...", flush=True)
        yield Part(title, None)
    print(f"{title}: {_clock(time.monotonic() - started)}", flush=True)


class Part:
    """The progress function of one part."""

    def __init__(self, title: str, bar: Progress | None) -> None:
        self._title, self._bar = title, bar
        self._task = bar and bar.add_task(title, total=None, left="")
        self._latest = 0, 0  # steps done and in all
        self._start = 0, 0.0  # of this phase: steps done, time
        self._last_line = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if total != self._latest[1] or done < self._latest[0]:  # another phase has begun
            self._start = done, now
        self._latest = done, total
        first, started = self._start
        steps = done - first
        left = f"{_clock((now - started) / steps * (total - done))} left" if steps else ""
        if self._bar:
            description = f"{self._title}: {what}"
            self._bar.update(
                self._task, description=description, completed=done, total=total, left=left
            )
        elif now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"  {what} {done}/{total}  {left}".rstrip(), flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
