"""`moedoctor autopsy FILE|FOLDER`: the kernel that faulted, and whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import Full, InputError, Output, PageFormat
from moedoctor.commands.pages import deliver_document
from moedoctor.text import TextFileError


def autopsy(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|FOLDER", help="A core dump of CUDA, a log, or a folder with dumps and capsules."
        ),
    ],
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Name the kernel that faulted, its exception, and whose it is.

    Reads the core dump that CUDA writes with CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1, without a GPU and without
    NVIDIA's tools, or what CUDA_COREDUMP_SHOW_PROGRESS=1 wrote into a log. A dump may hold weights and
    prompts; nothing leaves this machine. `moedoctor record --when crash` asks CUDA for a dump without memory.
    Exit code 1 if a kernel faulted.
    """
    from moedoctor.diagnose.autopsy.autopsy import examine
    from moedoctor.diagnose.cuda.elf import ElfError
    from moedoctor.redaction import Redactor

    try:
        document = Redactor.from_this_process().record(examine(path))
    except (ElfError, TextFileError) as error:
        raise InputError(f"{path}: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    reasons = [f"{fault.kernel or 'a kernel'}: {fault.exception}" for fault in document.faults]
    return deliver_document(document, format, output, full=full, code=int(bool(reasons)), reasons=reasons)
