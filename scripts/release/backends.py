"""Turns the answers of one release (probe.py) into rows of the tables in moedoctor/fixes/backends/data.

A kernel's answers are taken apart into the predicates that vLLM asks one after the other (device, gate,
activation, scheme, parallelism). If that does not give back every single answer, the rest is kept as
exceptions, so a table is exact or the derivation fails. `list_differences` compares what
`moedoctor.fixes.backends` selects with the answers, point by point.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import ROOT, read_json, replace_rows, write_json

from moedoctor.fixes.backends import SCHEMES, select
from moedoctor.fixes.backends.release_tables import PARALLEL, Point
from moedoctor.upstream.selection.substitute import LIBRARIES

OUT = ROOT / "moedoctor" / "fixes" / "backends" / "data"
RELEASES = OUT / "releases.json"
FUSED_MOE = "vllm/model_executor/layers/fused_moe"
MXFP4 = "vllm/model_executor/layers/quantization/mxfp4.py"
ORACLES = {
    "nvfp4": "nvfp4",
    "nvfp4-w4a16": "nvfp4",
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "fp8-block": "fp8",
    "bf16": "unquantized",
}
SELECTS = ("_get_priority_backends_for_gpt_oss", "_get_priority_backends", "select_nvfp4_moe_backend")
NOT_HERE = "is not supported for"
THERE = dict.fromkeys(LIBRARIES, True)
"""The releases were asked with every optional library pretended to be there."""
_NVCC = re.compile(rb"Cuda compilation tools, release ([\d.]+)")


def write_backends(folder: Path, answers: Mapping[str, Any], releases: Sequence[str]) -> None:
    """Put the release in `folder` into all tables. `releases` are the known ones and this, oldest first."""
    release = Release(folder, answers)
    known = {**read_json(RELEASES)["releases"], folder.name: release.about()}
    write_json(RELEASES, {"releases": {name: known[name] for name in releases}})
    for scheme in ORACLES:
        table = read_json(OUT / f"{scheme}.json")
        for key in ("orders", "flags", "kernels"):
            rows = [
                {**row, "source": f"{folder.name}: {row['source']}"} for row in getattr(release, key)(scheme)
            ]
            table[key] = replace_rows(table[key], folder.name, rows, releases)
        write_json(OUT / f"{scheme}.json", table)


def read_pins(folder: Path) -> dict[str, str]:
    metadata = next(folder.glob("vllm-*.dist-info/METADATA")).read_text(encoding="utf-8")
    return dict(re.findall(r"^Requires-Dist: ([\w-]+)(?:\[\w+\])?==([\w.]+)\s*$", metadata, re.MULTILINE))


def read_cuda(folder: Path) -> str:
    """Return the CUDA release that compiled the MoE kernels of an unpacked wheel."""
    for file in sorted((folder / "vllm").glob("_moe_C*.so")):
        if match := _NVCC.search(file.read_bytes()):
            return match[1].decode()
    raise FileNotFoundError(f"{folder}/vllm: no _moe_C*.so names the CUDA release that compiled it")


class Release:
    """One release: its answers, and where in its sources they come from."""

    def __init__(self, folder: Path, answers: Mapping[str, Any]) -> None:
        self.folder, self.answers = folder, answers
        self.texts = [json.loads(text) for text in answers["texts"]]
        self.lines = {**dict(definitions(folder, MXFP4)), **dict(definitions(folder, FUSED_MOE))}
        self.grids = {scheme: self._grid(answers["automatic"][scheme]) for scheme in ORACLES}

    def about(self) -> dict[str, Any]:
        pins = read_pins(self.folder)
        optional = {
            "deep_gemm": (self.folder / "vllm" / "third_party" / "deep_gemm").is_dir(),
            "flashinfer": "flashinfer-python" in pins,
            "humming": "humming-kernels" in pins,
            "b12x": (self.folder / "b12x").is_dir(),  # FlashInfer carries a copy from 0.7.2.post1 on
        }
        return {
            "torch": pins["torch"],
            "cuda": read_cuda(self.folder),
            "flashinfer": pins.get("flashinfer-python"),
            "flashinfer_cubin": pins.get("flashinfer-cubin"),
            "provides": sorted(["triton_kernels", *(name for name, has in optional.items() if has)]),
            "activations": self.answers["activations"],
            "moe_backends": self.answers["flags"],
        }

    def _grid(
        self, rows: Iterable[Sequence[Any]]
    ) -> dict[tuple[str, str, str], tuple[list[Any], dict[str, Any]]]:
        return {
            (c, p, a): ([self.texts[each] for each in answers], self.texts[out])
            for c, p, a, answers, out in rows
        }

    def orders(self, scheme: str) -> Iterable[dict[str, Any]]:
        """The automatic order, in boxes of the grid where it is the same."""
        by_order = defaultdict(list)
        for point, (answers, _) in self.grids[scheme].items():
            if all(each[1] for each in answers):
                by_order[tuple(dict.fromkeys(each[0] for each in answers))].append(point)
        axes = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*self.grids[scheme], strict=True))
        names = [f"{name}@{ORACLES[scheme]}" for name in SELECTS]
        source = next((self.lines[each] for each in names if each in self.lines), "")
        for order, points in sorted(by_order.items(), key=lambda item: -len(item[1])):
            for box in boxes(points, frozenset(points), axes):
                yield {"order": list(order), **self._pack_sides(box), "source": source}

    def flags(self, scheme: str) -> Iterable[dict[str, Any]]:
        """Yield what --moe-backend is taken for: the backends it leads to; none where it changes nothing."""
        for flag, rows in self.answers["on_request"][scheme].items():
            grid = self._grid(rows)
            asked = {point: [each[0] for each in answers] for point, (answers, _) in grid.items()}
            automatic = {point: [each[0] for each in self.grids[scheme][point][0]] for point in grid}
            errors = {out["error"] or "" for _, out in grid.values()}
            if all(NOT_HERE in error and "moe_backend=" in error for error in errors):
                continue
            source = self.lines.get(f"map_{ORACLES[scheme]}_backend") or self.lines["get_mxfp4_backend"]
            backends = list(dict.fromkeys(each for answers in asked.values() for each in answers))
            row = {"flag": flag, "backends": backends, "source": source}
            kernels = any(each[1] for answers, _ in grid.values() for each in answers)
            if (
                (kernels or scheme == "mxfp4")
                and asked == automatic
                and self.outcomes(grid) == self.outcomes({p: self.grids[scheme][p] for p in grid})
            ):
                row = {"flag": flag, "ignored": True, "source": source}
            elif not backends:
                row = {"flag": flag, "refused": min(errors), "source": source}
            elif self.brings_batching(scheme, grid):
                row["batched"] = True
            yield row

    def brings_batching(self, scheme: str, grid: Mapping[Any, tuple[list[Any], dict[str, Any]]]) -> bool:
        """Return True if the flag brings the activation format that a kernel of its own lacks by itself."""
        for point, (answers, _) in grid.items():
            lacking = [each[:2] for each in self.grids[scheme][point][0] if kind(each[3]) == "format"]
            if any(each[2] and each[:2] in lacking for each in answers):
                return True
        return False

    @staticmethod
    def outcomes(grid: Mapping[Any, tuple[list[Any], dict[str, Any]]]) -> dict[Any, str | None]:
        return {point: outcome["chosen"] for point, (_, outcome) in grid.items()}

    def kernels(self, scheme: str) -> Iterable[dict[str, Any]]:
        answers: dict[tuple[str, str], dict[Any, str]] = defaultdict(dict)
        rows = [
            *self.answers["on_request"][scheme].values(),
            *(each for _, each in self.answers["with_variables"][scheme]),
        ]
        grids = [self.grids[scheme], *map(self._grid, rows)]
        for grid in [each for each in grids if len(each) == len(self.grids[scheme])]:
            for point, (heard, _) in grid.items():
                for backend, kernel, _, reason in heard:
                    if kernel:
                        answers[backend, kernel][point] = kind(reason)
        for (backend, kernel), points in answers.items():
            row = predicates(points)
            then = [{**self._pack_sides(each), "reason": each["reason"]} for each in row.pop("then", ())]
            needs = self.answers["needs"][scheme].get(f"{backend}/{kernel}", [])
            yield {
                "backend": backend,
                "kernel": kernel,
                **self._pack_sides(row),
                "ungated": row["ungated"],
                **({"then": then} if then else {}),
                **({"needs": needs} if needs else {}),
                "source": self.lines.get(kernel, ""),
            }

    def _pack_sides(self, row: Mapping[str, Any]) -> dict[str, str]:
        capabilities = list(dict.fromkeys(point[0] for point in self.grids["nvfp4"]))
        axes = {
            "devices": capabilities,
            "scheme_devices": capabilities,
            "capabilities": capabilities,
            "activations": list(self.answers["activations"]),
            "parallel": list(PARALLEL),
        }
        return {name: pack(row[name], axis) for name, axis in axes.items() if name in row}


def definitions(release: Path, folder: str) -> Iterable[tuple[str, str]]:
    """Class and function names, with the file and line that they are defined at."""
    place = release / folder
    for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield f"{node.name}@{file.stem}", f"{file.relative_to(release).as_posix()}:{node.lineno}"
                yield node.name, f"{file.relative_to(release).as_posix()}:{node.lineno}"


# --- From answers to rows ----------------------------------------------------------------------

_KINDS = (
    (re.compile(r"^kernel does not support current device cuda"), "device"),
    (re.compile(r"^kernel does not support no act_and_mul MLP layer$"), "gate"),
    (re.compile(r"^kernel does not support MoEActivation\.\w+ activation$"), "activation"),
    (re.compile(r"^kernel does not support quantization scheme "), "scheme"),
    (re.compile(r"^kernel does not support parallel config "), "parallel"),
    (re.compile(r"^kernel does not support \('standard',\) activation format$"), "format"),
)


def kind(reason: str | None) -> str:
    """Return the kind of upstream's reason: empty for a kernel that fits, the text itself if it is of
    no kind."""
    if reason is None:
        return ""
    return next((name for pattern, name in _KINDS if pattern.match(reason)), reason)


PREDICATES = ("device", "gate", "activation", "scheme", "parallel")
"""In the order in which vLLM asks. What a kernel asks beyond them may come before or after."""


def predicates(answers: Mapping[Point, str]) -> dict[str, Any]:
    """The columns of one kernel's row, from the kind of its answer at every point.

    Raises AssertionError where the row does not give back every answer. Where a kernel's own check comes
    before the common ones, another reason of the same refusal may be named first.
    """
    axes = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*answers, strict=True))
    row: dict[str, Any] = {}
    left = dict(answers)
    for name, column, axis in (
        ("device", "devices", 0),
        ("gate", "gates", 2),
        ("activation", "activations", 2),
        ("scheme", "scheme_devices", 0),
        ("parallel", "parallel", 1),
    ):
        row[column] = [
            value for value in axes[axis] if _passes(name, [left[p] for p in left if p[axis] == value])
        ]
        left = {point: answer for point, answer in left.items() if point[axis] in row[column]}
    gates = row.pop("gates")
    row["ungated"] = any(value.endswith("_no_mul") for value in gates)
    if row["scheme_devices"] == row["devices"]:
        del row["scheme_devices"]
    refused = {point: answer for point, answer in left.items() if answer}
    open_to_all = frozenset(answers) - {point for point, answer in left.items() if not answer}
    row["then"] = [
        {"reason": reason, **box}
        for reason in dict.fromkeys(refused.values())
        for box in boxes(
            [p for p in refused if refused[p] == reason],
            open_to_all - {point for point, each in refused.items() if each != reason},
            axes,
        )
    ]
    for point, answer in answers.items():
        reason = first_failing(row, point)
        assert reason == answer or (reason and answer and answer not in (*PREDICATES, "format")), (
            row,
            point,
            answer,
        )
    return {name: value for name, value in row.items() if name != "then" or value}


def _passes(name: str, answers: Sequence[str]) -> bool:
    """Return True if the predicate lets at least one through; a kernel's own check may answer before it."""
    own = [each for each in answers if each and each not in (*PREDICATES, "format")]
    return any(each != name for each in answers if each not in own) or bool(
        answers and len(own) == len(answers)
    )


