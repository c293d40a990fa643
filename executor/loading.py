"""Progress of reading checkpoints: bytes, speed and time left, for a terminal or for whoever asks."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..traces.console import tell
from .shards import Files

SMALL = 2**28  # bytes that are read before a bar could be seen
Watch = Callable[[int, int], None]  # bytes read, bytes in all


@contextmanager
def watching(watch: Watch | None, files: Sequence[Files]) -> Iterator[None]:
    """While it is open, `watch` hears of every tensor that is read from `files`; None: a bar, on a terminal."""
    total = sum(one.size for one in files)
    if watch is None and (total < SMALL or not sys.stderr.isatty()):
        yield
        return
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    if watch is None:
        tell("")  # the bar begins where the cursor is
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=watch is not None) as bar:
        task = bar.add_task("loading", total=total)
        done = 0

        def read(size: int) -> None:
            nonlocal done
            done += size
            if watch is None:
                bar.update(task, completed=done)
            else:
                watch(done, total)

        for one in files:
            one.on_read = read
        try:
            yield
            read(total - done)  # what a kept store spared
        finally:
            for one in files:
                one.on_read = None
