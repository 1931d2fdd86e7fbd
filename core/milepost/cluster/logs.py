"""One log per process of a run: RUN_DIR/logs/ROLE-RANK.log, and `controller.log`."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

SHOWN_LINES = 20
"""Lines of a log that a failure shows."""
_TAIL_BYTES = 64 * 1024


def log_folder(run_dir: Path) -> Path:
    """Return the folder of a run's logs."""
    return run_dir / "logs"


def find_logs(run_dir: Path, role: str | None = None) -> list[Path]:
    """Return a run's logs, the controller's first; those of one role (`trainer`) or process (`trainer-0`) alone.

    Held-out sets with a reward of their own have their reward processes' logs in a folder of their name.
    """
    logs = sorted(log_folder(run_dir).rglob("*.log"), key=lambda path: (path.stem != "controller", str(path)))
    return [path for path in logs if role is None or role in (path.stem, path.stem.rpartition("-")[0])]


def tail(path: Path, lines: int = SHOWN_LINES) -> list[str]:
    """Return the last lines of a log; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return text.splitlines()[-lines:]


def shown_tail(path: Path) -> str:
    """Return a log's path and its last lines, as a failure shows them."""
    lines = tail(path)
    if not lines:
        return f"log: {path} (empty)"
    count = "the last line" if len(lines) == 1 else f"the last {len(lines)} lines"
    return "\n".join([f"log: {path}, {count}:", *(f"  {line}" for line in lines)])


def redirect_output(path: Path) -> None:
    """Send all that this process prints, compiled code included, to the end of a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    # Ray's workers have streams of their own on those descriptors; lines are to appear when they are printed.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="replace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}", flush=True)


class _Tee:
    """A text stream that also writes to a log what is not the redrawing of a progress bar."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        if "\r" not in text and "\x1b" not in text:
            self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def controller_log(run_dir: Path) -> Iterator[None]:
    """Keep what this process prints, and the traceback of what ends the run, in `controller.log` too."""
    path = log_folder(run_dir) / "controller.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    stdout, stderr = sys.stdout, sys.stderr
    with path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1) as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}\n")
        sys.stdout, sys.stderr = _Tee(stdout, log), _Tee(stderr, log)
        try:
            yield
        except BaseException:
            log.write(traceback.format_exc())
            raise
        finally:
            sys.stdout, sys.stderr = stdout, stderr
