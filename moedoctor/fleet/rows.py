"""What a node answered, as a row: its report, or why there is none. Whatever a node sends becomes a row."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import moedoctor
from moedoctor.fleet.node import MOST_BYTES
from moedoctor.redaction import Redactor
from moedoctor.results import SCHEMA_VERSION, ReportError, parse_json
from moedoctor.text import join_lines, shorten

_LONG = 300
LATE, LONG = "late", "long"


class Status(str, enum.Enum):
    """What became of a question to a node."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """moedoctor ended with 2 or 3 and no report: bad input for this node, or an error in moedoctor."""
    OTHER_VERSION = "other version"
    MISSING = "no moedoctor"
    BUSY = "busy"
    HUNG = "no answer in time"
    DIED = "died"
    UNREADABLE = "unreadable answer"
    CANCELLED = "cancelled"


SKIPPED = (Status.BUSY, Status.CANCELLED)
"""Nothing is known about these, and nothing is wrong with them."""


@dataclass(frozen=True)
class Place:
    """A node, or a GPU of one."""

    node: str
    """Ray's id of the node, or the name of a file."""
    host: str
    gpu: str | None = None
    """The GPU as ``CUDA_VISIBLE_DEVICES`` names it; None for the whole node."""

    @property
    def name(self) -> str:
        """``node-17``, or ``node-17 GPU 3``."""
        host = shorten(join_lines(self.host), 100) or "unnamed"
        return host if self.gpu is None else f"{host} GPU {shorten(join_lines(self.gpu), 50)}"


@dataclass(frozen=True)
class Row:
    """One answer, masked."""

    place: Place
    status: Status
    reason: str | None = None
    seconds: float | None = None
    """What the command took."""
    start_seconds: float | None = None
    """What the node took before, to start a Ray worker for it; 0 if one was there."""
    python: str | None = None
    report: Mapping[str, Any] | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None
    """Where the row is stored, relative to the folder of the reports."""

    @property
    def exit_code(self) -> int:
        """The exit code that the node's report gives."""
        summary = (self.report or {}).get("summary")
        code = summary.get("exit_code") if isinstance(summary, Mapping) else None
        return code if isinstance(code, int) else 0


def read_answer(place: Place, text: str, *, python: str | None = None) -> Row:
    """Return the row of what `moedoctor.fleet.node.answer` gave. Never raises: the text may be anything."""
    try:
        data = _object(text)
        gpu = data.get("gpu")
        place = place if gpu is None else replace(place, gpu=_word(gpu))
        row = Row(place, Status.ANSWERED, seconds=_seconds(data.get("seconds")), python=python)
        return _judged(row, data)
    except (ReportError, TypeError, ValueError, RecursionError) as error:
        return Row(place, Status.UNREADABLE, line_of(str(error), place.host), python=python)


def _judged(row: Row, data: Mapping[str, Any]) -> Row:
    problem, code = data.get("problem"), data.get("code")
    host = row.place.host
    if problem == LATE:
        limit = f" within {row.seconds:.0f} s" if row.seconds is not None else ""
        reason = f"moedoctor gave no answer{limit}{last_line(str(data.get('log') or ''), host)}"
        return replace(row, status=Status.HUNG, reason=reason)
    if problem == LONG:
        return replace(row, status=Status.UNREADABLE, reason=f"its report is over {MOST_BYTES >> 20} MiB")
    report, log = data.get("report"), str(data.get("log") or "")
    if not report:
        lines = log.strip().splitlines()
        words = line_of(lines[-1], host) if lines else "it printed nothing"
        if "No module named moedoctor" in words or "No module named 'moedoctor'" in words:
            return replace(row, status=Status.MISSING, reason="moedoctor is not installed there")
        status = Status.REFUSED if code in (2, 3) else Status.DIED
        return replace(row, status=status, reason=f"{_ended(code)}: {words}")
    return with_report(row, _object(report), data.get("checksums"))


def with_report(row: Row, report: Mapping[str, Any], checksums: Any = None, *, masked: bool = True) -> Row:
    """Return `row` with a report that is checked, and masked for its file. Raises ReportError for another."""
    if report.get("schema_version") != SCHEMA_VERSION or report.get("schema_version") is True:
        raise ReportError("report", f"expected schema_version {SCHEMA_VERSION}")
    shown_report = mask(report, row.place.host) if masked else report
    sums = checksums if isinstance(checksums, Mapping) else {}
    shown = {_word(name): _word(value) for name, value in list(sums.items())[:1000]}
    row = replace(row, report=shown_report, checksums=mask(shown, row.place.host))
    version = report.get("moedoctor")
    if version is not None and version != moedoctor.__version__:
        words = f"moedoctor {line_of(str(version), row.place.host)}, here it is {moedoctor.__version__}"
        return replace(row, status=Status.OTHER_VERSION, reason=words)
    return row


