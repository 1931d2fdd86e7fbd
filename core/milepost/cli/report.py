"""`milepost report`."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import click


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN_DIR...")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Default RUN_DIR/report.html.")
@click.option("--open", "open_it", is_flag=True, help="Show the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary's figures as JSON, and write no page.")
def report(run_dirs: tuple[Path, ...], output: Path | None, open_it: bool, as_json: bool) -> None:
    """Show runs as one HTML page: curves, timing, samples, config.

    Several runs are compared; those that differ by their seed alone (`ppo-seed0`, `ppo-seed1`) become one line with
    their range. Of several runs the page is `report.html` in the working directory.
    """
    from milepost.report import read_runs, render, summarise

    runs = read_runs(run_dirs)
    if as_json:
        click.echo(json.dumps(summarise(runs), indent=2))
        return
    if output is None:
        output = (run_dirs[0] if len(run_dirs) == 1 else Path()) / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(runs), encoding="utf-8")
    click.echo(str(output))
    if open_it:
        webbrowser.open(output.absolute().as_uri())
