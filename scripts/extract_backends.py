"""Makes the tables in moedoctor/fixes/backends/data out of unpacked vLLM releases.

    python scripts/extract_backends.py --vllm FOLDER --answers FOLDER --libraries FOLDER [--ask PYTHON]

`--vllm` holds one folder a release with the unpacked wheel in it. With `--ask`, each release is asked first
(scripts/probe_backends.py) by that interpreter, which needs what `import vllm` needs. `--libraries` holds
flashinfer-python/VERSION and humming-kernels/VERSION, as `pip install --no-deps --target` leaves them. The
answers are kept in `--answers`, one JSON file a release. What a release does not answer is in
handwritten.yaml.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from derive_backends import boxes, kind, merge, pack, predicates
from packaging.version import Version

OUT = Path(__file__).resolve().parent.parent / "moedoctor" / "fixes" / "backends" / "data"
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
PARALLEL = ("tp", "ep", "dp", "dp+ep")
NOT_HERE = "is not supported for"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--ask", type=Path)
    parser.add_argument("--libraries", type=Path, required=True)
    options = parser.parse_args()
    folders = sorted(
        (one for one in options.vllm.iterdir() if re.fullmatch(r"[\d.]+", one.name)),
        key=lambda one: Version(one.name),
    )
    if options.ask:
        for folder in folders:
            ask(folder, options.ask, options.libraries, options.answers / f"{folder.name}.json")
    releases = {
        folder.name: Release(folder, options.answers / f"{folder.name}.json", options.libraries)
        for folder in folders
    }
    dump(
        OUT / "releases.json", {"releases": {name: one.about() for name, one in releases.items()}}, "releases"
    )
    for scheme in ORACLES:
        rows = {
            "orders": merge(
                [(name, row) for name, one in releases.items() for row in one.orders(scheme)],
                releases,
                "order",
            ),
            "flags": merge(
                [(name, row) for name, one in releases.items() for row in one.flags(scheme)], releases, "flag"
            ),
            "kernels": merge(
                [(name, row) for name, one in releases.items() for row in one.kernels(scheme)],
                releases,
                "kernel",
            ),
        }
        dump(OUT / f"{scheme}.json", {"scheme": scheme, **rows}, *rows)


def ask(folder: Path, python: Path, libraries: Path, answers: Path) -> None:
    pins = pinned(folder)
    paths = [folder]
    for package, default in (("flashinfer-python", None), ("humming-kernels", "0.1.2")):
        version = pins.get(package, default)
        if version:
            paths.append(libraries / package / version)
    environment = {
        **{
            name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "FLASHINFER_"))
        },
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, OUT.parents[2]])),
        "VLLM_HAS_FLASHINFER_CUBIN": "1",  # else FlashInfer counts as missing without nvcc
    }
    script = Path(__file__).with_name("probe_backends.py")
    said = subprocess.run(
        [str(python), str(script)], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    answers.write_text(
        next(line for line in said.stdout.splitlines() if line.startswith("{")), encoding="utf-8"
    )
    print(f"{folder.name}: asked")


def pinned(folder: Path) -> dict[str, str]:
    metadata = next(folder.glob("vllm-*.dist-info/METADATA")).read_text(encoding="utf-8")
    return dict(re.findall(r"^Requires-Dist: ([\w-]+)(?:\[\w+\])?==([\w.]+)\s*$", metadata, re.MULTILINE))


class Release:
    """One release: its answers, and where in its sources they come from."""

    def __init__(self, folder: Path, answers: Path, libraries: Path) -> None:
        self.folder, self.libraries = folder, libraries
        self.answers: dict[str, Any] = json.loads(answers.read_text(encoding="utf-8"))
        self.texts = [json.loads(text) for text in self.answers["texts"]]
        self.lines = {**dict(definitions(folder, MXFP4)), **dict(definitions(folder, FUSED_MOE))}
        self.grids = {scheme: self._grid(self.answers["automatic"][scheme]) for scheme in ORACLES}

    def about(self) -> dict[str, Any]:
        pins = pinned(self.folder)
        provides = ["triton_kernels"]
        provides += ["deep_gemm"] if (self.folder / "vllm" / "third_party" / "deep_gemm").is_dir() else []
        provides += [
            name
            for name, package in (("flashinfer", "flashinfer-python"), ("humming", "humming-kernels"))
            if package in pins
        ]
        # FlashInfer carries a copy of b12x from 0.7.2.post1 on.
        pinned_flashinfer = self.libraries / "flashinfer-python" / pins["flashinfer-python"]
        provides += ["b12x"] if (pinned_flashinfer / "b12x").is_dir() else []
        return {
            "flashinfer": pins.get("flashinfer-python"),
            "flashinfer_cubin": pins.get("flashinfer-cubin"),
            "provides": sorted(provides),
            "activations": self.answers["activations"],
            "moe_backends": self.answers["flags"],
        }

    def _grid(
        self, rows: Iterable[Sequence[Any]]
    ) -> dict[tuple[str, str, str], tuple[list[Any], dict[str, Any]]]:
        return {
            (c, p, a): ([self.texts[one] for one in answers], self.texts[out])
            for c, p, a, answers, out in rows
        }

    def orders(self, scheme: str) -> Iterable[dict[str, Any]]:
        """The automatic order, in boxes of the grid where it is the same."""
        by_order = defaultdict(list)
        for point, (answers, _) in self.grids[scheme].items():
            if all(one[1] for one in answers):
                by_order[tuple(dict.fromkeys(one[0] for one in answers))].append(point)
        axes = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*self.grids[scheme], strict=True))
        names = [f"{name}@{ORACLES[scheme]}" for name in SELECTS]
        source = next((self.lines[one] for one in names if one in self.lines), "")
        for order, points in sorted(by_order.items(), key=lambda item: -len(item[1])):
            for box in boxes(points, frozenset(points), axes):
                yield {"order": list(order), **self._packed(box), "source": source}

    def flags(self, scheme: str) -> Iterable[dict[str, Any]]:
        """What --moe-backend is taken for: the backends it leads to; none where it changes nothing."""
        for flag, rows in self.answers["on_request"][scheme].items():
            grid = self._grid(rows)
            asked = {point: [one[0] for one in answers] for point, (answers, _) in grid.items()}
            automatic = {point: [one[0] for one in self.grids[scheme][point][0]] for point in grid}
            errors = {out["error"] or "" for _, out in grid.values()}
            if all(NOT_HERE in error and "moe_backend=" in error for error in errors):
                continue
            source = self.lines.get(f"map_{ORACLES[scheme]}_backend") or self.lines["get_mxfp4_backend"]
            found = list(dict.fromkeys(one for answers in asked.values() for one in answers))
            row = {"flag": flag, "backends": found, "source": source}
            kernels = any(one[1] for answers, _ in grid.values() for one in answers)
            if (
                (kernels or scheme == "mxfp4")
                and asked == automatic
                and self.outcomes(grid) == self.outcomes({p: self.grids[scheme][p] for p in grid})
            ):
                row = {"flag": flag, "ignored": True, "source": source}
            elif not found:
                row = {"flag": flag, "refused": min(errors), "source": source}
            elif self.batched(scheme, grid):
                row["batched"] = True
            yield row

    def batched(self, scheme: str, grid: Mapping[Any, tuple[list[Any], dict[str, Any]]]) -> bool:
        """Whether the flag brings the activation format that a kernel of its own lacks by itself."""
        for point, (answers, _) in grid.items():
            lacking = [one[:2] for one in self.grids[scheme][point][0] if kind(one[3]) == "format"]
            if any(one[2] and one[:2] in lacking for one in answers):
                return True
        return False

    @staticmethod
    def outcomes(grid: Mapping[Any, tuple[list[Any], dict[str, Any]]]) -> dict[Any, str | None]:
        return {point: outcome["chosen"] for point, (_, outcome) in grid.items()}

    def kernels(self, scheme: str) -> Iterable[dict[str, Any]]:
        answers: dict[tuple[str, str], dict[Any, str]] = defaultdict(dict)
        rows = [
            *self.answers["on_request"][scheme].values(),
            *(one for _, one in self.answers["with_variables"][scheme]),
        ]
        grids = [self.grids[scheme], *map(self._grid, rows)]
        for grid in [one for one in grids if len(one) == len(self.grids[scheme])]:
            for point, (heard, _) in grid.items():
                for backend, kernel, _, reason in heard:
                    if kernel:
                        answers[backend, kernel][point] = kind(reason)
        for (backend, kernel), points in answers.items():
            row = predicates(points)
            then = [{**self._packed(one), "reason": one["reason"]} for one in row.pop("then", ())]
            needs = self.answers["needs"][scheme].get(f"{backend}/{kernel}", [])
            yield {
                "backend": backend,
                "kernel": kernel,
                **self._packed(row),
                "ungated": row["ungated"],
                **({"then": then} if then else {}),
                **({"needs": needs} if needs else {}),
                "source": self.lines.get(kernel, ""),
            }

    def _packed(self, row: Mapping[str, Any]) -> dict[str, str]:
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


def dump(file: Path, table: Mapping[str, Any], *lists: str) -> None:
    """JSON with one row a line."""
    parts = []
    for name, value in table.items():
        if name in lists and isinstance(value, list):
            text = "[\n    " + ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n  ]"
        elif name in lists:
            rows = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            text = "{\n    " + ",\n    ".join(rows) + "\n  }"
        else:
            text = json.dumps(value)
        parts.append(f"  {json.dumps(name)}: {text}")
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    print(f"{file.name}: {', '.join(f'{len(table[name])} {name}' for name in lists)}")


if __name__ == "__main__":
    main()
