"""A node's answer as a row: its report, or why there is none. Whatever a node sends becomes a row."""

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
_COMMON_HOSTS = frozenset(["localhost", "node", "host", "cpu", "gpu", "vllm", "ray", "head"])
"""Names that say nothing about a machine, and are words of our own."""


class Status(str, enum.Enum):
    """The fate of a question to a node."""

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
    """The time of the command."""
    start_seconds: float | None = None
    """The time that the node took before, to start a Ray worker for it; 0 if one was there."""
    python: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    file: str | None = None
    """The file of the row, relative to the folder of the reports."""

    @property
    def exit_code(self) -> int:
        """The exit code that the node's report gives."""
        summary = (self.report or {}).get("summary")
        code = summary.get("exit_code") if isinstance(summary, Mapping) else None
        return code if isinstance(code, int) else 0


def read_answer(place: Place, text: str, *, python: str | None = None) -> Row:
    """Return the row of what `moedoctor.fleet.node.answer` gave. Never raises: the text may be anything."""
    try:
        data = _parse_object(text)
        gpu = data.get("gpu")
        place = place if gpu is None else replace(place, gpu=_shorten(gpu))
        row = Row(place, Status.ANSWERED, seconds=_read_seconds(data.get("seconds")), python=python)
        return _judge(row, data)
    except (ReportError, TypeError, ValueError, RecursionError) as error:
        return Row(place, Status.UNREADABLE, mask_line(str(error), place.host), python=python)


def _judge(row: Row, data: Mapping[str, Any]) -> Row:
    problem, code, log = data.get("problem"), data.get("code"), str(data.get("log") or "")
    host = row.place.host
    if problem == "late":
        limit = f" within {row.seconds:.0f} s" if row.seconds is not None else ""
        reason = f"moedoctor gave no answer{limit}{quote_last_line(log, host)}"
        return replace(row, status=Status.HUNG, reason=reason)
    if problem == "long":
        return replace(row, status=Status.UNREADABLE, reason=f"its report is over {MOST_BYTES >> 20} MiB")
    if report := data.get("report"):
        return add_report(row, _parse_object(report), data.get("checksums"))
    lines = log.strip().splitlines()
    words = mask_line(lines[-1], host) if lines else "it printed nothing"
    if "No module named moedoctor" in words or "No module named 'moedoctor'" in words:
        return replace(row, status=Status.MISSING, reason="moedoctor is not installed there")
    ending = f"exit status {code}" if isinstance(code, int) else "ended"
    if isinstance(code, int) and code < 0:
        ending = f"killed by signal {-code}"
    status = Status.REFUSED if code in (2, 3) else Status.DIED
    return replace(row, status=status, reason=f"{ending}: {words}")


def add_report(row: Row, report: Mapping[str, Any], checksums: Any = None, *, masked: bool = True) -> Row:
    """Return `row` with a report that is checked, and masked for its file. Raises ReportError for another."""
    if report.get("schema_version") != SCHEMA_VERSION or report.get("schema_version") is True:
        raise ReportError("report", f"expected schema_version {SCHEMA_VERSION}")
    host = row.place.host
    sums = list(checksums.items())[:1000] if isinstance(checksums, Mapping) else ()
    shown = mask({_shorten(name): _shorten(value) for name, value in sums}, host)
    row = replace(row, report=mask(report, host) if masked else report, checksums=shown)
    version = report.get("moedoctor")
    if version is not None and version != moedoctor.__version__:
        words = f"moedoctor {mask_line(str(version), host)}, here it is {moedoctor.__version__}"
        return replace(row, status=Status.OTHER_VERSION, reason=words)
    return row


def quote_last_line(log: str, host: str) -> str:
    """Return ``; its last line: …`` for what a command wrote until it was ended, or an empty text."""
    lines = log.strip().splitlines()
    return f"; its last line: {mask_line(lines[-1], host)}" if lines else ""


def make_failed_row(place: Place, status: Status, reason: str) -> Row:
    """Return the row of a node without an answer; the reason is masked."""
    return Row(place, status, mask_line(reason, place.host))


def mask(value: Any, host: str) -> Any:
    """Return JSON data without names, addresses and secrets, also without the name of its own host.

    Nodes say mostly the same things, so what a text becomes is remembered.
    """
    is_name = 2 < len(host) <= 255 and not host.isdigit() and host.lower() not in _COMMON_HOSTS
    return _mask(value, "", host if is_name else "")


def _mask(value: Any, key: str, host: str) -> Any:
    if isinstance(value, str):
        mask_text = _mask_text if len(value) <= _LONG else _mask_text.__wrapped__
        shown = mask_text(key[:100], value)
        return shown.replace(host, "***") if host else shown
    if isinstance(value, Mapping):
        return {_mask(str(name), "", host): _mask(item, str(name), host) for name, item in value.items()}
    if isinstance(value, list):
        return [_mask(item, key, host) for item in value]
    return value


@functools.lru_cache(maxsize=65_536)
def _mask_text(key: str, text: str) -> str:
    redactor = Redactor.from_this_process()
    return str(redactor.record({key: text}).popitem()[1]) if key else redactor.mask(text)


def _parse_object(text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise ReportError("answer", "expected text")
    if len(text) > 3 * MOST_BYTES:
        raise ReportError("answer", f"is over {3 * MOST_BYTES >> 20} MiB")
    data = parse_json(text, "answer")
    if not isinstance(data, dict):
        raise ReportError("answer", "expected a JSON object")
    return data


def _shorten(value: Any) -> str:
    return shorten(join_lines(str(value)), _LONG)


def mask_line(text: str, host: str) -> str:
    """Return what a node wrote, masked, on one short line."""
    return str(mask(shorten(join_lines(text), _LONG), host))


def _read_seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e9 else None


def to_document(row: Row) -> dict[str, Any]:
    """Return the row for its file; the name of the host is only in the file of a fleet with --show-hosts."""
    fields = {name: value for name, value in vars(row).items() if name not in ("place", "file")}
    head = {"schema_version": SCHEMA_VERSION, "command": "fleet answer"}
    return {**head, "node": row.place.node, "gpu": row.place.gpu, **fields}


def from_document(data: Mapping[str, Any], host: str, file: str) -> Row:
    """Return the row in a stored file, or of a plain report of moedoctor. Raises ReportError."""
    if data.get("command") != "fleet answer":
        place = Place(host, host)
        return replace(add_report(Row(place, Status.ANSWERED), data, masked=False), file=file)
    gpu, reason, python = data.get("gpu"), data.get("reason"), data.get("python")
    try:
        status = Status(data.get("status"))
    except ValueError:
        raise ReportError(file, "status: expected one that moedoctor writes") from None
    row = Row(
        Place(_shorten(data.get("node")), host, None if gpu is None else _shorten(gpu)),
        status,
        None if reason is None else mask_line(str(reason), host),
        _read_seconds(data.get("seconds")),
        _read_seconds(data.get("start_seconds")),
        None if python is None else _shorten(python),
        file=file,
    )
    report = data.get("report")
    if isinstance(report, Mapping):
        kept = add_report(row, report, data.get("checksums"), masked=False)
        return kept if status is Status.ANSWERED else replace(kept, status=status, reason=row.reason)
    if status is Status.ANSWERED:
        raise ReportError(file, "report: expected a JSON object")
    return row
