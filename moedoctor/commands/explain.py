"""`moedoctor explain`."""

from __future__ import annotations

import json
import shutil
import sys

from moedoctor import catalogue
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.commands.explained import Explained, explained_entry, explained_fault
from moedoctor.entries import entries, find_entry
from moedoctor.text import nearest

FORMATS = ("table", "markdown", "json")
_MAX_WIDTH = 110


def explain_text(entry: str, format: str) -> str:
    """One entry in full: Markdown, JSON, or laid out for a terminal where stdout is one."""
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    explained = _find(entry)
    if format == "json":
        return json.dumps({"schema_version": 1, **explained.to_json()}, indent=1, ensure_ascii=False) + "\n"
    markdown = "\n".join(explained.markdown())
    if format == "markdown" or not sys.stdout.isatty():
        return markdown + "\n"
    return laid_out(markdown, min(shutil.get_terminal_size().columns, _MAX_WIDTH))


def laid_out(markdown: str, width: int) -> str:
    """`markdown` drawn for a terminal of `width` columns; NO_COLOR is obeyed."""
    from io import StringIO

    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(file=StringIO(), force_terminal=True, width=width)
    with console.capture() as captured:
        console.print(Markdown(markdown))
    return captured.get()


def _find(text: str) -> Explained:
    """The entry of ours, or the known failure of another project, with this id or name."""
    entry = find_entry(text)
    with as_input_error(catalogue.PluginError):
        if entry is not None:
            return explained_entry(entry, runs=entry.name in catalogue.registered_names())
        others = catalogue.faults_beside({one.name for one in entries().values()})
    wanted = text.strip().lower().replace("-", "_")
    fault = next((one for one in others if wanted in (one.id.lower(), one.name)), None)
    if fault is not None:
        return explained_fault(fault)
    known = [name for one in entries().values() for name in (one.id, one.name)]
    known += [name for one in others for name in (one.id, one.name)]
    raise InputError(f"{text}: no such entry; {nearest(text, known)} `moedoctor list` shows what there is")
