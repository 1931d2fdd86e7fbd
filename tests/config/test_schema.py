from __future__ import annotations

from pathlib import Path
from typing import Any

from milepost.components import KERNEL_KEYS
from milepost.config.json_schema import run_config_schema
from milepost.config.messages import models_in
from milepost.config.schema import ComponentSection, RunConfig
from milepost.registry import Registry
from pydantic import BaseModel


def models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a model and all models its fields hold."""
    below = [nested for field in model.model_fields.values() for nested in models_in(field.annotation)]
    return {model}.union(*(models(nested) for nested in below))


def test_every_field_has_a_description() -> None:
    fields = {
        f"{model.__name__}.{name}": field.description
        for model in models(RunConfig)
        for name, field in model.model_fields.items()
    }
    assert len(fields) > 130
    assert [name for name, description in fields.items() if not description or not description.endswith(".")] == []


def test_every_section_is_described() -> None:
    assert [model.__name__ for model in models(RunConfig) if not model.__doc__] == []


def test_kernel_keys_are_the_declared_fields() -> None:
    for section in ComponentSection.__subclasses__():
        assert KERNEL_KEYS[section.kind] == set(section.model_fields)  # type: ignore[index]


def references(schema: Any) -> set[str]:
    """Return all `$ref` targets."""
    if isinstance(schema, dict):
        own = {schema["$ref"]} if "$ref" in schema else set()
        return own.union(*(references(value) for value in schema.values()))
    if isinstance(schema, list):
        return set().union(*(references(value) for value in schema))
    return set()


def test_json_schema_covers_components(project: Path) -> None:
    registry = Registry.load(modules=["toy_parts"], base_dir=project, discover=list)
    schema = run_config_schema(registry)
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    algorithm = schema["$defs"]["AlgorithmSection"]["oneOf"]
    toy = next(variant for variant in algorithm if variant["properties"]["name"].get("const") == "toy")
    assert toy["properties"]["eps_clip"]["description"] == "How far the ratio may move."
    assert toy["properties"]["eps_clip"]["default"] == 0.2
    assert "kl_loss_coef" in toy["properties"]
    assert toy["additionalProperties"] is False
    assert toy["required"] == ["name"]
    reward = schema["$defs"]["RewardSection"]["oneOf"]
    function = next(variant for variant in reward if variant["properties"]["name"]["const"] == "toy_function")
    assert function["required"] == ["function", "name"]
    transport = schema["$defs"]["TransportSection"]["oneOf"]
    assert [variant["properties"]["name"].get("const") for variant in transport] == [
        None,
        "toy_any",
        "toy_far",
        "toy_near",
    ]
    for target in references(schema):
        assert target.removeprefix("#/$defs/") in schema["$defs"]
