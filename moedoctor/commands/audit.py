"""`moedoctor audit PATH...`: the GPU code on the disk, and whether a GPU can run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import Capability, Full, Output, TextFormat, convert_errors
from moedoctor.commands.pages import deliver_document


def audit(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="A FlashInfer JIT cache, a folder, wheel, .so or .cubin file."),
    ],
    sm: Capability = None,
    format: TextFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Show which GPUs compiled kernels are for.

    Lists the SASS and PTX targets of each file, and whether the GPU loads them, compiles them from PTX, or
    finds nothing. Exit code 1 if a file that the GPU uses has nothing for it, or lacks instructions that its
    kernels need.
    """
    from moedoctor import environment
    from moedoctor.diagnose.cuda.audit import AuditError, audit
    from moedoctor.fixes.arch.targets import parse_capability
    from moedoctor.processes.cuda_tools import find_tools
    from moedoctor.redaction import Redactor
    from moedoctor.reporters.pages.audit import AuditDocument, describe_verdict

    capability = sm if sm is not None else environment.collect()["capability"]
    with convert_errors(ValueError, AuditError):
        gpu = parse_capability(capability) if capability else None
        tool = next(reversed(find_tools(["cuobjdump"])), None)
        items = Redactor.from_this_process().record(audit(paths, gpu, tool))
    document = AuditDocument.from_items(items, gpu, str(tool) if tool else None)
    reasons = [f"MD004: {item.path}: {describe_verdict(item)}" for item in document.wrong]
    return deliver_document(document, format, output, full=full, code=int(bool(reasons)), reasons=reasons)
