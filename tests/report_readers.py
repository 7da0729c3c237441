"""Readers of each format of a report: they parse it with tools of others, and check what always holds."""

import gzip
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from markdown_it import MarkdownIt

from moedoctor.reporters.digest import MOST_CHARACTERS
from moedoctor.reporters.schemas import make_schema
from moedoctor.reporters.text import summarize
from moedoctor.results import Report, ScenarioVerdict, from_json
from moedoctor.text import join_lines

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_RUN = jsonschema.Draft202012Validator(make_schema("run"))
_SARIF = json.loads((Path(__file__).parent / "schemas" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
SARIF = jsonschema.Draft202012Validator(_SARIF, format_checker=jsonschema.FormatChecker())
GITHUB_COMMAND = re.compile(r"::(error|warning|notice) ([^:]*)::(.*)")
MOST_HTML_BYTES = 2_000_000
JUNIT_TAGS = {
    *("testsuites", "testsuite", "properties", "property", "testcase"),
    *("failure", "error", "skipped", "system-out"),
}


def list_stored_runs() -> list[Path]:
    """Return the stored reports of `run`, the largest last."""
    files = (Path(__file__).parents[1] / "reports").rglob("*.json")
    runs = [file for file in files if b'"scenarios": [\n    {' in file.read_bytes()]
    assert len(runs) > 20
    return sorted(runs, key=lambda file: file.stat().st_size)


_NOT_XML = str.maketrans("", "", "\ufffe\uffff")
"""Characters that HTML may hold and XML may not."""


def parse_html(page: str) -> ET.Element:
    """Return the page without what its style and script say; it is well-formed XML too."""
    head, _, rest = page.partition("<style>")
    body = rest.partition("</style>")[2].translate(_NOT_XML)
    return ET.fromstring(head + re.sub(r"<script>.*</script>", "<script/>", body, flags=re.DOTALL))


def get_html_text(page: str) -> str:
    return " ".join("".join(parse_html(page).find("body").itertext()).split())  # type: ignore[union-attr]


def check_html(page: str) -> ET.Element:
    """Return a page, which refers to nothing outside it, after a check of what holds for every page."""
    root = parse_html(page)
    assert page.count("<script>") == page.count("</script>") == 1
    ids = [element.get("id") for element in root.iter() if element.get("id") is not None]
    assert len(ids) == len(set(ids))
    assert "" not in ids
    for element in root.iter():
        assert not [name for name in element.attrib if name[:2] == "on" or name in ("src", "srcset", "data")]
        assert element.tag not in ("link", "iframe", "object", "embed", "base", "form", "img")
        target = element.get("href")
        if element.tag == "a":
            inside = target is not None and target.startswith("#") and target[1:] in ids
            # An address of its own shows where it leads.
            shown_whole = str(target).startswith("https://") and target == element.text
            github = str(target).startswith("https://github.com/")
            assert inside or github or shown_whole or target == "#answer"
        elif target is not None:
            assert target.startswith("#")
    assert not re.search(r"url\((?!#)|@import", page)
    return root


def read_sarif(text: str) -> dict[str, Any]:
    """Return the only run of a log that is valid by the standard and that GitHub's code scanning takes.

    The limits and the required properties are those of GitHub's pages "SARIF support for code scanning" and
    "SARIF results exceed one or more limits".
    """
    log = json.loads(text)
    (run,) = log["runs"]
    results, rules = run["results"], run["tool"]["driver"]["rules"]
    # The schema is slow: of a large log it gets the first and the last.
    driver = {**run["tool"]["driver"], "rules": rules[:50] + rules[50:][-50:]}
    results_of_both_ends = results[:50] + results[50:][-50:]
    SARIF.validate({**log, "runs": [{**run, "tool": {"driver": driver}, "results": results_of_both_ends}]})
    assert len(gzip.compress(text.encode(), 1)) <= 10_000_000
    assert len(results) <= 5_000
    assert len(rules) <= 25_000
    ids = [rule["id"] for rule in rules]
    assert len(ids) == len(set(ids))
    for rule in rules:
        assert 1 <= len(rule["name"]) <= 255
        for name in ("shortDescription", "fullDescription"):
            assert 1 <= len(rule[name]["text"]) <= 1_024
        assert rule["help"]["text"]
        assert rule.get("helpUri", "https://").startswith("https://")
        assert len(rule["properties"]["tags"]) <= 10
        assert rule["properties"]["precision"] in ("very-high", "high", "medium", "low")
        assert rule["properties"]["problem.severity"] in ("error", "warning", "recommendation")
    for result in results:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert 1 <= len(result["message"]["text"]) <= 1_024
        assert 1 <= len(result["locations"]) <= 100
        for place in result["locations"]:
            physical = place["physicalLocation"]
            assert physical["region"]["startLine"] >= 1
            assert re.fullmatch(r"(?!/|[a-z]+:|.*\.\./)[!-~]+", physical["artifactLocation"]["uri"])
    assert run["automationDetails"]["id"].startswith("moedoctor/"), "one category for each command"
    assert len(set(list_fingerprints(run))) == len(results), "equal results are told apart by a number"
    return dict(run)


def list_fingerprints(run: dict[str, Any]) -> list[str]:
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]


def _read_table(text: str, whole: Report) -> None:
    assert summarize(whole) in text


def _read_json(text: str, whole: Report) -> None:
    data = json.loads(text, parse_constant=_refuse)
    _RUN.validate(data)
    assert from_json(Report, data) == whole


def _refuse(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def _read_markdown(text: str, whole: Report) -> None:
    assert len(text) <= MOST_CHARACTERS
    assert text.count("<details>") == text.count("</details>")


def _read_junit(text: str, whole: Report) -> None:
    root = ET.fromstring(text.encode("utf-8"))
    assert {element.tag for element in root.iter()} <= JUNIT_TAGS
    for element in (root, *root):
        pairs = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
        for attribute, tag in pairs.items():
            assert int(element.get(attribute, "-1")) == len(list(element.iter(tag)))


def _read_github(text: str, whole: Report) -> None:
    *commands, last = text.splitlines()
    assert last == summarize(whole)
    assert all(map(GITHUB_COMMAND.fullmatch, commands))
    worth = sum(scenario.verdict is not ScenarioVerdict.PROVED for scenario in whole.scenarios)
    assert len(commands) == worth + len(whole.findings), "text added a command"


def _read_html(text: str, whole: Report) -> None:
    assert len(text.encode()) <= MOST_HTML_BYTES
    check_html(text)
    # Code in pairs loses its backticks; one alone stays.
    found = " ".join(get_html_text(text).replace("`", "").split())
    for scenario in whole.scenarios:
        texts = (scenario.title, *(claim.text for claim in scenario.claims))
        assert all(
            " ".join(join_lines(text).translate(_NOT_XML).replace("`", "").split()) in found for text in texts
        )


def _read_sarif(text: str, whole: Report) -> None:
    failing = sum(scenario.verdict in ("found", "failed", "error") for scenario in whole.scenarios)
    assert len(read_sarif(text)["results"]) >= failing


READERS: Mapping[str, Callable[[str, Report], None]] = {
    "table": _read_table,
    "json": _read_json,
    "markdown": _read_markdown,
    "junit": _read_junit,
    "github": _read_github,
    "html": _read_html,
    "sarif": _read_sarif,
}
"""Format -> check of a report in it."""
