"""The JSON schemas of what the commands write, made from the types of their documents.

New keys may be added within schema_version 1, so no object is closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

from moedoctor.reporters.json import Ending, Head, load_documents
from moedoctor.results import Report

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def import_document_type(command: str) -> Any:
    """Return the type of what `command` writes. Only the module of that type is imported."""
    return resolve_name(load_documents()[command]["type"])


def make_schema(command: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of what `command` writes."""
    kind, head = import_document_type(command), _make_schema(Head)
    made = _merge_schemas([_make_schema(part) for part in get_args(kind) or (kind,)])
    definitions = {**head["$defs"], **made.get("$defs", {})}
    if kind is Report:
        name: dict[str, Any] = {"type": "string"}
    else:
        name = {"const": command, "type": "string"}
        made["properties"]["summary"] = _make_summary(kind, made, definitions)
    first = {**head["properties"], "command": name}
    required = [*head["required"], "command", *made["required"]]
    if getattr(kind, "summary", None) is not None:
        required.append("summary")
    return {
        "$schema": DRAFT,
        "$id": f"urn:moedoctor:{command}:1",
        "title": f"moedoctor {command}",
        "description": f"`moedoctor {command}`.",
        "type": "object",
        "properties": {**first, **made["properties"], **first},
        "required": list(dict.fromkeys(required)),
        "$defs": definitions,
    }


def _make_schema(kind: Any) -> dict[str, Any]:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            made = super().dataclass_schema(schema)
            for each in filter(_is_sparse, fields(schema["cls"])):
                # JSON leaves the key out instead of writing null.
                value = made["properties"][each.metadata.get("alias", each.name)]
                kept = [choice for choice in value.pop("anyOf", ()) if choice != {"type": "null"}]
                value |= kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else {}
                value.pop("default", None)
            return made

    made = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=Generator)
    if is_dataclass(kind) and kind is not Report:
        # Pydantic requires only fields without a default, and JSON has the others, too.
        made["required"] = [each.name for each in fields(kind) if not _is_sparse(each)]
    return made


def _is_sparse(field: Field[Any]) -> bool:
    return bool(field.metadata.get("sparse"))


def _merge_schemas(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of objects that are of one of these; a key is required if all require it."""
    values: dict[str, list[Any]] = {}
    for schema in schemas:
        for name, value in schema["properties"].items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return {
        "properties": {name: each[0] if len(each) == 1 else {"anyOf": each} for name, each in values.items()},
        "required": [name for name in values if all(name in schema["required"] for schema in schemas)],
        "$defs": {name: value for schema in schemas for name, value in schema.get("$defs", {}).items()},
    }


def _make_summary(kind: Any, made: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the document's summary with the keys of `Ending`."""
    ending = _make_schema(Ending)
    if "summary" in made["properties"]:
        own = made["properties"]["summary"]
        own = definitions[own["$ref"].rpartition("/")[2]] if "$ref" in own else own
    elif isinstance(summary := getattr(kind, "summary", None), property):
        own = _make_schema(get_type_hints(summary.fget)["return"])
    else:
        return {"type": "object", "properties": ending["properties"]}
    return {
        **own,
        "properties": {**own.get("properties", {}), **ending["properties"]},
        "required": list(dict.fromkeys([*own.get("required", ()), *ending["required"]])),
    }
