"""The run config as a JSON Schema, for editors: with the options of every installed component."""

from __future__ import annotations

import copy
from typing import Any

from milepost.components import Kind
from milepost.config.schema import ComponentSection, RunConfig
from milepost.registry import Registry


def run_config_schema(registry: Registry) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a run config.

    A section that names a component is a `oneOf` over the components the registry has, each with the kernel's keys and
    its own options.
    """
    schema = RunConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for section in ComponentSection.__subclasses__():
        original = definitions[section.__name__]
        variants = [_variant(original, section, registry, name, definitions) for name in registry.names(_kind(section))]
        if section.model_fields["name"].get_default() is None and not section.model_fields["name"].is_required():
            variants.insert(0, _unnamed(original))
        definitions[section.__name__] = {"description": original["description"], "oneOf": variants}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _kind(section: type[ComponentSection]) -> Kind:
    kind: Kind = section.kind  # type: ignore[assignment]
    return kind


def _variant(
    original: dict[str, Any],
    section: type[ComponentSection],
    registry: Registry,
    name: str,
    definitions: dict[str, Any],
) -> dict[str, Any]:
    """Return the section's schema for one component, putting what its options refer to under names of its own."""
    kind = _kind(section)
    component = registry.get(kind, name).component
    options = component.options.model_json_schema(ref_template=f"#/$defs/{kind}.{name}.{{model}}")
    for model, definition in options.pop("$defs", {}).items():
        definitions[f"{kind}.{name}.{model}"] = definition
    variant = copy.deepcopy(original)
    variant["title"] = f"{kind} {name}"
    variant["description"] = component.summary
    variant["properties"] |= options.get("properties", {})
    variant["properties"]["name"] = {"const": name, "description": original["properties"]["name"]["description"]}
    variant["additionalProperties"] = False
    required = {*original.get("required", ()), *options.get("required", ())}
    if section.model_fields["name"].get_default() != name:
        required.add("name")
    variant["required"] = sorted(required)
    return variant


def _unnamed(original: dict[str, Any]) -> dict[str, Any]:
    """Return the section's schema without a name: its component, and so its options, follow from other sections."""
    variant = copy.deepcopy(original)
    variant["properties"]["name"] = {"type": "null", "description": original["properties"]["name"]["description"]}
    return variant
