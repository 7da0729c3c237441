"""The model of a command line: a folder, a config.json, the Hugging Face cache, or a file of headers.

`pack_headers` writes the JSON files and the safetensors headers of a checkpoint into a small zip
file. `open_model` makes a folder of it again: its safetensors files have a size and no data.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moedoctor.diagnose.checkpoint.safetensors_header import (
    MOST_HEADER_BYTES,
    CheckpointError,
    TensorInfo,
    read_header,
)
from moedoctor.text import TextFileError, list_names, open_file, read_bytes

Headers = Mapping[str, Sequence[tuple[str, str, tuple[int, ...]]]]
"""Path of a safetensors file -> its tensors as (name, dtype, shape)."""
_NAME = re.compile(r"[\w.-]{1,200}\.(?:json|safetensors)", re.ASCII)
_LEFT_OUT = ("tokenizer.json", "vocab.json")
"""Large JSON files that no stage reads."""
_MOST_FILES = 10_000
_MOST_JSON = 32_000_000
_MOST_UNPACKED = 1_000_000_000
_REPOSITORY = re.compile(r"[\w.-]{1,100}/[\w.-]{1,100}", re.ASCII)


class ModelError(Exception):
    """A model that is not there or cannot be read; one line says what was expected."""


@dataclass(frozen=True)
class Model:
    """A checkpoint folder, as preflight sees it."""

    folder: Path
    headers: Headers
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def open_model(name: str, revision: str = "main") -> Iterator[Model]:
    """Give the folder of a model; a temporary one is gone afterwards. Raises ModelError."""
    with tempfile.TemporaryDirectory(prefix="moedoctor-preflight-") as scratch:
        path = Path(name)
        notes: tuple[str, ...] = ()
        if os.path.isfile(path):
            folder = Path(scratch) / "model"
            folder.mkdir()
            notes = (_fill_folder(path, folder),)
        elif os.path.isdir(path):
            folder = path.absolute()
        else:
            folder = find_cached(name, revision)
            notes = (f"{name}: snapshot {folder.name} of the Hugging Face cache",)
        if not os.path.isfile(folder / "config.json"):
            raise ModelError(f"{name}: has no config.json, expected a checkpoint folder")
        yield Model(folder, read_headers(folder), notes)


def _fill_folder(path: Path, folder: Path) -> str:
    """Make a folder of a config.json, or of a file that `pack_headers` wrote; return a note."""
    if path.suffix == ".json":
        with _convert_errors(path):
            folder.joinpath("config.json").write_bytes(read_bytes(path, _MOST_JSON, "a config.json"))
        return f"{path.name} alone, without a checkpoint"
    unpack_headers(path, folder)
    return f"{path.name}: headers of a checkpoint, without its weights"


def find_cached(name: str, revision: str = "main") -> Path:
    """Return the snapshot of a repository in the Hugging Face cache that vLLM takes. Raises ModelError."""
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    root = cache / f"models--{name.replace('/', '--')}"
    with contextlib.suppress(OSError):
        revision = (root / "refs" / revision).read_text(encoding="utf-8").strip()
    folder = root / "snapshots" / revision
    if not _REPOSITORY.fullmatch(name) or not (folder / "config.json").is_file():
        raise ModelError(
            f"{name}: is not a folder here, and not in the Hugging Face cache; expected a checkpoint folder, "
            "its config.json, or a file that `moedoctor preflight headers FOLDER` wrote. Without weights: "
            f"`hf download {name} --include '*.json'`"
        )
    return folder


def read_headers(folder: Path) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
    """Return the tensors of each safetensors file of a folder. Raises ModelError for a damaged one."""
    headers = {}
    for name in _list_names(folder, "*.safetensors"):
        with _convert_errors(folder):
            tensors = read_header(folder / name)
        key = os.path.realpath(folder / name)
        # In the order of safetensors' own reader, so that the same tensor is refused first.
        headers[key] = [(each, info.dtype, info.shape) for each, info in sorted(tensors.items())]
    return headers


def _list_names(folder: Path, pattern: str) -> list[str]:
    names = sorted(list_names(folder, pattern))
    if len(names) > _MOST_FILES:
        raise ModelError(f"{folder}: has {len(names)} files of {pattern}, expected at most {_MOST_FILES}")
    return names


@contextlib.contextmanager
def _convert_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ModelError(f"{place}: {error}") from error
    except TextFileError as error:
        raise ModelError(f"{place}: {error.message}") from error
    except OSError as error:
        raise ModelError(f"{place}: cannot be read ({error.strerror})") from error


def pack_headers(folder: Path, file: Path) -> int:
    """Write the JSON files and safetensors headers of a checkpoint into a zip file; return its bytes.

    A header is stored as safetensors begins: eight bytes of its length, then its JSON. Raises ModelError.
    """
    if not os.path.isfile(folder / "config.json"):
        raise ModelError(f"{folder}: has no config.json, expected a checkpoint folder")
    temporary = file.with_name(f".{file.name}.part")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as pack:
            for name in _list_names(folder, "*.json"):
                if name not in _LEFT_OUT and _NAME.fullmatch(name):
                    with _convert_errors(folder / name):
                        pack.writestr(name, read_bytes(folder / name, _MOST_JSON))
            for name in _list_names(folder, "*.safetensors"):
                with _convert_errors(folder):
                    tensors = read_header(folder / name)
                pack.writestr(name, _begin_file(tensors))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file.stat().st_size


def _begin_file(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Return the beginning of a safetensors file with these tensors, up to their data."""
    base = min((info.start for info in tensors.values()), default=0)
    entries = {
        name: {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [info.start - base, info.start - base + info.size],
        }
        for name, info in tensors.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def unpack_headers(file: Path, folder: Path) -> None:
    """Write the files of a pack into `folder`, safetensors files with a hole for data. Raises ModelError."""
    expected = "expected a file that `moedoctor preflight headers` wrote"
    try:
        with open_file(file, expected="a file of headers") as opened, zipfile.ZipFile(opened) as pack:
            members = pack.infolist()
            if len(members) > _MOST_FILES or sum(each.file_size for each in members) > _MOST_UNPACKED:
                raise ModelError(f"{file}: unpacks to too much, {expected}")
            for member in members:
                if not _NAME.fullmatch(member.filename) or member.file_size > MOST_HEADER_BYTES + 8:
                    raise ModelError(f"{file}: holds {member.filename[:80]!r}, {expected}")
                target = folder / member.filename
                with pack.open(member) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)
                    if target.suffix == ".safetensors":
                        out.truncate(out.tell() + _read_data_size(target, out))
    except TextFileError as error:
        raise ModelError(f"{file}: {error.message}") from error
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ModelError(f"{file}: cannot be read ({error}), {expected}") from error


def _read_data_size(path: Path, written: IO[bytes]) -> int:
    """Return the bytes of data that the header of a file describes. Raises ValueError."""
    written.flush()
    data = path.read_bytes()
    if len(data) < 8 or struct.unpack("<Q", data[:8])[0] != len(data) - 8:
        raise ValueError(f"the header of {path.name} has another length")
    entries = json.loads(data[8:])
    ends = [
        entry["data_offsets"][1]
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
        if name != "__metadata__"
        and isinstance(entry, dict)
        and isinstance(entry.get("data_offsets"), list)
        and len(entry["data_offsets"]) == 2
        and type(entry["data_offsets"][1]) is int
    ]
    size = max(ends, default=0)
    if not 0 <= size < 1 << 43:
        raise ValueError(f"{path.name} claims {size} bytes")
    return size
