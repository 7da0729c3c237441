"""`moedoctor audit PATH...`: the GPU code on the disk, and whether a GPU can run it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import moedoctor
from moedoctor import environment
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.diagnose.cuda.audit import NO_TOOL, AuditError, Fate, Item, audit, fate_of
from moedoctor.fixes.arch.targets import Capability, parse_capability, show
from moedoctor.processes.cuda_tools import Tool, find_tools
from moedoctor.redaction import Redactor
from moedoctor.reporters.output import OutputError, check_writable, write
from moedoctor.reporters.text import one_line

FORMATS = ("table", "json", "markdown")


def audit_command(
    paths: Sequence[Path], capability: str | None = None, format: str = "table", output: Path | None = None
) -> int:
    """List the targets in `paths` and what a GPU of `capability` does with them; the exit code.

    Without `capability` this machine's GPU is taken; where there is none, targets are listed and not
    judged. 1 where a file holds nothing for the GPU, or was compiled without what its kernels need.
    Raises InputError for a wrong format or capability, and for a path that cannot be audited.
    """
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    if not paths:
        raise InputError("audit: no path given; expected a FlashInfer cache, a .so, .cubin or .whl file")
    with as_input_error(ValueError, OutputError):
        gpu = parse_capability(capability) if capability is not None else _own_capability()
        check_writable(output)
    tool = next(reversed(find_tools(["cuobjdump"])), None)
    with as_input_error(AuditError):
        items = audit(paths, gpu, tool)
    code = 1 if any(one.fate is Fate.MISSING or one.lacks for one in items) else 0
    text = _json(items, gpu, tool, code) if format == "json" else _page(items, gpu, tool, format)
    if output is None:
        sys.stdout.write(text)
    else:
        with as_input_error(OutputError):
            write(output, text)
        print(f"moedoctor: {_summary(items)}; written to {output}", file=sys.stderr)
    return code


def _own_capability() -> Capability | None:
    found = environment.collect()["capability"]
    return parse_capability(found) if found else None


def _verdict(item: Item) -> str:
    """What is to be said of one file, in a few words."""
    if item.skipped:
        return f"skipped: {item.skipped}"
    if item.fate is None:
        return item.note or "not judged"
    said = item.fate.value
    if item.lacks:
        said += f", but compiled without {', '.join(item.lacks)}"
    return f"{said}; {item.note}" if item.note else said


def _lists(item: Item, gpu: Capability | None) -> tuple[str, str]:
    """(what runs on the GPU, what does not), as ``SASS 120f ×19, PTX 80``; without a GPU all in the first."""
    runs: list[str] = []
    rest: list[str] = []
    for image in sorted(item.images, key=lambda one: (one.kind != "sass", one)):
        count = f" ×{image.count}" if image.count > 1 else ""
        usable = gpu is None or fate_of([image], gpu) is not Fate.MISSING
        (runs if usable else rest).append(f"{image.kind.upper()} {image.target}{count}")
    return ", ".join(runs) or "–", ", ".join(rest) or "–"


def _file(item: Item, redactor: Redactor) -> str:
    return one_line(redactor.text(item.path) + (f" ({item.module})" if item.module else ""))


def _summary(items: Sequence[Item]) -> str:
    fates = Counter(one.fate for one in items)
    counts = [f"{fates[fate]} {fate.value}" for fate in Fate]
    lacking = sum(1 for one in items if one.lacks)
    skipped = sum(1 for one in items if one.skipped)
    return " · ".join([*counts, f"{lacking} compiled without what they need", f"{skipped} skipped"])


def _page(items: Sequence[Item], gpu: Capability | None, tool: Tool | None, format: str) -> str:
    where = f"on a GPU of {show(gpu)}" if gpu else "no GPU named: give one with --sm, such as 12.0"
    head = f"device code, {where} ({tool or 'no cuobjdump: ' + NO_TOOL})"
    redactor = Redactor.of_this_process()
    rows = [
        (_file(one, redactor), *_lists(one, gpu), one_line(redactor.text(_verdict(one)))) for one in items
    ]
    runs = "runs there" if gpu else "targets"
    if format == "markdown":
        cells = [("file", runs, "does not", "verdict"), ("---",) * 4, *rows]
        lines = [
            "# " + head,
            "",
            *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells),
        ]
    else:
        lines = [head]
        for name, usable, rest, said in rows:
            lines += ["", name, f"    {said}"]
            lines += [
                f"    {label}: {shown}"
                for label, shown in ((runs, usable), ("does not", rest))
                if shown != "–"
            ]
    if not rows:
        lines += ["", "no shared object, cubin, wheel or build file found"]
    return "\n".join([*lines, "", _summary(items), *(f"\n{one}" for one in _next_steps(items, gpu))]) + "\n"


def _next_steps(items: Sequence[Item], gpu: Capability | None) -> Iterator[str]:
    """What to do about each kind of finding, once."""
    if gpu is None:
        return
    if any(one.fate is Fate.MISSING for one in items):
        yield (
            f"MD004: what is missing fails with `no kernel image is available`; build it for {show(gpu)} "
            "(FlashInfer: remove the module's folder and start with FLASHINFER_CUDA_ARCH_LIST unset)."
        )
    if any(one.lacks for one in items):
        yield (
            "MD004: kernels built for a target without suffix end in a compiler error or in output that is "
            f"never written; remove the module's folder and set {_list_entry(gpu)}."
        )


def _list_entry(gpu: Capability) -> str:
    from moedoctor.fixes.arch import FLASHINFER_LIST, resolve_arch

    try:
        return f"{FLASHINFER_LIST}={resolve_arch(gpu, (13, 0)).list_entry}"
    except ValueError:
        return f"{FLASHINFER_LIST} with the suffix"


def _json(items: Sequence[Item], gpu: Capability | None, tool: Tool | None, code: int) -> str:
    redactor = Redactor.of_this_process()
    fates = Counter(one.fate for one in items)
    document: dict[str, Any] = {
        "schema_version": 1,
        "moedoctor": moedoctor.__version__,
        "command": "audit",
        "capability": show(gpu) if gpu else None,
        "tool": str(tool) if tool else None,
        "items": [_item(item, gpu, redactor) for item in items],
        "findings": [
            {
                "id": "MD004",
                "line": None,
                "evidence": f"{redactor.text(item.path)}: {_verdict(item)}",
                "confidence": 1.0,
                "next_step": step,
            }
            for item in items
            for step in _next_steps([item], gpu)
        ],
        "summary": {
            **{fate.name.lower(): fates[fate] for fate in Fate},
            "lacking": sum(1 for one in items if one.lacks),
            "skipped": sum(1 for one in items if one.skipped),
            "exit_code": code,
        },
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _item(item: Item, gpu: Capability | None, redactor: Redactor) -> dict[str, Any]:
    images = []
    for one in item.images:
        fate = fate_of([one], gpu) if gpu else None
        shown = {"kind": one.kind, "target": str(one.target), "count": one.count}
        images.append({**shown, "verdict": fate.name.lower() if fate else None})
    return {
        "path": redactor.text(item.path),
        "source": item.source,
        "module": item.module,
        "verdict": item.fate.name.lower() if item.fate else None,
        "lacks": list(item.lacks),
        "note": item.note,
        "skipped": redactor.text(item.skipped) if item.skipped else None,
        "images": images,
    }
