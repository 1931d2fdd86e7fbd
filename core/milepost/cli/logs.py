"""`milepost logs`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from milepost.errors import DataError

POLL_SECONDS = 0.2


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.argument("role", required=False)
@click.option("-n", "--lines", default=20, show_default=True, type=click.IntRange(min=0), help="Last lines to show.")
@click.option("-f", "--follow", is_flag=True, help="Go on showing what is written, until Ctrl-C.")
def logs(run_dir: Path, role: str | None, lines: int, follow: bool) -> None:
    """Show the logs of a run's processes.

    The end of each, one per process: controller, trainer-0, engine-0, reward-0 and so on. ROLE is a process
    (trainer-0) or all of a kind (trainer); without it all are shown.
    """
    from milepost.cluster.logs import find_logs, log_folder, tail

    folder = log_folder(run_dir)
    found = find_logs(run_dir, role)
    if not found:
        there = sorted({str(path.relative_to(folder).with_suffix("")) for path in find_logs(run_dir)})
        expected = f"there are {', '.join(there)}" if there else "a run writes them when it starts"
        raise DataError(f"no logs of {role or 'any process'} in {folder}; {expected}")
    for path in found:
        if len(found) > 1:
            click.echo(f"==> {path.relative_to(folder)} <==")
        for line in tail(path, lines):
            click.echo(line)
    if follow:
        _follow(found, folder)


def _follow(paths: Sequence[Path], folder: Path) -> None:
    """Print what is appended to the files, each line with its file's name if there are several."""
    files = [(path, path.open("rb")) for path in paths]
    for _, file in files:
        file.seek(0, 2)
    parts = dict.fromkeys(paths, b"")
    while True:
        for path, file in files:
            *whole, parts[path] = (parts[path] + file.read()).split(b"\n")
            for line in whole:
                mark = f"[{path.relative_to(folder).with_suffix('')}] " if len(paths) > 1 else ""
                click.echo(mark + line.decode(errors="replace"))
        time.sleep(POLL_SECONDS)
