"""Whatever a node sends becomes a row, escaped and masked."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import json_values

import moedoctor
from moedoctor.fleet.facts import make_member
from moedoctor.fleet.report import Collector, FleetReport
from moedoctor.fleet.rows import Place, Row, Status, make_failed_row, read_answer
from moedoctor.fleet.store import Store, StoreError, read_folder
from moedoctor.reporters.junit import to_junit
from moedoctor.reporters.pages.fleet import find_in_fleet

_PLACE = Place("id-1", "gpu-node-17.example")
_REPORT = {
    "schema_version": 1,
    "moedoctor": moedoctor.__version__,
    "environment": {
        "driver": "580",
        "gpus": [{"name": "H200", "visible": True}],
        "host": "gpu-node-17.example",
    },
    "findings": [{"id": "MD011", "title": "rows"}],
    "summary": {"exit_code": 1},
}


def _answer(report: Any = _REPORT, **more: Any) -> str:
    text = report if isinstance(report, str) else json.dumps(report)
    answer = {"gpu": None, "problem": "", "code": 1, "report": text, "log": "", "seconds": 1.5, **more}
    return json.dumps(answer)


def _compare(rows: Iterable[Row]) -> FleetReport:
    collected = Collector(show_hosts=False)
    for row in rows:
        collected.add(row)
    return collected.report(("check",))


def test_a_report_becomes_facts_and_findings_without_the_host() -> None:
    row = read_answer(_PLACE, _answer(checksums={"vllm _C.so": "ab"}), python="3.12.1")
    found = make_member(row, "node")
    assert (row.status, row.exit_code, row.seconds) == (Status.ANSWERED, 1, 1.5)
    assert "node-17" not in json.dumps(row.report)
    assert found.kind == "H200"
    assert found.facts["driver"] == "580"
    assert found.facts["kernels vllm _C.so"] == "ab"
    assert dict(found.findings) == {"MD011": "rows"}


def test_what_moedoctor_knows_is_no_fact_about_a_node() -> None:
    known = {"backend": {"reports": [], "patches": "0.33.0"}}
    fixes = {"setting": "moe", "active": True, "known": known}
    environment = {**_REPORT["environment"], "moedoctor_fixes": fixes}
    facts = make_member(read_answer(_PLACE, _answer({**_REPORT, "environment": environment})), "node").facts
    assert facts["moedoctor_fixes.setting"] == "moe"
    assert not [name for name in facts if "known" in name]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", Status.UNREADABLE),
        ("[]", Status.UNREADABLE),
        ("[" * 100_000, Status.UNREADABLE),
        (_answer("{}"), Status.UNREADABLE),
        (_answer('{"schema_version": 1e999}'), Status.UNREADABLE),
        (_answer({**_REPORT, "schema_version": 2}), Status.UNREADABLE),
        (_answer({**_REPORT, "moedoctor": "0.0.9"}), Status.OTHER_VERSION),
        (_answer("", log="bad\nmoedoctor: unknown id X", code=2), Status.REFUSED),
        (_answer("", log="No module named moedoctor", code=1), Status.MISSING),
        (_answer("", code=-9), Status.DIED),
        (_answer("", problem="late"), Status.HUNG),
        (_answer("", problem="long"), Status.UNREADABLE),
    ],
)
def test_what_became_of_a_node(text: str, status: Status) -> None:
    assert read_answer(_PLACE, text).status is status


_KEYS = [
    "schema_version", "moedoctor", "environment", "findings", "problems", "scenarios", "items", "cases",
    "summary",
]  # fmt: skip


@given(report=st.dictionaries(st.sampled_from(_KEYS), json_values), sums=json_values)
def test_a_hostile_report_never_raises(report: dict[str, Any], sums: Any) -> None:
    given = {**report, "schema_version": 1, "moedoctor": moedoctor.__version__}
    row = read_answer(_PLACE, _answer(given, checksums=sums))
    assert row.status is Status.ANSWERED
    make_member(row, "node")


@pytest.mark.parametrize("number", [10**400, -(10**400), 1.7e308])
def test_a_number_that_nothing_measures_is_left_out(number: float) -> None:
    answer = _answer({**_REPORT, "layers": [{"layer_us": number, "case": "decode", "copy_us": 2}]})
    assert make_member(read_answer(_PLACE, answer), "node").numbers == {"copy_us decode": 2.0}


def test_the_folder_keeps_answers_without_hosts_and_resumes_the_same_question(tmp_path: Path) -> None:
    question = {"question": ["check"]}
    store = Store.create(tmp_path / "reports", question)
    kept = store.write(read_answer(_PLACE, _answer(), python="3.12.1"))
    assert "gpu-node" not in (tmp_path / "reports" / str(kept.file)).read_text()
    (again,) = Store.resume(tmp_path / "reports", question).read_rows({"id-1": "gpu-node-17.example"})
    assert (again.place, again.report, again.python) == (_PLACE, kept.report, "3.12.1")
    with pytest.raises(StoreError, match="`fleet check`"):
        Store.resume(tmp_path / "reports", {"question": ["run"]})
    with pytest.raises(StoreError, match="--resume"):
        Store.create(tmp_path / "reports", question)


def test_a_node_with_a_silent_gpu_is_asked_again_as_a_whole(tmp_path: Path) -> None:
    question = {"question": ["run", "parity", "per", "gpu"]}
    store = Store.create(tmp_path / "reports", question)
    for place in (Place("half", "a", "0"), Place("whole", "b", "0"), Place("whole", "b", "1")):
        store.write(replace(read_answer(place, _answer()), place=place))
    for node, status in (("half", Status.CANCELLED), ("dead", Status.DIED), ("full", Status.BUSY)):
        store.write(make_failed_row(Place(node, node), status, "gave no answer"))
    (tmp_path / "reports" / "node-notes.json").write_text("{")
    rows = Store.resume(tmp_path / "reports", question).read_rows({})
    assert sorted((row.place.node, row.place.gpu) for row in rows) == [("whole", "0"), ("whole", "1")]
    left = [(row.place.node, row.status) for row in read_folder(tmp_path / "reports")]
    answered = [node for node, status in left if status is Status.ANSWERED]
    assert sorted(answered) == ["half", "whole", "whole"]
    assert (len(left), ("node-notes", Status.UNREADABLE) in left) == (4, True)


def test_a_folder_of_any_files_gives_a_row_for_each(tmp_path: Path) -> None:
    (tmp_path / "node-1.json").write_text(json.dumps(_REPORT))
    (tmp_path / "node-2.json").write_text("{")
    (tmp_path / "node-3.json").symlink_to("/dev/zero")
    (tmp_path / "notes.txt").write_text("not read")
    rows = list(read_folder(tmp_path))
    assert [row.place.host for row in rows] == ["node-1", "node-2", "node-3"]
    assert [row.status for row in rows] == [Status.ANSWERED, Status.UNREADABLE, Status.UNREADABLE]


def test_nodes_have_the_same_numbers_in_the_report_of_their_files(tmp_path: Path) -> None:
    """Files do not hold hosts, whose order must not number the nodes."""
    store = Store.create(tmp_path / "reports", {"question": ["check"]})
    places = [Place("id-2", "host-a", "0"), Place("id-2", "host-a", "1"), Place("id-1", "host-b", "0")]
    asked = [store.write(read_answer(place, _answer(), python="3.12.1")) for place in places]
    names = {node.file: node.name for node in _compare(asked).nodes}
    stored = _compare(read_folder(store.folder))
    assert {node.file: node.name for node in stored.nodes} == names
    assert sorted(names.values()) == ["node-0001 GPU 0", "node-0002 GPU 0", "node-0002 GPU 1"]


def test_a_fleet_without_an_answer_is_not_called_sound() -> None:
    busy = make_failed_row(_PLACE, Status.BUSY, "waited 60 s for 2 GPUs")
    sound = read_answer(_PLACE, _answer({**_REPORT, "findings": []}))
    assert _compare([busy]).summary.exit_code == 2
    assert "no node answered" in _compare([busy]).closing[0]
    assert _compare([busy, sound]).summary.exit_code == 0


def test_a_late_command_says_what_it_did_last() -> None:
    text = _answer("", problem="late", log="importing torch\n\x1b[31mdrawing the weights\n", seconds=3.0)
    reason = read_answer(_PLACE, text).reason
    assert reason == "moedoctor gave no answer within 3 s; its last line: drawing the weights"


def test_junit_has_a_failure_for_each_reason_and_a_test_for_each_sound_node() -> None:
    sound = {**_REPORT, "findings": [], "summary": {"exit_code": 0}}
    rows = [
        read_answer(Place(f"id-{number}", f"host-{number}"), _answer(content, code=code), python="3.12.1")
        for number, (content, code) in enumerate([(_REPORT, 1), (sound, 0), (sound, 0)])
    ]
    rows.append(replace(rows[2], place=Place("id-3", "host-3"), status=Status.HUNG, report=None))
    result = _compare(rows)
    suite = ElementTree.fromstring(to_junit(find_in_fleet(result, "")))[0]
    failed = [case.attrib["name"] for case in suite if case.find("failure") is not None]
    passed = [case.attrib["name"] for case in suite if len(case) == 0]
    assert failed == [f"fleet-check {reason}" for reason in result.reasons]
    assert any("MD011 on 1 of 3 nodes" in name for name in failed)
    assert any("1 of 4 nodes: " in name for name in failed)
    assert passed == ["node-0002", "node-0003"]