def last_line(log: str, host: str) -> str:
    """Return ``; its last line: …`` for what a command wrote until it was ended, or an empty text."""
    lines = log.strip().splitlines()
    return f"; its last line: {line_of(lines[-1], host)}" if lines else ""


def failed(place: Place, status: Status, reason: str) -> Row:
    """Return the row of a node without an answer; the reason is masked."""
    return Row(place, status, line_of(reason, place.host))


def mask(value: Any, host: str) -> Any:
    """Return JSON data without names, addresses and secrets, also without the name of its own host.

    Nodes say mostly the same things, so what a text becomes is remembered.
    """
    return _masked(value, "", host if 2 < len(host) <= 255 else "")


def _masked(value: Any, key: str, host: str) -> Any:
    if isinstance(value, str):
        shown = (
            _mask_value(key[:100], value)
            if len(value) <= _LONG
            else _mask_value.__wrapped__(key[:100], value)
        )
        # A host may be called as one of our words is, so what is shorter than its name is not searched.
        return shown.replace(host, "***") if host and host in shown and not _common(host) else shown
    if isinstance(value, Mapping):
        return {_masked(str(name), "", host): _masked(item, str(name), host) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, key, host) for item in value]
    return value


@functools.lru_cache(maxsize=65_536)
def _mask_value(key: str, value: str) -> str:
    return str(_redactor().record({key: value}).popitem()[1]) if key else _redactor().mask(value)


@functools.cache
def _redactor() -> Redactor:
    return Redactor.from_this_process()


def _common(host: str) -> bool:
    """Return whether a name says nothing about a machine."""
    return host.isdigit() or host.lower() in (
        "localhost",
        "node",
        "host",
        "cpu",
        "gpu",
        "vllm",
        "ray",
        "head",
    )


def _object(text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise ReportError("answer", "expected text")
    if len(text) > 3 * MOST_BYTES:
        raise ReportError("answer", f"is over {3 * MOST_BYTES >> 20} MiB")
    data = parse_json(text, "answer")
    if not isinstance(data, dict):
        raise ReportError("answer", "expected a JSON object")
    return data


def _word(value: Any) -> str:
    return shorten(join_lines(str(value)), _LONG)


def line_of(text: str, host: str) -> str:
    """Return what a node wrote, masked, on one short line."""
    return str(mask(shorten(join_lines(text), _LONG), host))


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e9 else None


def _ended(code: Any) -> str:
    if isinstance(code, int) and code < 0:
        return f"killed by signal {-code}"
    return f"exit status {code}" if isinstance(code, int) else "ended"


def to_document(row: Row) -> dict[str, Any]:
    """Return the row for its file; the name of the host is only in the file of a fleet with --show-hosts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "fleet answer",
        "node": row.place.node,
        "gpu": row.place.gpu,
        "status": row.status.value,
        "reason": row.reason,
        "seconds": row.seconds,
        "start_seconds": row.start_seconds,
        "python": row.python,
        "checksums": dict(row.checksums),
        "report": row.report,
    }


def from_document(data: Mapping[str, Any], host: str, file: str) -> Row:
    """Return the row in a stored file, or of a plain report of moedoctor. Raises ReportError."""
    if data.get("command") != "fleet answer":
        place = Place(host, host)
        return replace(with_report(Row(place, Status.ANSWERED), data, masked=False), file=file)
    gpu = data.get("gpu")
    place = Place(_word(data.get("node")), host, None if gpu is None else _word(gpu))
    try:
        status = Status(data.get("status"))
    except ValueError:
        raise ReportError(file, "status: expected one that moedoctor writes") from None
    reason, python = data.get("reason"), data.get("python")
    row = Row(place, status, None if reason is None else line_of(str(reason), host), file=file)
    row = replace(row, python=None if python is None else _word(python))
    times = _seconds(data.get("seconds")), _seconds(data.get("start_seconds"))
    row = replace(row, seconds=times[0], start_seconds=times[1])
    report = data.get("report")
    if isinstance(report, Mapping):
        kept = with_report(row, report, data.get("checksums"), masked=False)
        return kept if status is Status.ANSWERED else replace(kept, status=status, reason=row.reason)
    if status is Status.ANSWERED:
        raise ReportError(file, "report: expected a JSON object")
    return row
