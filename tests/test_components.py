from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest
from milepost import hookspecs
from milepost.components import KERNEL_KEYS, Kind, Options
from milepost.config.schema import ComponentSection, RunConfig
from milepost.discovery import HOOKS
from milepost.registry import Registry
from pydantic import Field, ValidationError


@pytest.mark.parametrize(("hook", "kind"), HOOKS.items())
def test_the_example_of_every_hook_is_a_complete_plugin(hook: str, kind: Kind, tmp_path: Path) -> None:
    documented = inspect.getdoc(getattr(hookspecs, hook))
    assert documented is not None
    (tmp_path / "example.py").write_text(textwrap.dedent(documented.split("Example::\n")[1]))
    registry = Registry.load(modules=["example"], base_dir=tmp_path, discover=list)
    (record,) = registry.plugins
    assert record.error == ""
    assert len(registry.names(kind)) == 1


def test_options_know_their_descriptions_once_they_are_used() -> None:
    class Model(Options):
        scale: float = 1.0
        """What the score
        is multiplied by."""

    assert Model.model_validate({}) == Model()
    assert Model.model_fields["scale"].description == "What the score\nis multiplied by."
    assert Model.model_json_schema()["properties"]["scale"]["description"] == "What the score\nis multiplied by."


def test_options_inherit_descriptions_and_an_explicit_one_wins() -> None:
    class Base(Options):
        first: int = 1
        """Said in the base class."""

    class Derived(Base):
        second: int = Field(2, description="Said in the field.")
        """Said below."""
        third: int = 3

    properties = Derived.model_json_schema()["properties"]
    assert [properties[name].get("description") for name in ("first", "second", "third")] == [
        "Said in the base class.",
        "Said in the field.",
        None,
    ]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Derived.model_validate({"fourth": 4})
    with pytest.raises(ValidationError, match="frozen"):
        Derived().first = 2  # type: ignore[misc]


def test_kernel_keys_are_the_declared_fields_of_the_sections() -> None:
    sections = [field.annotation for field in RunConfig.model_fields.values()]
    declared = {
        section.kind: frozenset(section.model_fields)
        for section in sections
        if isinstance(section, type) and issubclass(section, ComponentSection)
    }
    assert {kind: keys for kind, keys in KERNEL_KEYS.items() if kind != "model"} == declared
    assert KERNEL_KEYS["model"] == frozenset()
