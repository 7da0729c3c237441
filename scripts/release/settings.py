"""Reads out of an unpacked release which settings there are: variables of vLLM and FlashInfer, vLLM's flags.

The syntax trees show which names are read and where. What a variable makes of a value is found by reading it
with that value. The tables are those in moedoctor/diagnose/settings/data.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import ROOT, Row, read_json, replace_rows, write_json

from moedoctor.upstream.releases.questions import Inquiry, find_place
from moedoctor.upstream.releases.release_source import ReleaseSource

OUT = ROOT / "moedoctor" / "diagnose" / "settings" / "data"
PROBES = ("0", "1", "2", "-1", "true", "True", "false", "yes", "on", "1.5", "banana")
NAMES = {"VLLM": re.compile(r"VLLM_[A-Z0-9_]+"), "FLASHINFER": re.compile(r"FLASHINFER_[A-Z0-9_]+")}
MOE_CODE = (
    *("model_executor/layers/fused_moe/oracle/*.py", "model_executor/layers/fused_moe/modular_kernel.py"),
    *("model_executor/layers/fused_moe/**/*.py", "config/parallel.py", "config/kernel.py"),
    *("utils/flashinfer.py", "utils/deep_gemm.py", "utils/import_utils.py", "utils/b12x.py"),
)
"""Code that decides about MoE layers, the most telling first."""
READERS = {"vllm_is_batch_invariant": "VLLM_BATCH_INVARIANT"}
"""Functions that read a variable for others."""
VALUES = {
    "--tool-call-parser": ("vllm/tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "--reasoning-parser": ("vllm/reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
    "--attention-backend": ("vllm/v1/attention/backends/registry.py", "AttentionBackendEnum"),
    "--kv-cache-dtype": ("vllm/config/cache.py", "CacheDType"),
    "--quantization": ("vllm/model_executor/layers/quantization/__init__.py", "QuantizationMethods"),
    "--load-format": ("vllm/model_executor/model_loader/__init__.py", "LoadFormats"),
    "--speculative-config": ("vllm/config/speculative.py", "SpeculativeMethod"),
}
"""A flag -> the file, and the place in it, that lists the values by name."""
_GETENV = re.compile(r'getenv\(\s*"(FLASHINFER_[A-Z0-9_]+)"')


def write_settings(folder: Path, flashinfer: str, releases: Sequence[str], pins: Sequence[str]) -> None:
    """Put the release in `folder`, and the FlashInfer that it requires, into the tables.

    `releases` are the known ones of vLLM and this, `pins` those of FlashInfer, oldest first.
    """
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    write_table("vllm_variables.json", folder.name, vllm_variables(folder), releases)
    write_table("flashinfer_variables.json", flashinfer, flashinfer_variables(folder), pins)
    write_table("vllm_flags.json", folder.name, flags(folder), releases)
    write_table("vllm_values.json", folder.name, values(folder), releases)


def write_table(
    name: str, release: str, settings: Iterable[tuple[str, Row]], releases: Sequence[str]
) -> None:
    """Put the settings of a release, name -> facts, into a table that is sorted by name."""
    rows = [{"name": setting, **facts} for setting, facts in settings]
    merged = replace_rows(read_json(OUT / name)["rows"], release, rows, releases)
    ordered = [{"name": row["name"], **row} for row in sorted(merged, key=lambda row: row["name"])]
    write_json(OUT / name, {"rows": ordered})


def trees(folder: Path, mentioning: str) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if mentioning not in text:
            continue
        try:
            yield file.relative_to(folder.parent).as_posix(), ast.parse(text)
        except SyntaxError:
            print(f"{file}: does not parse", file=sys.stderr)


def vllm_variables(release: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    moe = moe_variables(release / "vllm")
    for name, row in all_variables(release):
        yield name, {**row, **({"moe": moe[name]} if name in moe else {})}


def moe_variables(root: Path) -> dict[str, str]:
    """The variables that code of MoE layers reads -> the file."""
    files: dict[str, str] = {}
    for file in (file for pattern in MOE_CODE for file in sorted(root.glob(pattern))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else None
            if isinstance(node, ast.Name):
                name = READERS.get(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
            if name is not None and NAMES["VLLM"].fullmatch(name):
                files.setdefault(name, file.relative_to(root.parent).as_posix())
    return files


def all_variables(release: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    declared = dict(read_declarations(release / "vllm" / "envs.py"))
    yield from declared.items()
    for path, tree in trees(release / "vllm", "VLLM_"):
        if path == "vllm/envs.py":
            continue
        for name, line in find_names(tree, NAMES["VLLM"]):
            if name not in declared:
                declared[name] = {}
                yield name, {"kind": "elsewhere", "source": f"{path}:{line}"}


def find_names(tree: ast.Module, pattern: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """Names that are looked up in the environment: an argument of get or getenv, an index, the left side of
    `in`."""
    for node in ast.walk(tree):
        names: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if "env" in called.lower() or called.rpartition(".")[2] in ("get", "pop", "setdefault"):
                names = node.args[:1]
        elif isinstance(node, ast.Subscript):
            names = [node.slice]
        elif isinstance(node, ast.Compare):
            names = [node.left]
        for expression in names:
            if (
                isinstance(expression, ast.Constant)
                and isinstance(expression.value, str)
                and pattern.fullmatch(expression.value)
            ):
                yield expression.value, node.lineno


def read_declarations(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign | ast.Assign)
        and "environment_variables"
        in ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    )
    assert isinstance(table, ast.Dict)
    readers = load(file).environment_variables
    for key, reader in zip(table.keys, table.values, strict=True):
        assert isinstance(key, ast.Constant)
        name = str(key.value)
        yield name, {**facts(name, reader, readers[name]), "source": f"vllm/envs.py:{key.lineno}"}


def facts(name: str, reader: ast.expr, read: Callable[[], Any]) -> dict[str, Any]:
    """Return the values that a variable takes, and its default where that is plain."""
    default = outcome(name, None, read)
    shown = {"default": default[1]} if default[0] and isinstance(default[1], str | int | float | bool) else {}
    if isinstance(default[1], str) and "/" in default[1]:
        shown = {}  # a path on the machine that this ran on
    if outcome(name, None, read) != default:
        shown = {}  # drawn anew each time
    calls = [part for part in ast.walk(reader) if isinstance(part, ast.Call)]
    if any(ast.unparse(part.func).startswith("deprecated") for part in calls):
        shown["deprecated"] = True
    call = next((part for part in calls if "with_choices" in ast.unparse(part.func)), None)
    if call is not None:
        choices = ast.literal_eval(
            next(
                part
                for part in (*call.args, *(k.value for k in call.keywords))
                if isinstance(part, ast.List | ast.Tuple) and len(part.elts) > 1
            )
        )
        sensitive = not any(
            k.arg == "case_sensitive" and ast.unparse(k.value) == "False" for k in call.keywords
        )
        several = "list" in ast.unparse(call.func) or "set" in ast.unparse(call.func)
        return {
            "kind": "choices" if several else "choice",
            "choices": list(choices),
            "case_sensitive": sensitive,
            **shown,
        }
    return {**kind({value: outcome(name, value, read) for value in PROBES}), **shown}


def kind(outcomes: Mapping[str, tuple[bool, Any]]) -> dict[str, Any]:
    """number, switch (a number that counts as on or off), decimal, words (what is not a word for on is off),
    text."""
    if not any(ok for ok, _ in outcomes.values()):
        return {"kind": "special"}
    values = [value for ok, value in outcomes.values() if ok]
    if not outcomes["banana"][0]:
        if outcomes["1.5"][0]:
            return {"kind": "decimal"}
        return {"kind": "switch" if all(isinstance(value, bool) for value in values) else "number"}
    if all(isinstance(value, bool) for value in values):
        off = [probe for probe, (_, value) in outcomes.items() if value is False]
        on = [probe for probe, (_, value) in outcomes.items() if value is True]
        return {"kind": "words", "on": on} if "banana" in off else {"kind": "words", "off": off}
    return {"kind": "text"}


def outcome(name: str, value: str | None, read: Callable[[], Any]) -> tuple[bool, Any]:
    before = dict(os.environ)
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        return True, read()
    except Exception as error:
        return False, type(error).__name__
    finally:
        os.environ.clear()
        os.environ.update(before)


def load(file: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"envs_of_{file.parent.parent.name.replace('.', '_')}", file
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def flashinfer_variables(release: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    sources: dict[str, str] = {}
    for path, tree in trees(release / "flashinfer", "FLASHINFER_"):
        for name, line in find_names(tree, NAMES["FLASHINFER"]):
            sources.setdefault(name, f"{path}:{line}")
    for file in sorted((release / "flashinfer" / "data").rglob("*")):
        if file.suffix in {".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc"} and file.is_file():
            for name in _GETENV.findall(file.read_text(encoding="utf-8", errors="replace")):
                sources.setdefault(name, file.relative_to(release).as_posix())
    for name, source in sources.items():
        yield name, {"source": source}


def flags(release: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give every flag, as the engine's parser has it if another command has the name, too."""
    inquiry = Inquiry(ReleaseSource(release))
    choices = inquiry.list_choices()
    for name, (source, long) in inquiry.list_flags().items():
        listed = {"choices": list(choices[name])} if name in choices else {}
        yield name, {**listed, **({"of": long} if long not in ("", name) else {}), "source": source}


def values(release: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the values of flags whose values have names, as ``--tool-call-parser glm47``."""
    for flag, (file, place) in VALUES.items():
        tree = ast.parse((release / file).read_text(encoding="utf-8"))
        for name, line in list_values(tree, place):
            yield f"{flag} {name}", {"source": f"{file}:{line}"}


def list_values(tree: ast.Module, place: str) -> Iterator[tuple[str, int]]:
    """Give the keys of a dictionary, the members of an Enum, or the strings of a Literal."""
    found = find_place(tree, place)
    if isinstance(found, ast.ClassDef):
        targets = (part.targets[0] for part in found.body if isinstance(part, ast.Assign))
        yield from (
            (part.id, part.lineno) for part in targets if isinstance(part, ast.Name) and part.id.isupper()
        )
        return
    value = found.value if isinstance(found, ast.Assign) else None
    for part in value.keys if isinstance(value, ast.Dict) else ast.walk(value) if value else ():
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value, part.lineno
        elif isinstance(part, ast.Name) and part.id.endswith("Types"):
            yield from list_values(tree, part.id)