def first_failing(row: Mapping[str, Any], point: Point) -> str:
    """Return the kind of the row's first reason at a point; empty where the kernel fits."""
    capability, parallel, activation = point
    if capability not in row["devices"]:
        return "device"
    if activation.endswith("_no_mul") and not row["ungated"]:
        return "gate"
    if activation not in row["activations"]:
        return "activation"
    if capability not in row.get("scheme_devices", row["devices"]):
        return "scheme"
    if parallel not in row["parallel"]:
        return "parallel"
    return next((str(each["reason"]) for each in row.get("then", ()) if contains(each, point)), "")


def contains(box: Mapping[str, Any], point: Point) -> bool:
    """Return True if the point lies in a box; a side that is not named is open."""
    names = ("capabilities", "parallel", "activations")
    return all(name not in box or value in box[name] for name, value in zip(names, point, strict=True))


def boxes(
    points: Iterable[Point], allowed: frozenset[Point], axes: Sequence[Sequence[str]]
) -> list[dict[str, list[str]]]:
    """Few boxes that cover all of `points` and lie within `allowed`; a side that is as long as its axis is
    left out."""
    left, cover = set(points), []
    names = ("capabilities", "parallel", "activations")
    while left:
        seed = min(left, key=lambda p: tuple(axis.index(value) for axis, value in zip(axes, p, strict=True)))
        grown = [_grow(seed, order, allowed, axes) for order in itertools.permutations(range(3))]
        best = max(
            grown, key=lambda sides: (len(left & set(itertools.product(*sides))), sum(map(len, sides)))
        )
        left -= set(itertools.product(*best))
        sides = zip(names, best, axes, strict=True)
        cover.append({name: list(side) for name, side, axis in sides if len(side) < len(axis)})
    return cover


