"""`moedoctor compare`: two reports, or what another vLLM release changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moedoctor.commands.options import (
    Capability,
    Full,
    InputError,
    Output,
    PageFormat,
    Tolerance,
    convert_errors,
    option,
    require_capability,
    require_release,
)
from moedoctor.commands.pages import deliver_document

if TYPE_CHECKING:
    from moedoctor.reporters.pages.compare import CompareDocument


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BASELINE CURRENT | -- vllm serve ...",
            help="The JSON report to compare with and the one to judge; with --release, a server's command.",
        ),
    ] = None,
    release: Annotated[
        tuple[str, str] | None,
        option("A B", "Compare two vLLM releases, such as 0.30.0 0.33.0, for a GPU and a command line."),
    ] = None,
    sm: Capability = None,
    tolerance: Tolerance = None,
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Compare two JSON reports, or two vLLM releases.

    Exit code 1 if something got worse. Reports of different GPUs or releases cannot be compared.
    """
    from moedoctor.reporters.pages.compare import CompareDocument

    if release is not None:
        document = _compare_releases(release, sm, words or ())
    elif len(words or ()) != 2:
        raise InputError("expected two JSON reports, BASELINE and CURRENT, or --release A B")
    else:
        from moedoctor import comparison
        from moedoctor.results import ReportError, load_report

        baseline, current = map(Path, words or ())
        with convert_errors(ReportError, ValueError):
            allowed = comparison.Tolerance.parse(tolerance or ())
            changed = comparison.compare(load_report(baseline), load_report(current), allowed)
        document = CompareDocument.from_changes(changed, baseline.name, current.name)
    reasons = [f"worse than {'before' if release else 'the baseline'}: {why}" for why in document.regressions]
    return deliver_document(document, format, output, full=full, code=int(bool(reasons)), reasons=reasons)


def _compare_releases(
    releases: tuple[str, str], sm: str | None, command: list[str] | tuple[()]
) -> CompareDocument:
    """Return the changes from one release to another for this GPU, or the one that `sm` names."""
    from moedoctor import environment
    from moedoctor.diagnose.upgrade import compare_releases
    from moedoctor.reporters.pages.compare import CompareDocument

    before, after = map(require_release, releases)
    capability = sm or environment.collect().get("capability")
    prefixes = ("VLLM_", "FLASHINFER_")
    variables = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    capability = require_capability(capability) if capability else None
    changes = compare_releases(before, after, capability, variables, command)
    step = "ask the release itself: moedoctor preflight --wheel FILE -- vllm serve …"
    return CompareDocument(f"vLLM {before}", f"vLLM {after}", **changes, next_steps=(step,))
