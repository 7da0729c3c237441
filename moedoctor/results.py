"""The records of a run, from one measurement up to the whole report, and their JSON.

The records are frozen dataclasses without torch, and every format is made from them. `to_json` writes any of
them, `from_json` reads one back, and `load_report` reads the file that `moedoctor run --format json` wrote.
The JSON of a `Report` has the fields here; its schema is made from them.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from moedoctor.text import TextFileError, escape, escape_json, explain, join_path, read_text, shorten

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 1
MAX_REPORT_BYTES = 64 * 1024 * 1024

UNKNOWN_CAUSE = "unknown_cause"
"""The conclusion of a scenario whose control may not be what was reported, in one line."""
_SPARSE = MappingProxyType({"sparse": True})
"""A field that JSON leaves out if it is None; reports of older releases have none."""

Scalar = str | int | float | bool | None
"""One parameter value of a case."""

Evidence = Mapping[str, Any]
"""Measured figures and quoted text, by name. Values must survive JSON: no NaN, no tensors."""


class Tier(str, enum.Enum):
    """The kind of code that a run executes."""

    MODEL = "model"
    """Restated algorithm, any machine."""
    LIBRARY = "library"
    """Real upstream Python code, no GPU."""
    KERNEL = "kernel"
    """Real kernels on a GPU."""
    ENGINE = "engine"
    """A real `vllm.LLM`."""


class CaseVerdict(str, enum.Enum):
    """The verdict of one case."""

    REPRODUCED = "reproduced"
    CLEAN = "clean"
    SKIPPED = "skipped"
    ERROR = "error"


class ScenarioVerdict(str, enum.Enum):
    """The verdict of all cases of one scenario together."""

    PROVED = "proved"
    """The failure was seen in `faulty` and is gone in `fixed`, in this run."""
    FOUND = "found"
    """`installed` or a named release shows the failure, and the scenario file does not expect that."""
    ABSENT = "absent"
    """The control did not reproduce, and the fault's own rule says from what it saw why it cannot here."""
    FAILED = "failed"
    """The control or the fix did not behave as expected."""
    SKIPPED = "skipped"
    ERROR = "error"


class ClaimVerdict(str, enum.Enum):
    """The verdict of this machine on a statement made upstream."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNTESTED = "untested"


@dataclass(frozen=True)
class Look:
    """The look of a verdict in every format, and its meaning for one."""

    tone: Literal["good", "bad", "warn", "info", "quiet", "odd"]
    """The way a format sets the word apart."""
    rank: int = 0
    """0 is the best verdict of a scenario. The worst come first, and a higher rank is a regression."""
    wrong: bool = False
    junit: Literal["", "failure", "error", "skipped"] = ""
    """The outcome of a testcase; empty if it passes."""
    sarif: Literal["", "error", "warning", "note"] = ""
    """The level of an annotation; empty for none. SARIF lists only what is wrong."""


VERDICTS: Mapping[str, Look] = MappingProxyType(
    {
        ScenarioVerdict.PROVED: Look("good"),
        ScenarioVerdict.ABSENT: Look("info", 1, sarif="note"),
        ScenarioVerdict.SKIPPED: Look("quiet", 2, junit="skipped", sarif="warning"),
        ScenarioVerdict.FOUND: Look("bad", 3, wrong=True, junit="failure", sarif="error"),
        ScenarioVerdict.ERROR: Look("bad", 4, wrong=True, junit="error", sarif="error"),
        ScenarioVerdict.FAILED: Look("bad", 5, wrong=True, junit="failure", sarif="error"),
        CaseVerdict.REPRODUCED: Look("warn"),
        CaseVerdict.CLEAN: Look("good"),
        ClaimVerdict.CONFIRMED: Look("good"),
        ClaimVerdict.REFUTED: Look("odd"),
        ClaimVerdict.UNTESTED: Look("quiet"),
    }
)
"""The words of all verdicts; a case that is `skipped` or an `error` looks like a scenario."""


class Death(str, enum.Enum):
    """The ways in which a child process ends without an observation."""

    ILLEGAL_MEMORY_ACCESS = "illegal_memory_access"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    DEVICE_ASSERT = "device_assert"
    NO_KERNEL_IMAGE = "no_kernel_image"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    BROKEN_LIBRARY = "broken_library"
    """A library that the case needs, such as torch, is installed and cannot be imported."""
    CUDA_ERROR = "cuda_error"
    """Any other error that CUDA reports."""
    EXCEPTION = "exception"
    """A Python exception that is none of the above."""
    SIGNAL = "signal"
    HANG = "hang"
    """No result within the time limit."""
    SILENT = "silent"
    """The process ended by itself and said nothing."""


@dataclass(frozen=True)
class Observation:
    """The measurements of one case: numbers and text, no opinion."""

    evidence: Evidence
    """Figures by name, e.g. ``{"rows": 128, "rows_with_duplicates": 13}``."""


@dataclass(frozen=True)
class Crash:
    """A child that died instead of answering."""

    death: Death
    message: str
    """One line: the exception, the signal's name, or the time limit."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines the child wrote to stderr."""

    def to_evidence(self) -> dict[str, Any]:
        """The crash as evidence of a case."""
        return {"death": self.death.value, "message": self.message, "stderr_tail": list(self.stderr_tail)}