def _grow(
    seed: Point, order: Sequence[int], allowed: frozenset[Point], axes: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    sides: list[tuple[str, ...]] = [(value,) for value in seed]
    for axis in order:
        fits = [
            value
            for value in axes[axis]
            if all(p in allowed for p in itertools.product(*sides[:axis], (value,), *sides[axis + 1 :]))
        ]
        sides[axis] = tuple(fits)
    return sides


def pack(values: Sequence[str], axis: Sequence[str]) -> str:
    """``*`` for all, runs of capabilities as ``7.5-9.0``, else the values with spaces between."""
    if list(values) == list(axis):
        return "*"
    if not axis[0][0].isdigit():
        return " ".join(values)
    runs: list[list[str]] = []
    for value in values:
        if runs and axis.index(value) == axis.index(runs[-1][-1]) + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(run) for run in runs)


# --- The check --------------------------------------------------------------------------------


def list_differences(release: str, answers: Mapping[str, Any]) -> list[str]:
    """Return what `select` answers otherwise than a release, most frequent first, as ``12 x nvfp4 …``."""
    texts = [json.loads(text) for text in answers["texts"]]
    wrong = Counter(
        f"{scheme} {options} {difference}"
        for scheme in SCHEMES
        for options, row in questions(answers, scheme)
        for difference in differences(release, scheme, options, row, texts)
    )
    return [f"{count} x {difference}" for difference, count in wrong.most_common()]


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
    selection = select(
        capability,
        scheme,
        release=release,
        ep="ep" in parallel,
        dp="dp" in parallel,
        activation=activation,
        libraries=THERE,
        **options,
    )
    if selection.chosen != texts[outcome]["chosen"]:
        yield f"chosen: {selection.chosen}, upstream {texts[outcome]['chosen']} ({capability} {parallel})"
    heard = [texts[each] for each in answers if texts[each][1]]
    order = list(dict.fromkeys(each[0] for each in heard))
    ours = [each.backend for each in selection.candidates]
    if [each for each in ours if each in order] != order and not options:
        yield f"order: {ours}, upstream {order}"
    fits = {name: any(each[2] for each in heard if each[0] == name) for name in order}
    for each in selection.candidates:
        if each.backend in fits and each.supported != fits[each.backend]:
            where = f"({capability} {parallel} {activation})"
            yield f"{each.backend} supported: {each.supported}, upstream {fits[each.backend]} {where}"
