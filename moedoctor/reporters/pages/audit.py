"""The page of `moedoctor audit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import moedoctor
from moedoctor.diagnose.cuda.audit import NO_TOOL, Fate, Item, fate_of
from moedoctor.diagnose.cuda.device_code import Image
from moedoctor.fixes.arch import FLASHINFER_LIST, resolve_arch
from moedoctor.fixes.arch.targets import Capability, Target, parse_capability, show
from moedoctor.reporters import page as blocks

_NONE = "–"
_ALWAYS = (Fate.LOADS, Fate.COMPILED, Fate.MISSING)
"""What the summary counts even if there is none."""


def audit_page(items: Sequence[Item], gpu: Capability | None, tool: str | None) -> list[blocks.Block]:
    """Return a table of files, the counts, and what to do about each kind of finding."""
    where = f"on a GPU of {show(gpu)}" if gpu else "no GPU named: give one with --sm, such as 12.0"
    page: list[blocks.Block] = [
        blocks.Heading(f"device code, {where} ({tool or 'no cuobjdump: ' + NO_TOOL})", 1)
    ]
    rows: list[tuple[blocks.Text, ...]] = []
    for item in items:
        module = f" ({item.module})" if item.module else ""
        name = item.path + module
        bad = item.fate is Fate.MISSING or item.lacks
        rows.append((name, *_lists(item, gpu), blocks.Span(verdict(item), "missing" if bad else "")))
    if rows:
        page.append(blocks.Table(("file", "runs there" if gpu else "targets", "does not", "verdict"), rows))
    else:
        page.append(blocks.Paragraph("no shared object, cubin, wheel or build file found"))
    page.append(blocks.Paragraph(summary_line(items)))
    return [*page, *map(blocks.Step, _next_steps(items, gpu))]


def summary_line(items: Sequence[Item]) -> str:
    """Return how many files load, are compiled, have nothing, lack something or were skipped."""
    fates = Counter(item.fate for item in items)
    counts = [f"{fates[fate]} {fate.value}" for fate in Fate]
    lacking = sum(1 for item in items if item.lacks)
    skipped = sum(1 for item in items if item.skipped)
    counts = [count for fate, count in zip(Fate, counts, strict=True) if fates[fate] or fate in _ALWAYS]
    return " · ".join([*counts, f"{lacking} compiled without what they need", f"{skipped} skipped"])


def audit_document(
    items: Sequence[Item], gpu: Capability | None, tool: str | None, code: int
) -> dict[str, Any]:
    """Return the JSON document."""
    fates = Counter(item.fate for item in items)
    return {
        "moedoctor": moedoctor.__version__,
        "command": "audit",
        "capability": show(gpu) if gpu else None,
        "tool": tool,
        "items": [_item(item, gpu) for item in items],
        "findings": [
            {
                "id": "MD004",
                "line": None,
                "evidence": f"{item.path}: {verdict(item)}",
                "confidence": 1.0,
                "next_step": step,
            }
            for item in items
            for step in _next_steps([item], gpu)
        ],
        "summary": {
            **{fate.name.lower(): fates[fate] for fate in Fate},
            "lacking": sum(1 for item in items if item.lacks),
            "skipped": sum(1 for item in items if item.skipped),
            "exit_code": code,
        },
    }


def from_document(document: Mapping[str, Any]) -> tuple[list[Item], Capability | None, str | None]:
    """Return the items, the GPU and the tool of what `audit_document` wrote. Raises ValueError."""
    fates = {fate.name.lower(): fate for fate in Fate}
    items = [
        Item(
            path=item["path"],
            source=item["source"],
            images=tuple(
                Image(image["kind"], Target.parse(image["target"]), image["count"])
                for image in item["images"]
            ),
            module=item["module"],
            fate=None if item["verdict"] is None else fates[item["verdict"]],
            lacks=tuple(item["lacks"]),
            note=item["note"],
            skipped=item["skipped"],
        )
        for item in document["items"]
    ]
    capability = document["capability"]
    return items, None if capability is None else parse_capability(capability), document["tool"]


def wrong(items: Sequence[Item]) -> dict[int, str]:
    """Return what is wrong with each file that the GPU cannot use, by its index."""
    return {
        index: verdict(item) for index, item in enumerate(items) if item.fate is Fate.MISSING or item.lacks
    }


def _item(item: Item, gpu: Capability | None) -> dict[str, Any]:
    images = []
    for image in item.images:
        fate = fate_of([image], gpu) if gpu else None
        shown = {"kind": image.kind, "target": str(image.target), "count": image.count}
        images.append({**shown, "verdict": fate.name.lower() if fate else None})
    return {
        "path": item.path,
        "source": item.source,
        "module": item.module,
        "verdict": item.fate.name.lower() if item.fate else None,
        "lacks": list(item.lacks),
        "note": item.note,
        "skipped": item.skipped,
        "images": images,
    }


def verdict(item: Item) -> str:
    """Return what the GPU does with a file, in words."""
    if item.skipped:
        return f"skipped: {item.skipped}"
    if item.fate is None:
        return item.note or "not judged"
    words = item.fate.value
    if item.lacks:
        words += f", but compiled without {', '.join(item.lacks)}"
    return f"{words}; {item.note}" if item.note else words


def _lists(item: Item, gpu: Capability | None) -> tuple[str, str]:
    """Return (what runs on the GPU, what does not), such as ``SASS 120f ×19, PTX 80``.

    Without a GPU, everything is in the first.
    """
    runs: list[str] = []
    rest: list[str] = []
    for image in sorted(item.images, key=lambda image: (image.kind != "sass", image)):
        count = f" ×{image.count}" if image.count > 1 else ""
        usable = gpu is None or fate_of([image], gpu) is not Fate.MISSING
        (runs if usable else rest).append(f"{image.kind.upper()} {image.target}{count}")
    return ", ".join(runs) or _NONE, ", ".join(rest) or _NONE


def _next_steps(items: Sequence[Item], gpu: Capability | None) -> Iterator[str]:
    """Give what to do about each kind of finding, once."""
    if gpu is None:
        return
    missing = [item for item in items if item.fate is Fate.MISSING]
    for remedy in dict.fromkeys(_remedy(item, gpu) for item in missing):
        yield f"MD004: what is missing fails with `no kernel image is available`; {remedy}"
    if any(item.lacks for item in items):
        yield (
            "MD004: kernels built for a target without suffix end in a compiler error or in output that is "
            f"never written; remove the module's folder and set {_list_entry(gpu)}"
        )


def _remedy(item: Item, gpu: Capability) -> str:
    """Return how to get kernels for the GPU into what was audited: a cache, vLLM, or another file."""
    if item.module:
        return f"remove the module's folder and start with {FLASHINFER_LIST} unset, so that it is built again"
    package = item.path.partition(".whl!")[0].rpartition("/")[2].lower()
    folders = item.path.partition("!")[2] or item.path
    if "vllm" in folders.split("/")[:-1] or package.startswith("vllm-"):
        return (
            f"install a vLLM wheel whose kernels include {show(gpu)}, or build vLLM from source with "
            f"TORCH_CUDA_ARCH_LIST={show(gpu)}"
        )
    if package.startswith("flashinfer"):
        return f"install the FlashInfer package for a CUDA release that knows {show(gpu)}"
    if item.source == "cubins":
        return f"get the cubins for {show(gpu)} from where these come from"
    return f"build it again with -gencode=arch=compute_{_digits(gpu)},code=sm_{_digits(gpu)}"


def _digits(gpu: Capability) -> str:
    return f"{gpu[0]}{gpu[1]}"


def _list_entry(gpu: Capability) -> str:
    try:
        return f"{FLASHINFER_LIST}={resolve_arch(gpu, (13, 0)).list_entry}"
    except ValueError:
        return f"{FLASHINFER_LIST} with the suffix"
