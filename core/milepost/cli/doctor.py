"""`milepost doctor`: does what is installed here go together, and is the machine fit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the facts and the findings.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="Where runs are written; default here.",
)
def doctor(as_json: bool, folder: Path) -> None:
    """Check versions, GPUs and the machine; each finding says what to do. Exits 1 if there is a problem."""
    from milepost.doctor import collect, examine

    facts = collect(folder.absolute())
    findings = examine(facts)
    problems = [finding for finding in findings if finding.level == "problem"]
    if as_json:
        click.echo(json.dumps({"facts": asdict(facts), "findings": [asdict(one) for one in findings]}, indent=2))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            click.echo(f"{MARKS[finding.level]}  {finding.topic:<{width}}  {finding.message}")
            if finding.remedy:
                click.echo(f"{'':<{len(MARKS['ok'])}}  {'':<{width}}  -> {finding.remedy}")
        noun = "problem" if len(problems) == 1 else "problems"
        click.echo(f"\n{len(problems)} {noun}" if problems else "\nno problems")
    if problems:
        raise click.exceptions.Exit(1)
