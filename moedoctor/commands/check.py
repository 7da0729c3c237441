"""`moedoctor check`."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import (
    Capability,
    CheckFormat,
    FailOn,
    Full,
    IgnoreOption,
    InputError,
    Output,
    choose_release,
    convert_errors,
    option,
    read_ignores,
    require_capability,
)
from moedoctor.commands.pages import deliver_document


def check(
    python: Annotated[
        Path | None,
        option("PATH", "Check the environment of this Python interpreter. Default: moedoctor's own."),
    ] = None,
    release: Annotated[
        str | None,
        option("X.Y.Z", "Check this vLLM release with the packages that it requires. Nothing is installed."),
    ] = None,
    source: Annotated[
        Path | None, option("DIR", "Check the vLLM in this folder, such as a checkout. Nothing of it is run.")
    ] = None,
    wheel: Annotated[
        Path | None, option("FILE", "Check the vLLM in this wheel. Nothing of it is run.")
    ] = None,
    sm: Capability = None,
    wsl: Annotated[bool, typer.Option("--wsl", help="Check for WSL 2.")] = False,
    fail_on: FailOn = "warning",
    ignore: IgnoreOption = None,
    format: CheckFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Find the known failures that can affect this environment.

    Looks at GPUs, driver, packages, settings and caches, and tries to pin memory. It runs no model and
    changes nothing. A vLLM that is no known release is read. Exit code 1 if something was found, 2 if nothing
    was found but vLLM is not there, or a part of it is not known. An error happens by default, a warning with
    a flag or in a rarer case; a note depends on the model.
    """
    from moedoctor.diagnose.check import target as targets
    from moedoctor.diagnose.check.check import apply_ignores
    from moedoctor.diagnose.check.check import check as find

    rules = read_ignores(ignore, _list_ids)
    options = {"--python": python, "--release": release, "--source": source, "--wheel": wheel}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: expected one of them")
    unpacked = source if source is not None else wheel
    if unpacked is not None and unpacked.is_dir() is (wheel is not None):
        expected = "a wheel" if wheel is not None else "a folder that holds vllm/envs.py"
        raise InputError(f"{given[0]} {unpacked}: expected {expected}")
    with convert_errors(targets.TargetError):
        target = targets.ask_python(python) if python is not None else targets.Target()
        target = targets.describe_source(unpacked) if unpacked is not None else target
    if release is not None:
        known, newer = choose_release(release)
        target = targets.describe_release(known, release.removeprefix("v") if newer else None)
    if sm is not None:
        target = targets.add_gpu(target, require_capability(sm))
    result = find(target=targets.put_on_wsl(target) if wsl else target)
    result = replace(apply_ignores(result, rules, date.today()), fail_on=fail_on)
    return deliver_document(result, format, output, full=full, code=result.exit_code, reasons=result.reasons)


def _list_ids(given: str) -> list[str]:
    """Return the ids and names of all failures if `given` looks like one; a problem has words instead."""
    from moedoctor.entries import load_entries

    ids = [name for entry in load_entries().values() for name in (entry.id, entry.name)]
    return ids if re.fullmatch(r"(?i)md\d+|[a-z]+(?:_[a-z]+)+", given) else []