@dataclass(frozen=True)
class Skip:
    """A case or measurement that cannot run here."""

    reason: str


Outcome = Observation | Crash | Skip
"""The answer of a child process."""


class UnavailableError(Exception):
    """Raised in a child where a subject or a case turns out not to be runnable: the case is skipped."""


@dataclass(frozen=True)
class Case:
    """One subject on one point of a scenario's matrix, before it runs."""

    scenario: str
    """Catalogue id, e.g. ``MD001``."""
    subject: str
    """``faulty``, ``fixed``, ``installed`` or a named release such as ``vllm@0.19.1``."""
    tier: Tier
    parameters: Mapping[str, Scalar]
    device: str = "cpu"
    """``cpu`` or ``cuda:N``."""


def _count() -> Any:
    return field(default=0, metadata={"ge": 0})


@dataclass(frozen=True)
class CaseResult:
    """One case, judged."""

    subject: str
    tier: Tier
    device: str = field(default="cpu", kw_only=True)
    parameters: Mapping[str, Scalar]
    verdict: CaseVerdict
    expected: CaseVerdict | None = field(default=None, kw_only=True, metadata=_SPARSE)
    """The verdict that the scenario file expects of the subject; None if it expects nothing."""
    figure: str = field(default="", kw_only=True)
    """The figure that decides the verdict, in words short enough for a table cell."""
    evidence: Evidence = field(default_factory=dict)
    reason: str | None = None
    """The reason why it was skipped or went wrong; None for `reproduced` and `clean`."""
    seconds: float = field(default=0.0, metadata={"ge": 0, "allow_inf_nan": False})
    """Wall time of the child, in seconds."""

    @property
    def affected(self) -> bool:
        """True if a release shows the failure: the installed one, or a named one that is not expected to."""
        control = "@" in self.subject and self.expected is CaseVerdict.REPRODUCED
        release = self.subject == "installed" or "@" in self.subject
        return self.verdict is CaseVerdict.REPRODUCED and release and not control


@dataclass(frozen=True)
class ClaimResult:
    """A statement from upstream, and what this machine says about it."""

    text: str
    source: str
    """The place where it was said, e.g. ``vllm-project/vllm#39593``."""
    verdict: ClaimVerdict
    evidence: Evidence = field(default_factory=dict)
    reason: str | None = None
    """The reason why it is untested, or the meaning of the figures."""
    subject: str | None = field(default=None, kw_only=True, metadata=_SPARSE)
    """The subject of the statement; None in reports of older releases."""
    conditions: str | None = field(default=None, kw_only=True, metadata=_SPARSE)
    """The conditions under which it was said to hold."""


@dataclass(frozen=True)
class Unfinished:
    """The cases and claims of a scenario that a run left, because it was ended before them."""

    why: str
    """The cause of the end: ``interrupted``, or ``--time-budget 180 s ended``."""
    cases: Mapping[str, int]
    """Subject -> number of its cases that were left."""
    claims: int = _count()
    """Measurements for claims that were left."""
    seconds: float = field(default=0.0, metadata={"ge": 0, "allow_inf_nan": False})
    """The time that they would take on this machine."""
    measured: bool = False
    """If true, `seconds` is from cases of the same tiers in this run; otherwise time limits are in it."""


