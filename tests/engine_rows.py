"""A report of `bench --engine` with made-up figures: nothing here was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moedoctor.reporters.pages.bench_engines import EngineBench, bench_document
from moedoctor.results import plain


def engine_row(backend: str, fix: str, batch: int, rate: float) -> dict[str, Any]:
    """Return the row of an engine whose rate varies by 2 % to both sides."""
    spread = {"tokens_per_second_p20": rate * 0.98, "tokens_per_second_p80": rate * 1.02}
    return {"moe_backend": backend, "fix": fix, "batch": batch, "tokens_per_second": rate, **spread}


def engine_document(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON document of a benchmark of engines."""
    bench = EngineBench("a model", 64, 0.1, {}, tuple(rows), {"gpu": "a GPU"}, origin=None)
    document: dict[str, Any] = plain(bench_document(bench))
    del document["origin"]
    return {"schema_version": 1, **document}
