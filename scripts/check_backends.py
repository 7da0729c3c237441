"""Compares what `moedoctor.fixes.backends` says with what every release answered, point by point.

    python scripts/check_backends.py FOLDER

FOLDER holds the answers that `scripts/extract_backends.py --ask` kept, one JSON file a release. Prints the
number of points compared and every difference; ends with 1 where there is one.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor.fixes.backends import SCHEMES, select
from moedoctor.upstream.selection.substitute import LIBRARIES

THERE = dict.fromkeys(LIBRARIES, True)
"""The releases were asked with every optional library pretended to be there."""


def main(folder: Path) -> int:
    compared, wrong = 0, Counter[str]()
    for file in sorted(folder.glob("*.json")):
        answers = json.loads(file.read_text(encoding="utf-8"))
        texts = [json.loads(text) for text in answers["texts"]]
        for scheme in SCHEMES:
            for options, row in questions(answers, scheme):
                compared += 1
                for difference in differences(file.stem, scheme, options, row, texts):
                    wrong[f"{file.stem} {scheme} {options} {difference}"] += 1
    for difference, count in wrong.most_common(60):
        print(f"{count} x {difference}")
    print(f"{compared} selections compared, {sum(wrong.values())} differences")
    return 1 if wrong else 0


def questions(answers: Mapping[str, Any], scheme: str) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    for row in answers["automatic"][scheme]:
        yield {}, row
    for flag, rows in answers["on_request"][scheme].items():
        for row in rows:
            yield {"moe_backend": flag}, row
    for variables, rows in answers["overridden"][scheme]:
        for row in rows:
            yield {"environ": variables}, row


def differences(
    release: str, scheme: str, options: Mapping[str, Any], row: Sequence[Any], texts: Sequence[Any]
) -> Iterator[str]:
    capability, parallel, activation, answers, outcome = row
    said = select(
        capability,
        scheme,
        release=release,
        ep="ep" in parallel,
        dp="dp" in parallel,
        activation=activation,
        libraries=THERE,
        **options,
    )
    if said.chosen != texts[outcome]["chosen"]:
        yield f"chosen: {said.chosen}, upstream {texts[outcome]['chosen']} ({capability} {parallel})"
    heard = [texts[one] for one in answers if texts[one][1]]
    order = list(dict.fromkeys(one[0] for one in heard))
    ours = [one.backend for one in said.candidates]
    if [one for one in ours if one in order] != order and not options:
        yield f"order: {ours}, upstream {order}"
    fits = {name: any(one[2] for one in heard if one[0] == name) for name in order}
    for one in said.candidates:
        if one.backend in fits and one.supported != fits[one.backend]:
            where = f"({capability} {parallel} {activation})"
            yield f"{one.backend} supported: {one.supported}, upstream {fits[one.backend]} {where}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
