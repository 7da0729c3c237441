"""A report of `bench --engine` with made-up figures: nothing here was measured."""

from collections.abc import Sequence
from typing import Any

from moedoctor.reporters.json import to_document
from moedoctor.reporters.pages.bench import Bench


def speed_row(variant: str, batch: int, rate: float) -> dict[str, Any]:
    """Return the speed of an engine whose rate varies by 2 % to both sides."""
    spread = {"tokens_per_second_p20": rate * 0.98, "tokens_per_second_p80": rate * 1.02}
    return {"variant": variant, "batch": batch, "tokens_per_second": rate, **spread}


def engine_document(speeds: Sequence[dict[str, Any]], *engines: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document of a benchmark of engines."""
    facts = {"model": "a model", "tokens": 64, "arguments": {}, "together": False}
    figures = {**facts, "engines": engines, "speeds": speeds}
    document = to_document(Bench.from_figures("engines", figures, {"gpu": "a GPU"}))
    return {"schema_version": 1, "moedoctor": "0.1.0", **document}
