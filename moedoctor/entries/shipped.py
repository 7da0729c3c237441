"""Where built-in scenarios and shipped evidence are: in an installed wheel, or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def builtin_folder() -> Path:
    """The folder that holds one YAML file for each known failure, and `schema.json`.

    A wheel ships the folder `scenarios/` of the repository as `moedoctor/_scenarios/`; an editable
    install and a plain checkout read it where it is written.

    Raises:
        FileNotFoundError: neither is there; the message names both places.
    """
    places = _places("scenarios")
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise FileNotFoundError(
            f"built-in scenarios: neither {places[0]} nor {places[1]} is a folder; install moedoctor again"
        )
    return folder


def reports_folder() -> Path:
    """The folder of the evidence that moedoctor ships, one folder a machine. It may be missing."""
    packaged, checkout = _places("reports")
    return packaged if packaged.is_dir() else checkout


def _places(name: str) -> tuple[Path, Path]:
    """Where a top-level folder of the repository is: inside the wheel, and in a checkout."""
    return _PACKAGE / f"_{name}", _PACKAGE.parent / name
