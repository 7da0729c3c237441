"""Writes the report on the explanation of wrong MoE calls: known mistakes planted in all kinds of layers.

Usage: plant_mistakes.py [--seeds N] [--minutes N] [--processes N] [FILE]. It writes FILE.json and FILE.md, of
the seeds that all kinds of layer have ended when the minutes are over. A layer is a type of weights, a type
of activations (quantized by the backend or not) and an activation function. Each seed is another layer with
other tokens, every second one with duplicate ids, ids of -1 and large inputs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from evidence.planting import (  # noqa: E402
    FIRST,
    NO_EFFECT,
    NOT_NAMED,
    NOT_TOLD_APART,
    WRONG,
    Tally,
    deviations,
    plant,
    plant_places,
    plant_strange,
    plant_weights_and_rows,
)
from moedoctor.environment import collect  # noqa: E402
from moedoctor.origin import record_origin  # noqa: E402
from moedoctor.processes.files import write  # noqa: E402
from moedoctor.reporters.markdown_page import to_markdown  # noqa: E402
from moedoctor.reporters.page import Block, Heading, Paragraph, Table  # noqa: E402

_FILE = ROOT / "reports" / "capsules" / "planted_mistakes"
_PAIRS = 8
"""Two mistakes at once that are planted in each layer, drawn at random."""
_OUTCOMES = (FIRST, NOT_TOLD_APART, NOT_NAMED, WRONG, NO_EFFECT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("file", type=Path, nargs="?", default=_FILE)
    options = parser.parse_args()
    started = time.monotonic()
    schemes = list(_schemes())
    jobs = [(scheme, seed) for seed in range(options.seeds) for scheme in schemes]
    ended: list[tuple[Tally, ...]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for tallies in pool.map(measure, jobs):
            ended.append(tallies)
            print(f"\r{len(ended)} of {len(jobs)} layers", end="", file=sys.stderr, flush=True)
            if time.monotonic() - started > 60 * options.minutes:
                pool.shutdown(cancel_futures=True)
                break
    print(file=sys.stderr)
    seeds = len(ended) // len(schemes)
    single, pairs, places, others = Tally(), Tally(), Tally(), Tally()
    for tallies in ended[: seeds * len(schemes)]:
        for total, part in zip((single, pairs, places, others), tallies, strict=True):
            total.merge(part)
    document = {
        "schema_version": 1,
        "command": "evidence/plant_mistakes.py",
        "origin": record_origin(),
        "environment": {key: collect()[key] for key in ("torch", "vllm")},
        "seeds": seeds,
        "layers": ["/".join(scheme) for scheme in schemes],
        "seconds": round(time.monotonic() - started, 1),
        "one_mistake": single.record(),
        "two_mistakes": pairs.record(),
        "some_places": places.record(),
        "weights_and_rows": others.record(),
    }
    options.file.parent.mkdir(parents=True, exist_ok=True)
    write(options.file.with_suffix(".json"), json.dumps(document, indent=1) + "\n")
    write(options.file.with_suffix(".md"), to_markdown(page(document)))


def _schemes() -> Iterator[tuple[str, str, str]]:
    from tests.capsules import SCHEMES

    for (quantization, activations), activation in product(SCHEMES, ("silu", "relu2")):
        yield quantization, activations, activation


def measure(job: tuple[tuple[str, str, str], int]) -> tuple[Tally, Tally, Tally, Tally]:
    """Plant one mistake, two at once, one in one expert only, and wrong weights, rows and values."""
    import torch

    from moedoctor.diagnose.capsule.mistakes import list_pairs
    from tests.capsules import computation, make_capsule

    torch.set_num_threads(1)
    (quantization, activations, activation), seed = job
    capsule = make_capsule(
        quantization, activations, activation=activation, seed=seed, halves=True, unusual=seed % 2 == 1
    )
    call, scheme = computation(capsule), "/".join(job[0])
    every, draw = deviations(call), random.Random(seed)
    single, pairs, places, others = Tally(), Tally(), Tally(), Tally()
    plant(single, scheme, call, every, seed)
    plant(pairs, scheme, call, draw.sample(list(list_pairs(every)), _PAIRS), seed)
    plant_strange(single, call, seed)
    plant_places(places, scheme, call, every, seed)
    foreign = make_capsule(quantization, activations, activation=activation, seed=seed + 1000)
    plant_weights_and_rows(others, scheme, call, foreign.to_problem().layer, seed)
    return single, pairs, places, others


def page(document: dict[str, Any]) -> list[Block]:
    """Return the page of the report."""
    parts = [document[key] for key in ("one_mistake", "two_mistakes", "some_places", "weights_and_rows")]
    single, pairs, places, others = parts
    blocks: list[Block] = [
        Heading("Known mistakes, planted and named", 1),
        Paragraph(
            f"{single['planted']} planted outputs of {len(document['layers'])} kinds of layer with "
            f"{document['seeds']} seeds each. Of those with an effect that can be told apart, "
            f"{single['first_share']:.2%} are named first and {single['wrong_share']:.2%} wrongly. "
            f"Of {single['sound']} sound outputs, {single['sound_named']} are called wrong. "
            f"Of {single['strange']} outputs that are wrong in other ways, {single['strange_named']} are "
            "given a name; the answer to the others is that none of the known mistakes explains them. Layers "
            f"(weights, activations, activation function): {', '.join(document['layers'])}."
        ),
        Heading("One mistake in the whole layer"),
        _table(single),
    ]
    for title, part in (("Two mistakes at once", pairs), ("One mistake in one expert only", places)):
        shares = f"{part['first_share']:.2%} named first, {part['wrong_share']:.2%} wrongly"
        blocks += [Heading(title), Paragraph(f"{part['planted']} planted: {shares}."), _totals(part)]
    blocks += [Heading("Rows that nobody wrote, other weights, wrong scales and limits"), _table(others)]
    blocks += [
        Heading("Not told apart, and why"),
        Paragraph(
            "The outputs of the two differ by less than a sound backend may differ from the reference, or "
            "the answer lists both; the cosine is the lowest of a token. A line marked wrong counts as wrong."
        ),
    ]
    keys = ("layer", "planted", "named")
    table = [
        [*(each[key] for key in keys), str(each["times"]), f"{each['cosine']:.6f}", each["outcome"]]
        for part in parts
        for each in part["confused"]
    ]
    head = ("layer", "planted", "named first", "times", "cosine", "counted as")
    return [*blocks, Table(head, table, "lllrrl")]


def _table(part: dict[str, Any]) -> Table:
    body = [
        [mistake, *(str(counts.get(outcome, 0)) for outcome in _OUTCOMES)]
        for mistake, counts in sorted(part["mistakes"].items())
    ]
    return Table(("mistake", *_OUTCOMES), body, "l" + "r" * len(_OUTCOMES))


def _totals(part: dict[str, Any]) -> Table:
    counts = part["counts"]
    return Table(_OUTCOMES, [[str(counts.get(outcome, 0)) for outcome in _OUTCOMES]], "r" * len(_OUTCOMES))


if __name__ == "__main__":
    main()
