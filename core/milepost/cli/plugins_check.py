"""`milepost plugins check`: the conformance kit from the command line."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milepost.cli.options import block_option
from milepost.cli.plugin_lookup import find, indent, json_option, kind_option, load_plugins, warn
from milepost.components import Kind

if TYPE_CHECKING:
    from milepost.registry import Registry
    from milepost.testing.plugins import Report, Settings

FOUND = 1
"""Exit code where a promise was not kept."""


@click.command("check")
@click.argument("target", metavar="NAME|PATH")
@kind_option
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="An option of the component's. May be repeated."
)
@click.option("--label", metavar="YAML", help="Label of a reward's samples, as your data would have it.")
@click.option("--metadata", metavar="YAML", help="Metadata of a reward's samples, as your data would have it.")
@click.option(
    "--config",
    type=click.Path(exists=True, path_type=Path),
    help="config.json, or a checkpoint's folder, that a model recipe is tried on; its sizes are made tiny.",
)
@block_option
@json_option
@click.pass_context
def check_plugin(
    ctx: click.Context,
    target: str,
    kind: Kind | None,
    sets: tuple[str, ...],
    label: str | None,
    metadata: str | None,
    config: Path | None,
    block: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run the conformance kit on a plugin: every promise of its kind.

    NAME is a component or a plugin that is installed. PATH is a folder with a pyproject.toml, a module (my_reward.py)
    or a package; it need not be installed. Exits 1 if a promise is not kept.
    """
    from milepost.testing.plugins import Settings

    settings = Settings(
        options=_options(sets),
        label=_yaml("--label", label),
        metadata=_mapping("--metadata", metadata),
        config=config,
    )
    reports = _check(target, kind, settings, block)
    failed = sum(len(report.findings) for report in reports)
    if as_json:
        data = [
            {
                "what": report.what,
                "origin": report.origin,
                "findings": [dataclasses.asdict(finding) for finding in report.findings],
            }
            for report in reports
        ]
        click.echo(json.dumps({"ok": not failed, "reports": data}, indent=2))
    else:
        for line in _lines(reports):
            click.echo(line)
        click.echo(
            "every promise is kept" if not failed else f"{failed} promises broken" if failed > 1 else "1 promise broken"
        )
    if failed:
        ctx.exit(FOUND)


def _check(target: str, kind: Kind | None, settings: Settings, block: tuple[str, ...]) -> list[Report]:
    from milepost.testing.plugins import check_component, check_record, check_records, plugins_at

    if _is_path(target):
        with plugins_at(Path(target), block) as (registry, records), _in_use(registry):
            warn(registry)
            return check_records(records, settings, kind)
    registry = load_plugins(block)
    with _in_use(registry):
        found = find(registry, target, kind)
        owners = {item.label for item in found}
        reports = [check_record(record) for record in registry.plugins if record.label in owners]
        return reports + [check_component(item, settings) for item in found]


@contextmanager
def _in_use(registry: Registry) -> Iterator[None]:
    """Let components reach others through `milepost.resolve`."""
    from milepost.registry import use

    use(registry)
    try:
        yield
    finally:
        use(None)


def _is_path(target: str) -> bool:
    return (
        target in (".", "..")
        or os.sep in target
        or target.endswith(".py")
        or (Path(target) / "pyproject.toml").is_file()
    )


def _lines(reports: Iterable[Report]) -> Iterator[str]:
    for report in reports:
        state = "ok" if not report.findings else f"{len(report.findings)} broken"
        yield f"{report.what} from {report.origin}: {state}"
        for finding in report.findings:
            yield f"  {finding.promise}"
            for name in ("case", "expected", "got"):
                first, *rest = str(getattr(finding, name)).splitlines() or [""]
                yield f"    {name + ':':<10}{first}"
                yield from indent("\n".join(rest), " " * 14).splitlines()


def _options(sets: Iterable[str]) -> dict[str, Any]:
    """Read `KEY=VALUE` texts; dots in a key go into mappings."""
    options: dict[str, Any] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--set")
        *parents, last = key.split(".")
        inner = options
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = _yaml("--set", value)
    return options


def _yaml(option: str, text: str | None) -> Any:
    import yaml

    if text is None:
        return None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.BadParameter(f"{text!r} is not YAML: {error}", param_hint=option) from None


def _mapping(option: str, text: str | None) -> dict[str, Any]:
    value = _yaml(option, text)
    if value is not None and not isinstance(value, dict):
        raise click.BadParameter(f"{text!r} is not a mapping such as {{source: gsm8k}}", param_hint=option)
    return value or {}
