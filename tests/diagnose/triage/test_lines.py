"""Every line under "How to see it", and every line of the releases, is recognized alone."""

import io
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moedoctor.diagnose.triage import log_text
from moedoctor.diagnose.triage.triage import triage
from moedoctor.entries import load_entries
from moedoctor.text import load_yaml

HERE = Path(__file__).parent
LINES: list[dict[str, Any]] = load_yaml("tests.diagnose.triage", "lines.yaml")
RELEASES = Path(__file__).parents[3] / ".venv-upstream" / "releases"
_NO_MESSAGE = re.compile(r"^(?:moedoctor|vllm|--)\b|^[\w~./*<>-]*/|^[\w.-]+$|^\W*$")
"""Code in an entry that is a command, an option, a path or a name."""


def messages() -> Iterator[tuple[str, str]]:
    """Yield (id, message) for each message in code under "How to see it"."""
    for id, entry in load_entries().items():
        text = re.sub(r"\s+", " ", entry.detection)
        for code in re.findall(r"`([^`]+)`", text):
            if " " in code and not _NO_MESSAGE.search(code):
                yield id, code


def pasted() -> Iterator[tuple[str, str]]:
    yield from messages()
    for line in LINES:
        for id in line["ids"]:
            yield id, line["text"]


_ILLEGAL = "CUDA error: an illegal memory access was encountered"
_WITHOUT_OFFLOAD = {(id, _ILLEGAL) for id in ("MD002", "MD020")}
_WITHOUT_OFFLOAD |= {
    ("MD005", f"torch._dynamo.exc.Unsupported: {message}")
    for message in ("Failed to trace builtin operator", "setattr() on unsupported type")
}
"""Lines that many failures share: without an offload in the text they say nothing about these."""
_WITHOUT_BUILD = {
    ("MD004", "CUDA error: an illegal instruction was encountered"),
    ("MD004", "CUDA error: no kernel image is available for execution on the device"),
}
"""Without a target, FlashInfer or a GPU of 12.x in the text they say nothing about a suffix."""
_FAULTS = (_ILLEGAL, "NVRM: Xid 31, MMU Fault", "Memory access fault by GPU node")
_WITHOUT_IDS = {("MD011", _ILLEGAL), *(("MD016", fault) for fault in _FAULTS)}
"""Without ids or their kernel in the text a fault says nothing about these."""
PASTED = sorted(set(pasted()) - _WITHOUT_OFFLOAD - _WITHOUT_BUILD - _WITHOUT_IDS)


def each(template: str) -> Callable[[str], str]:
    return lambda text: "\n".join(template.format(line) for line in text.splitlines())


def wrapped(text: str) -> str:
    return "\n".join(re.findall(r".{1,80}", text))


WRAPPERS: dict[str, Callable[[str], str]] = {
    "alone": str,
    "logger": each("ERROR 11-22 10:00:00 [somewhere.py:86] {}"),
    "rank": each("(EngineCore_DP0 pid=212) ERROR 11-22 10:00:00 [core.py:866] {}"),
    "worker": each("(Worker_TP0 pid=3011) {}"),
    "80 columns": wrapped,
    "80 columns with a prefix": lambda text: wrapped(
        f"(Worker_TP1 pid=7) ERROR 11-22 10:00:00 [x.py:8] {text}"
    ),
    "words at 80 columns": lambda text: textwrap.fill(
        text, 80, break_long_words=False, break_on_hyphens=False
    ),
    "quoted": each("> {}"),
    "fence": "```\n{}\n```".format,
    "journald": each("Nov 22 10:00:00 gpu7 vllm[311]: {}"),
    "docker": each("2026-11-22T10:00:00.123456789Z {}"),
    "json": each('{{"log": "{}", "stream": "stderr"}}'),
    "colour": each("\x1b[31m{}\x1b[0m"),
    "smart quotes": lambda text: text.replace("'", "\u2019").replace('"', "\u201d"),
}


