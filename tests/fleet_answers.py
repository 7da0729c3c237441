"""A folder with the answers of a fleet that has everything that a report can show."""

from pathlib import Path
from typing import Any

import moedoctor
from moedoctor.fleet.rows import Place, Row, Status, make_failed_row, to_document
from moedoctor.results import to_json


def parity_report(
    bits: str = "a", *, speed: float = 100.0, lost: float = 0.0, **facts: str
) -> dict[str, Any]:
    """Return what `fleet run parity` says on one GPU whose results have these `bits`."""
    environment = {"gpu": "NVIDIA H200", "torch": "2.14.0", "driver": "580", **facts}
    case = {
        "case": "memory",
        "input_sha256": "in",
        "output_sha256": [bits, bits],
        "relative_error": 0.0 if bits == "a" else 1.0,
        "control_noticed": True,
        "copy_on_device_gb_per_second": speed,
        "lost_us": lost,
    }
    head = {"schema_version": 1, "moedoctor": moedoctor.__version__, "command": "fleet parity"}
    return {**head, "environment": environment, "cases": [case], "summary": {"exit_code": 0}}


def write_answers(folder: Path) -> None:
    """Write eight GPUs: other bits, a slow copy, another driver, a finding, and two without an answer."""
    reports = [parity_report() for _ in range(6)]
    reports[1] = parity_report("b")
    reports[2] = parity_report(speed=40.0, lost=7.0)
    reports[3] = parity_report(driver="570")
    reports[4]["findings"] = [{"id": "MD011", "title": "rows that nobody wrote"}]
    rows = [
        Row(Place(f"id-{index // 2}", "", str(index % 2)), Status.ANSWERED, seconds=1.5, report=report)
        for index, report in enumerate(reports)
    ]
    rows.append(make_failed_row(Place("id-6", ""), Status.CANCELLED, "interrupted before it answered"))
    rows.append(make_failed_row(Place("id-7", ""), Status.HUNG, "no answer within 300 s"))
    folder.mkdir(parents=True)
    for index, row in enumerate(rows):
        (folder / f"gpu-{index}.json").write_text(to_json(to_document(row)))
