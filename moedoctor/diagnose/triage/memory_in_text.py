"""The memory of a GPU as a log counts it: sizes in GiB, and the change by which the server would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moedoctor.diagnose.triage.cause import Cause, load_lines
from moedoctor.diagnose.triage.signatures import load_data

_UNITS = {"": 1.0, "gib": 1.0, "gb": 1.0, "mib": 2**-10, "kib": 2**-20, "bytes": 2**-30}
_USEFUL = 2_048
"""The tokens of a request below which a server is of no use."""
_OTHERS, _SPARE = 1.0, 0.25
"""GiB of other processes that are worth a word, and GiB above what an allocation lacked."""


@dataclass
class Memory:
    """The last size of each kind, filled line by line; `figure` of `facts.yaml` has the kinds."""

    sizes: dict[str, float] = field(default_factory=dict)
    """Kind -> GiB, or a number of tokens, or a share."""

    def read(self, line: str) -> None:
        """Take in one line, in lower case."""
        if "ib" not in line and " gb" not in line and "max" not in line:
            return
        for match in load_lines()["figure"].finditer(line):
            for kind, text in match.groupdict().items():
                if text and (number := load_lines()["size_in_log"].fullmatch(text)):
                    self.sizes[kind] = float(number[1]) * _UNITS[number[2]]

    def advise(
        self, cause: Cause, flags: Mapping[str, str], share: float | None, size: int, most: float
    ) -> Iterator[str]:
        """Yield what to change, and by how much, for an error of class memory.

        `share` is what the server may take of a GPU, None if the text does not tell, and `most` the largest
        share that leaves enough to others. `size` is the memory that the GPU's name stands for, in GiB, or 0.
        """
        sizes = {"cache": 1.0, "needed": 0.0, "left": 0.0, "own": 0.0, "unused": 0.0, **self.sizes}
        sizes.setdefault("total", sizes.get("capacity", size))
        share = sizes.get("share", share)
        says = load_data("facts.yaml")["says"]
        for name in self._list_sentences(cause.says, sizes, flags):
            lacks = {
                "longer": sizes["needed"] - sizes["cache"],
                "lower": max(sizes.get("tried", 0) - sizes["left"], 0) + _SPARE,
            }.get(name, -sizes["cache"])
            step = math.ceil(lacks / sizes["total"] * 100) / 100 if sizes["total"] else 0
            wider = says[_choose_wider(step, share, most)]
            numbers = {
                **sizes,
                "missing": lacks,
                "used": sizes["total"] - sizes.get("free", 0),
                "others": sizes["total"] - sizes["left"] - sizes["own"],
                "weights": sizes.get("torch", sizes["own"]) or sizes["total"] - sizes["left"],
                "part": math.floor(sizes.get("free", 0) / (sizes["total"] or 1) * 100) / 100,
                "wider": wider.format(step=step, most=most, share=(share or 0) + step),
                "lower": f"by {step:g}" if share is None else f"from {share:g} to {share - step:.2f}",
            }
            yield says[name].format(**numbers)

    def _list_sentences(
        self, says: str, sizes: Mapping[str, float], flags: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield the names of what is to be said of an error of which its class `says` where it came."""
        if "before the start" in says and "free" in sizes:
            yield "free" if sizes["free"] > sizes.get("share", 0.9) * sizes["total"] / 2 else "in_use"
        elif "one request" in says and sizes["needed"] > sizes["cache"]:
            known = {"length", "fits"} <= sizes.keys()
            yield "needed" if not known else "fits" if sizes["fits"] >= _USEFUL else "tiny"
            yield "fixed_cache" if "kv-cache-memory-bytes" in flags else "longer"
            if flags.get("kv-cache-dtype", "auto") == "auto":
                yield "half"
        elif "does not fit" in says and sizes["cache"] <= 0:
            yield "loaded_no_cache" if "loaded" in sizes else "no_cache"
        elif {"tried", "capacity"} <= sizes.keys():
            if sizes["own"] and sizes["total"] - sizes["left"] - sizes["own"] > _OTHERS:
                yield "others"
            elif "were loaded" in says:
                yield "too_large"
            elif "repacked" not in says:
                far = sizes["tried"] - sizes["left"] > sizes["total"] / 4
                enough = sizes["left"] > 2 * sizes["tried"] + _SPARE
                yield "enough" if enough else "run" if far or "first run" in says else "lower"
            if sizes["unused"] > sizes["tried"]:
                yield "pieces"


def _choose_wider(step: float, share: float | None, most: float) -> str:
    """Return the name of what to say of a share of the memory larger by `step`, which is 0 if unknown."""
    if share is not None and share >= most:
        return "no_wider"
    if not step:
        return "wider_by"
    if share is None:
        return "wider_step"
    return "wider" if share + step <= most else "no_wider"
