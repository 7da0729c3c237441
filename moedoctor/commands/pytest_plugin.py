"""The pytest plug-in: ``pytest --moedoctor scenarios/`` makes a test of each scenario in a file or folder.

``pytest --moe-router package.module:name`` makes one of each question of `moedoctor conform`.

A scenario passes if it is proved or absent, is skipped if all its cases are, and else fails. A failure shows
its evidence (``-rP`` shows that of the others), and ``--junitxml`` has it as properties. Each case runs in a
process of its own, as with `moedoctor run`. Without the option nothing of moedoctor is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moedoctor.results import ScenarioResult
    from moedoctor.testing import Answer

_SUFFIXES = (".yaml", ".yml")
_KEYS = re.compile(rb"^(id|subjects|expect|claims)\s*:", re.MULTILINE)
_MOST_HEAD = 65_536
_ASKED = {
    "--moe-router": "router",
    "--moe-kernel": "moe",
    "--moe-cache": "cache",
    "--moe-offloader": "offloader",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moedoctor")
    group.addoption(
        "--moedoctor",
        action="store_true",
        help="run moedoctor's scenarios (.yaml) in the given files and folders as tests",
    )
    for option, kind in _ASKED.items():
        group.addoption(
            option,
            action="append",
            default=[],
            metavar="TARGET",
            help=f"ask this {kind} each question of `moedoctor conform` as a test; may be repeated",
        )
    group.addoption("--moe-device", default="cpu", help="where the targets run: cpu (default) or cuda:0")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a scenario, if the option is given.

    A YAML file in a folder that has no key of a scenario belongs to something else. A file that is named must
    be a scenario.
    """
    if not parent.config.getoption("--moedoctor") or file_path.suffix not in _SUFFIXES:
        return None
    if not parent.session.isinitpath(file_path):
        with file_path.open("rb") as file:
            if not _KEYS.search(file.read(_MOST_HEAD)):
                return None
    collector: pytest.Collector = ScenarioFile.from_parent(parent, path=file_path)
    return collector


class ScenarioFile(pytest.File):
    """A YAML file that may hold a scenario."""

    def collect(self) -> Iterator[ScenarioItem]:
        """Give the one test of the file. Raises pytest's error for a file that is no scenario."""
        from moedoctor.catalogue import PluginError
        from moedoctor.scenario.file import ScenarioError
        from moedoctor.scenario.targets import TargetError, load_scenario

        try:
            scenario = load_scenario(self.path)
        except (PluginError, ScenarioError, TargetError) as error:
            raise self.CollectError(str(error)) from None
        yield ScenarioItem.from_parent(self, name=f"{scenario.id} {scenario.name}", scenario=scenario)


class ScenarioFailed(Exception):  # noqa: N818 (what pytest shows as the name of a failure)
    """A scenario whose verdict is a failure; as text, the verdict and its reason."""


class JudgedItem(pytest.Item):
    """A test that raises ScenarioFailed."""

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Show a verdict or a wrong answer by its words, and anything else as pytest does."""
        return (
            str(excinfo.value) if isinstance(excinfo.value, ScenarioFailed) else super().repr_failure(excinfo)
        )

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the scenario is; a question has no place in a file."""
        return self.path, 0, self.name


class ScenarioItem(JudgedItem):
    """One scenario as a test."""

    def __init__(self, *, scenario: Any, **options: Any) -> None:
        super().__init__(**options)
        self._scenario = scenario

    def runtest(self) -> None:
        """Run the scenario. Raises ScenarioFailed, or pytest's skip."""
        from moedoctor import environment
        from moedoctor.results import VERDICTS, ScenarioVerdict
        from moedoctor.runner.plan import Options, plan
        from moedoctor.runner.pool import ServerError
        from moedoctor.runner.run import run

        facts = environment.collect()
        try:
            (result,) = run(plan([self._scenario], Options(), facts), facts).scenarios
        except ServerError as error:  # it cannot run at all, such as without torch
            raise ScenarioFailed(str(error)) from None
        self.user_properties.append(("moedoctor verdict", result.verdict.value))
        for title, text in list_sections(result):
            self.add_report_section("call", title, text)
            self.user_properties.append((title, text))
        if result.verdict is ScenarioVerdict.SKIPPED:
            # The location is that of the scenario, not of this line.
            raise pytest.skip.Exception(result.reason or "every case is skipped", _use_item_location=True)
        if VERDICTS[result.verdict].wrong:
            why = result.reason or result.title
            raise ScenarioFailed(f"{result.id} {result.name} is {result.verdict.value}: {why}")


def list_sections(result: ScenarioResult) -> Iterator[tuple[str, str]]:
    """Give (title, text) of each case and of each claim that was tested, with its evidence as JSON."""
    from moedoctor.reporters.text import explain_case, format_parameters
    from moedoctor.results import to_json

    for case in result.cases:
        words = f"moedoctor {case.subject} {case.tier.value} {format_parameters(case.parameters)}".rstrip()
        yield words, f"{case.verdict.value}: {explain_case(case)}\n{to_json(case.evidence)}"
    for claim in result.claims:
        yield f"moedoctor claim {claim.verdict.value}", f"{claim.text}\n{to_json(claim.evidence)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the questions to each target, before others select or mark tests."""
    for option, kind in _ASKED.items():
        for target in config.getoption(option):
            from moedoctor.testing import load_questions

            examined = Examined(target, kind, config.getoption("--moe-device"), session)
            for question in load_questions(kind):
                name = f"{option[2:]} {target} {question}"
                items.append(QuestionItem.from_parent(session, name=name, question=question, of=examined))


class Examined:
    """The answers of one target; all questions that are left in the session are asked at once."""

    def __init__(self, target: str, kind: str, device: str, session: pytest.Session) -> None:
        self._target, self._kind, self._device, self._session = target, kind, device, session
        self._answers: list[Answer] | None = None

    def list_answers(self, question: str) -> list[Answer]:
        """Return the answers to a question, one for each variant. Raises TargetError."""
        from moedoctor.testing.examine import examine

        if self._answers is None:
            items = (each for each in self._session.items if isinstance(each, QuestionItem))
            only = [each.question for each in items if each.of is self]
            report = examine(self._target, self._kind, device=self._device, only=only)
            self._answers = list(report.answers)
        return [answer for answer in self._answers if answer.question == question]


class QuestionItem(JudgedItem):
    """One question to one target as a test."""

    def __init__(self, *, question: str, of: Examined, **options: Any) -> None:
        super().__init__(**options)
        self.question, self.of = question, of

    def runtest(self) -> None:
        """Ask. Raises ScenarioFailed, or pytest's skip."""
        from moedoctor.testing import TargetError, Verdict

        try:
            answers = self.of.list_answers(self.question)
        except TargetError as error:
            raise ScenarioFailed(str(error)) from None
        failed = [answer for answer in answers if not answer.passes]
        if failed:
            lines = (f"{each.name}: {each.verdict.value}: {each.reason}\n  {each.repeat}" for each in failed)
            raise ScenarioFailed("\n".join(lines))
        if all(answer.verdict is Verdict.SKIPPED for answer in answers):
            reason = answers[0].reason if answers else "it was not asked"
            raise pytest.skip.Exception(reason or "", _use_item_location=True)