@dataclass(frozen=True)
class ScenarioResult:
    """All cases and claims of one scenario, with the verdict they add up to."""

    id: str
    name: str
    title: str
    verdict: ScenarioVerdict
    file: str
    line: int = field(default=1, kw_only=True, metadata={"ge": 1})
    """The line of `file` where the scenario starts, for annotations."""
    reason: str | None = field(default=None, kw_only=True)
    """The reason why the verdict is not `proved`, in one line."""
    cases: tuple[CaseResult, ...] = ()
    claims: tuple[ClaimResult, ...] = ()
    conclusions: Evidence = field(default_factory=dict)
    """Conclusions from several cases together, e.g. ``{"first_fixed_release": "0.20.0"}``."""
    unfinished: Unfinished | None = field(default=None, kw_only=True, metadata=_SPARSE)
    """The cases and claims that were left; None if everything that can run here ran."""


@dataclass(frozen=True)
class Summary:
    """Scenarios counted by verdict, and the exit code they mean."""

    proved: int = _count()
    found: int = _count()
    absent: int = _count()
    failed: int = _count()
    skipped: int = _count()
    error: int = _count()
    exit_code: int = _count()
    reasons: tuple[str, ...] | None = field(default=None, metadata=_SPARSE)
    """Reasons why the exit code is not 0, in words; None in a report that does not say."""
    cases: Mapping[str, int] = field(default_factory=dict)
    """Cases counted by verdict."""
    interrupted: bool = False
    """The run was stopped before every case had run."""


@dataclass(frozen=True)
class Report:
    """One run of one command."""

    schema_version: int = field(default=SCHEMA_VERSION, kw_only=True)
    version: str = field(kw_only=True, metadata={"alias": "moedoctor"})
    """moedoctor's own version."""
    command: str
    origin: Mapping[str, Any] | None = field(default=None, kw_only=True, metadata=_SPARSE)
    """The origin of the report, as `moedoctor.origin.Origin`; None in reports of older releases."""
    environment: Mapping[str, Any]
    scenarios: tuple[ScenarioResult, ...]
    findings: tuple[str, ...] = field(default=(), kw_only=True)
    """Gate decisions in words: what regressed against the baseline, and where."""
    capsule: Mapping[str, Any] | None = field(default=None, kw_only=True, metadata=_SPARSE)
    """The findings of `moedoctor replay` in a recorded call that the report is about; None without one."""
    summary: Summary


_MAX_DEPTH = 64
_SURROGATE = re.compile("[\ud800-\udfff]")
_Path = tuple[str | int, ...]
_Record = TypeVar("_Record")


class ReportError(ValueError):
    """JSON that cannot be used. As text it is one line: ``file:line: message`` or ``file: key: message``."""

    def __init__(self, file: str, message: str, line: int | None = None) -> None:
        place = file if line is None else f"{file}:{line}"
        super().__init__(escape(f"{place}: {message}"))


def find_worst(*scores: float | str) -> float:
    """Return the largest of errors or distances, 0 without any; a NaN is the worst that can be: Inf.

    Python's `max` keeps or loses a NaN by its place. Takes the text that `to_plain` makes of such numbers.
    """
    numbers = [float(score) for score in scores]
    return max((math.inf if math.isnan(number) else number for number in numbers), default=0.0)


def to_json(record: Any, lines: int = 4) -> str:
    """Return any record as strict JSON that ends with a line end; equal records give equal text.

    Items down to `lines` levels have a line each: a case of a run, a row of a table. What a terminal might
    act on is escaped: the text can be printed, and its data is exact.
    """
    return escape_json(_write_lines(to_plain(record), lines, "\n")) + "\n"


def _write_lines(value: Any, levels: int, line: str) -> str:
    if not levels or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    inner = f"{line}  "
    if isinstance(value, list):
        return f"[{','.join(inner + _write_lines(item, levels - 1, inner) for item in value)}{line}]"
    items = (
        f"{inner}{json.dumps(key, ensure_ascii=False)}: {_write_lines(item, levels - 1, inner)}"
        for key, item in value.items()
    )
    return f"{{{','.join(items)}{line}}}"


