"""Presets: the fields of the published config.json files of the models that the reports are about."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from moedoctor.models.config import read_config, shape_of
from moedoctor.models.config_fields import ConfigError
from moedoctor.models.shape import ModelShape
from moedoctor.text import shorten, suggest_expected


def list_presets() -> Sequence[str]:
    """Return the names of the presets in alphabetical order."""
    folder = resources.files("moedoctor.models") / "presets"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def load_preset(name: str) -> ModelShape:
    """Return the preset called `name`, in any case. Raises ConfigError, which lists the presets."""
    return shape_of(read_preset(name), name.lower(), f"preset {name.lower()}")


def read_preset(name: str) -> dict[str, Any]:
    """Return the fields of the preset's config.json, and ``_source``. Raises ConfigError."""
    if name.lower() not in list_presets():
        raise ConfigError(
            f"--model {shorten(name, 200)}: no such preset or folder; "
            f"{suggest_expected(name, list_presets())}, or a folder with a config.json"
        )
    file = resources.files("moedoctor.models") / "presets" / f"{name.lower()}.json"
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def find_model(name: str) -> ModelShape:
    """Return the model in the folder `name`, else the preset of that name. Raises ConfigError."""
    path = Path(name)
    if os.path.isdir(path) or path.name == "config.json":
        return read_config(path / "config.json" if os.path.isdir(path) else path)
    return load_preset(name)
