"""From what a person names to scenario files: paths, folders, catalogue names and ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from moedoctor import catalogue
from moedoctor.entries import find_builtin_folder
from moedoctor.scenario.file import Scenario, load
from moedoctor.text import TextFileError, find_closest, list_names, shorten, suggest_names

_SUFFIXES = (".yaml", ".yml")
_MAX_FILES = 1000


class TargetError(Exception):
    """A name without a scenario; as text, one line that says what was expected."""


def load_targets(targets: Sequence[str]) -> list[Scenario]:
    """Return the scenarios that `targets` name, each once; no target means all built-in ones.

    Raises TargetError for an unknown name, ScenarioError for a file that is wrong.
    """
    scenarios: dict[str, Scenario] = {}
    for target in targets or [str(find_builtin_folder())]:
        for path in _find_files(target):
            try:
                real = os.path.realpath(path)  # Path.resolve raises for a loop of links
            except ValueError:
                raise TargetError(f"{target}: is not a file name, expected a scenario file") from None
            if real not in scenarios:
                scenarios[real] = load_scenario(path)
    return list(scenarios.values())


def load_scenario(path: Path) -> Scenario:
    """Return one scenario, whose file is shown as ``scenarios/NAME.yaml`` if it is built in."""
    builtin = os.path.dirname(os.path.realpath(path)) == os.path.realpath(find_builtin_folder())
    shown = f"scenarios/{path.name}" if builtin else str(path)
    return load(path, faults=catalogue.load_faults(), subject_kind=catalogue.find_subject_kind, shown=shown)


def find_builtin_file(name: str) -> Path:
    """Return the path of the built-in scenario of the known failure called `name`."""
    return find_builtin_folder() / f"{name}.yaml"


def _find_files(target: str) -> Iterable[Path]:
    path = Path(target)
    fault = catalogue.find_fault(target)
    if fault is not None and not os.path.isfile(path):
        return [find_builtin_file(fault.name)]
    if os.path.isdir(path):  # Path.is_dir raises for impossible names
        try:
            files = [path / name for name in list_names(path, "*") if name.endswith(_SUFFIXES)]
        except TextFileError as error:
            raise TargetError(f"{target}: {error.message}") from error
        if not files:
            raise TargetError(
                f"{target}: no scenario in this folder; expected files that end in .yaml or .yml"
            )
        if len(files) > _MAX_FILES:
            raise TargetError(f"{target}: {len(files)} files in this folder; expected at most {_MAX_FILES}")
        return files
    if path.suffix in _SUFFIXES or len(path.parts) > 1 or os.path.exists(path):
        return [path]
    known = [*catalogue.load_faults(), *(fault.name for fault in catalogue.load_faults().values())]
    hint = suggest_names(find_closest(target, known))
    raise TargetError(
        f"{shorten(target, 200)}: no such scenario file, folder, id or name; {hint}{' ' if hint else ''}"
        "`moedoctor list` shows what there is"
    )