def to_plain(value: Any, path: _Path = ()) -> Any:
    """Return `value` in the types of JSON: records as objects, tuples as arrays, enums as their values.

    A float that is not finite becomes the text ``nan``, ``inf`` or ``-inf``, and stays text when it is read
    back. Raises ValueError, with the path, for a value that JSON cannot hold (a tensor, a set).
    """
    if len(path) > _MAX_DEPTH:
        raise ValueError(f"{join_path(path[:8])}: nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, enum.Enum):
        return to_plain(value.value, path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # A child's stderr may hold bytes that are not UTF-8; lone surrogates cannot be written to a file.
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if is_dataclass(value):
        members = [(member.metadata, member.name, getattr(value, member.name)) for member in fields(value)]
        named = {
            metadata.get("alias", name): item
            for metadata, name, item in members
            if item is not None or not metadata.get("sparse")
        }
        return {key: to_plain(item, (*path, key)) for key, item in named.items()}
    if isinstance(value, Mapping):
        result = {_check_key(key, path): to_plain(item, (*path, str(key))) for key, item in value.items()}
        if len(result) != len(value):
            raise ValueError(f"{join_path(path)}: two of its keys are the same text")
        return result
    if isinstance(value, (list, tuple)):
        return [to_plain(item, (*path, index)) for index, item in enumerate(value)]
    raise ValueError(
        f"{join_path(path)}: a {type(value).__name__} cannot be written to JSON, "
        "only numbers, text, lists, mappings and records of these"
    )


def _check_key(key: Any, path: _Path) -> str:
    key = key.value if isinstance(key, enum.Enum) else key
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise ValueError(f"{join_path(path)}: the key {key!r} is a {type(key).__name__}, expected text")
    return str(to_plain(str(key)))


def load_report(path: Path | str) -> Report:
    """Return the report in a file. Keys that this version does not know are ignored.

    Raises ReportError for a file that cannot be read, is not strict JSON, or is not a report.
    """
    file = os.fspath(path)
    data = read_json(file)
    check_version(data, file)
    return from_json(Report, data, file)


def check_version(data: Any, file: str) -> None:
    """Raise ReportError for data with another schema_version than ours."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is not None and (version is True or version != SCHEMA_VERSION):
        hint = f"this moedoctor reads schema_version {SCHEMA_VERSION}; make the report again"
        raise ReportError(file, f"schema_version: {shorten(str(version))}: {hint}")


def from_json(kind: type[_Record], data: Any, file: str = "report") -> _Record:
    """Return the record of type `kind` that `data` holds, as `to_json` wrote it.

    Raises ReportError that names `file` and the first key that is missing or has a value of another type.
    """
    from pydantic import ValidationError

    try:
        # Through JSON, because pydantic's strict mode takes enums and tuples from text only there.
        record: _Record = _build_adapter(cast(Any, kind)).validate_json(
            json.dumps(to_plain(data)), strict=True
        )
        return record
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    except ValueError as error:
        raise ReportError(file, str(error)) from None
    loc, missing = first["loc"], first["type"] == "missing"
    where = join_path((*_keep_known(loc[:-1], data), loc[-1]) if missing else _keep_known(loc, data))
    raise ReportError(file, f"{where}: {explain(first)}" if where else explain(first))


@functools.cache
def _build_adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _keep_known(path: _Path, data: Any) -> _Path:
    """Return the part of `path` that is in `data`; pydantic adds the name of a type for a union."""
    for length, step in enumerate(path):
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return path[:length]
    return path


class _RefusedError(ValueError):
    """Raised inside the parser for what strict JSON does not allow."""


def read_json(path: Path | str, limit: int = MAX_REPORT_BYTES) -> Any:
    """Return the data in a JSON file of at most `limit` bytes.

    Python's parser takes ``NaN``, keeps the last of two equal keys and turns ``1e999`` into infinity. A
    report is evidence, so these are refused. Raises ReportError.
    """
    file = os.fspath(path)
    try:
        text = read_text(Path(file), limit)
    except TextFileError as error:
        raise ReportError(file, error.message, error.line) from None
    return parse_json(text, file)


def parse_json(text: str, file: str) -> Any:
    """Return the data in strict JSON text, as `read_json` does; errors name `file`. Raises ReportError."""
    try:
        return json.loads(
            text, object_pairs_hook=_require_unique, parse_constant=_parse_finite, parse_float=_parse_finite
        )
    except json.JSONDecodeError as error:
        raise ReportError(file, f"not JSON: {error.msg}", error.lineno) from None
    except RecursionError:
        raise ReportError(file, "nested too deeply to be a report") from None
    except _RefusedError as error:
        raise ReportError(file, str(error)) from None
    except ValueError:
        raise ReportError(file, "a number of too many digits") from None


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _RefusedError(f"the key '{shorten(twice)}' occurs twice in one object")
    return result


def _parse_finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        hint = 'moedoctor writes "nan", "inf" and "-inf" as text'
        raise _RefusedError(f"the number {shorten(token)} is not finite: {hint}")
    return value
