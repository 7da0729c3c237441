"""The matrix of a scenario: its parameters and blocks expanded into the points to run."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from moedoctor.results import Scalar
from moedoctor.scenario.document import InvalidValueError, ScenarioDocument
from moedoctor.text import YamlPath, explain

MAX_POINTS = 2000
_FIRST_WORD = re.compile(r"(\w+):?\s+")


class _Value(NamedTuple):
    path: YamlPath
    """Where in the file it stands."""
    value: Scalar


def expand(document: ScenarioDocument, model: type[BaseModel]) -> tuple[Mapping[str, Scalar], ...]:
    """Every point, checked by the fault's `model` and completed with its defaults, in the order of the file.

    Points that are the same after the defaults are there once. Raises `InvalidValueError`.
    """
    blocks = [
        {**_dimensions(document.parameters, ("parameters",)), **_dimensions(block, ("matrix", index))}
        for index, block in enumerate(document.matrix)
    ]
    has_matrix = "matrix" in document.model_fields_set
    _check_size(blocks, ("matrix",) if has_matrix else ("parameters",))
    points: dict[str, Mapping[str, Scalar]] = {}
    for index, block in enumerate(blocks):
        where: YamlPath = ("matrix", index) if has_matrix else ("parameters",)
        for values in itertools.product(*block.values()):
            point = _point(dict(zip(block, values, strict=True)), where, model)
            points.setdefault(json.dumps(point), point)
    return tuple(points.values())


def _dimensions(block: Mapping[str, Sequence[Scalar]], path: YamlPath) -> dict[str, list[_Value]]:
    return {
        name: [_Value((*path, name, index), value) for index, value in enumerate(values)]
        for name, values in block.items()
    }


def _check_size(blocks: Sequence[Mapping[str, Sequence[_Value]]], path: YamlPath) -> None:
    # Counted, not expanded: a hundred short lists make more points than there is memory.
    total = sum(math.prod(len(values) for values in block.values()) for block in blocks)
    if total > MAX_POINTS:
        found = str(total) if total < 10**9 else "over a billion"
        raise InvalidValueError(path, f"expands to {found} points, expected at most {MAX_POINTS}")


def _point(values: Mapping[str, _Value], block: YamlPath, model: type[BaseModel]) -> Mapping[str, Scalar]:
    given = json.dumps({name: value.value for name, value in values.items()})
    try:
        return model.model_validate_json(given, strict=True).model_dump(mode="json")
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda one: one["type"] == "missing")

    message = explain(first, model.model_fields)
    name = str(first["loc"][0]) if first["loc"] else ""
    # A check over several parameters has no place of its own: take the one its message starts with.
    word = _FIRST_WORD.match(message)
    if word and word[1] in model.model_fields and name in ("", word[1]):
        name, message = word[1], message[word.end() :]
    path = values[name].path if name in values else block
    if first["type"] == "extra_forbidden":
        path = path[:-1]
    raise InvalidValueError(path, message, name=("parameters", name) if name else ("parameters",))