def found(text: str) -> set[str]:
    result = triage(io.BytesIO(text.encode()))
    return {finding.id for finding in (*result.findings, *result.possible)}


def test_each_entry_lists_a_message_that_a_log_shows() -> None:
    listed = {id for id, _ in messages()}
    # Wrong numbers without a message.
    silent = {"MD006", "MD007", "MD008", "MD017", "MD019", "MD024", "MD027", "MD036"}
    assert load_entries().keys() - listed - silent == set()


ONE_EACH = tuple({id: (id, text) for id, text in PASTED}.values())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_line_is_recognized_alone(wrapper: str) -> None:
    """All lines alone and where a terminal breaks them; what stands before a line is taken off of any."""
    lines = PASTED if wrapper in ("alone", "80 columns with a prefix") else ONE_EACH
    missed = [(id, text) for id, text in lines if id not in found(WRAPPERS[wrapper](text))]
    assert missed == []


@pytest.mark.parametrize(
    ("shared", "ground"),
    [
        (_WITHOUT_OFFLOAD, "vllm serve X --cpu-offload-gb 8"),
        (_WITHOUT_BUILD, "NVFP4 MoE on an RTX 5090"),
        (_WITHOUT_IDS, "the kernel finalizeMoeRoutingKernel gets topk_ids of -1 for padding"),
    ],
)
def test_a_shared_line_names_a_failure_only_in_a_text_with_ground_for_it(shared, ground):
    assert set(pasted()) >= shared
    for id, line in shared:
        assert id not in found(f"FP8 MoE on an H100, vLLM 0.33.0\n{line}")
        assert id in found(f"{ground}\n{line}")


def ordinary_log(lines: int, seed: int) -> str:
    """Return an ordinary log of a server, without any trouble. Every line has a shape of its own."""
    pick = random.Random(seed)
    shown = []
    for second in range(lines):
        word = "".join(pick.choices("ghjkpqtuvyz", k=12))
        shown.append(
            f"(EngineCore pid=212) INFO 11-22 10:00:{second % 60:02d} [loggers.py:{second % 900}] "
            f"request {word} of {word[:4]} finished {word[4:]} in {word[2:7]} steps"
        )
    return "\n".join(shown)


@pytest.mark.parametrize(
    ("wrapper", "lines"),
    [
        pytest.param("alone", ONE_EACH, id="one line of each failure"),
        pytest.param("80 columns with a prefix", PASTED, id="all wrapped", marks=pytest.mark.slow),
    ],
)
def test_a_line_is_recognized_in_an_ordinary_log(wrapper, lines, monkeypatch):
    monkeypatch.setattr(log_text, "THOROUGH", 1 << 12)
    before, after = ordinary_log(50, 1), ordinary_log(50, 2)
    assert len(before) > log_text.THOROUGH  # later lines are only looked at near an anchor
    assert found(before + after) == set()
    wrap = WRAPPERS[wrapper]
    missed = [(id, text) for id, text in lines if id not in found(f"{before}\n{wrap(text)}\n{after}")]
    assert missed == []


@pytest.mark.parametrize(
    "line", [line for line in LINES if "recorded" in line], ids=lambda line: line["recorded"]
)
def test_a_recorded_line_stands_in_its_log(line: dict[str, Any]) -> None:
    assert line["text"] in (HERE / "logs" / line["recorded"]).read_text(encoding="utf-8")


@pytest.mark.upstream
@pytest.mark.parametrize("line", [line for line in LINES if "in" in line], ids=lambda line: line["text"][:60])
def test_a_line_stands_in_the_sources(line: dict[str, Any]) -> None:
    """The place that the file names holds the piece of the line, in each release that is installed."""
    installed = {release: place for release, place in line["in"].items() if (RELEASES / release).is_dir()}
    if not installed:
        pytest.skip("none of the releases is in .venv-upstream")
    for release, place in installed.items():
        file, _, number = place.partition(":")
        content = (RELEASES / release / file).read_bytes()
        if number:
            content = content.splitlines()[int(number) - 1]
        assert line["source"].encode() in content, place
