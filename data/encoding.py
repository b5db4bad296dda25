"""Documents into token ids, by several processes at once that leave Ctrl-C to the first."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process

import numpy as np
import tiktoken

from .errors import DataError

Texts = list[str | None]
Encoded = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Encoder:
    """Encodes documents as plain text."""

    encoding: tiktoken.Encoding
    dtype: np.dtype

    def __call__(self, texts: Texts) -> Encoded:
        """The ids of these texts, concatenated, and how many each has: none, if it is empty.

        An end-of-text token follows each text. Raises DataError for a text that cannot be encoded.
        """
        end = self.dtype.type(self.encoding.eot_token)
        none = np.empty(0, self.dtype)
        ids = [np.append(self._encode(t).astype(self.dtype), end) if t else none for t in texts]
        counts = np.array([len(row) for row in ids], dtype=np.int64)
        return np.concatenate([none, *ids]), counts

    def _encode(self, text: str) -> np.ndarray:
        try:
            # An end of text that is written in the text is no special token.
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:  # tiktoken gives up on a million spaces in a row
            raise DataError(
                f"Cannot tokenise the text that begins {text[:40]!r}: {error}."
            ) from error


@contextmanager
def in_processes(
    processes: int, encoder: Encoder
) -> Iterator[Callable[[Iterable[Texts]], Iterator[Encoded]]]:
    """A function that maps `encoder` over lists of texts, in order, by that many processes.

    Processes of a terminal all get its Ctrl-C; the encoding ones ignore it and are ended by the
    first one's KeyboardInterrupt, each after the list it is at. Raises DataError if one dies.
    """
    if processes == 1:
        yield partial(map, encoder)
        return
    try:
        with ProcessPoolExecutor(
            processes, initializer=_start_process, initargs=(encoder,)
        ) as pool:
            with _interrupts_held_back():
                pool.submit(int)  # the first call starts the processes
            yield partial(_map, pool, 2 * processes)
    except BrokenProcessPool as error:
        raise DataError(
            f"One of {processes} processes that tokenise was killed, perhaps for want of memory: "
            "set num_proc lower."
        ) from error


def _map(pool: ProcessPoolExecutor, ahead: int, tasks: Iterable[Texts]) -> Iterator[Encoded]:
    """Like `pool.map`, but with no more than `ahead` tasks under way or waiting to be taken."""
    results = deque()
    for task in tasks:
        if len(results) == ahead:
            yield results.popleft().result()
        results.append(pool.submit(_encode_texts, task))
    while results:
        yield results.popleft().result()


def _start_process(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder  # once a process rather than once a task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _encode_texts(texts: Texts) -> Encoded:
    return _encoder(texts)


def _end_with_parent() -> None:
    """Ends this process if its parent is killed: it would wait for tasks for ever."""
    parent_process().join()
    os._exit(1)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C meanwhile takes effect at the end only, and never in the processes forked meanwhile.

    An interrupt in the midst of starting processes would leave some that nobody ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    seen = []
    usual = signal.signal(signal.SIGINT, lambda *signal_and_frame: seen.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if seen and callable(usual):
            usual(*seen[0])
