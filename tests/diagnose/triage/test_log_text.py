"""Reading a log: encodings, line numbers, passages, and bounded memory."""

import codecs
import io
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.triage import log_text
from moedoctor.diagnose.triage.log_text import Passage, Passages

TEXT = "one\nRuntimeError: größer — b_scales is not on GPU\nthree\n"


def passages(
    data: bytes, anchors: tuple[bytes, ...] = (b"moe",), rare: tuple[bytes, ...] = (b"illegal",)
) -> list[Passage]:
    return list(Passages(io.BytesIO(data), anchors, rare))


def shown(data: bytes) -> dict[int, str]:
    return {passage.line: passage.shown for passage in passages(data)}


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        codecs.BOM_UTF8 + TEXT.encode(),
        codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
        codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        TEXT.encode("cp1252"),
        TEXT.replace("\n", "\r\n").encode(),
    ],
    ids=["utf-8", "bom", "utf-16-le", "utf-16-be", "utf-32", "no bom le", "no bom be", "cp1252", "crlf"],
)
def test_encodings(data: bytes) -> None:
    assert shown(data) == {1: "one", 2: "RuntimeError: größer — b_scales is not on GPU", 3: "three"}


def test_utf_16_cut_in_a_character() -> None:
    assert shown((codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"))[:-3])[3] == "three"[:-1]


def test_line_numbers_over_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_text, "BLOCK", 7)
    lines = [f"line {chr(103 + index % 20) * 5} {chr(103 + index // 20) * 3}" for index in range(100)]
    found = shown("\n".join(lines).encode())
    assert found == dict(enumerate(lines, 1))


def test_a_passage_holds_the_neighbors_and_knows_the_middle() -> None:
    middle = passages(b"an illegal\nmemory\naccess\n")[1]
    assert middle.text == "an illegal memory access"
    assert middle.text[middle.start : middle.end] == "memory"


def test_a_word_that_a_terminal_broke_is_glued() -> None:
    broken = "x" * 50 + " torch.AcceleratorError: CUDA error: an illegal mem\nory access was encountered"
    assert any(
        passage.glued and "illegal memory access" in passage.glued for passage in passages(broken.encode())
    )


def many(count: int, text: str = "step") -> list[str]:
    """Return lines that all differ in shape."""
    letters = "ghijklmnopqrstuvwxyz"
    return [
        f"{text} {letters[index % 20] * 3}{letters[index // 20 % 20] * 2}{letters[index // 400 % 20]}"
        f" {'y' * (index // 8000)}"
        for index in range(count)
    ]


def test_later_only_what_is_near_an_anchor_is_looked_at() -> None:
    before = many(log_text.THOROUGH // 10)
    lines = [*before, *many(100, "quiet"), "a line about MoE", *many(100, "still")]
    found = shown("\n".join(lines).encode())
    at = lines.index("a line about MoE") + 1
    assert found[at] == "a line about MoE"
    late = [number for number in found if number > len(before) + 1]
    assert min(late) == at - log_text.AROUND
    assert max(late) == at + log_text.AROUND


def test_a_word_of_every_line_does_not_hide_what_another_word_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_text, "THOROUGH", 0)
    monkeypatch.setattr(log_text, "FIRST", 30)
    monkeypatch.setattr(log_text, "BLOCK", 100)
    lines = [*many(200, "moe"), "an illegal access", *many(200, "moe and more")]
    found = shown("\n".join(lines).encode())
    assert found[201] == "an illegal access"
    assert 5 < len([value for value in found.values() if value.startswith("moe")]) < 100


def test_a_long_line_is_looked_at_in_pieces_and_keeps_its_number() -> None:
    data = b"first\n" + b"x" * 2_500_000 + b" moe at the end\nlast"
    found = passages(data)
    assert {finding.line for finding in found if "moe at the end" in finding.shown} == {2}
    assert found[-1].line == 3
    assert max(len(finding.text) for finding in found) < 10_000


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=2_000))
def test_any_bytes_are_read(data: bytes) -> None:
    for passage in passages(data):
        assert passage.line >= 1
        assert 0 <= passage.start <= passage.end <= len(passage.text)


PROBE = """
import sys
from moedoctor.diagnose.triage.triage import triage
class Stream:
    left = 160 * 2**20
    count = 0
    def read(self, size):
        size = min(size, self.left)
        self.left -= size
        self.count += 1
        if 60 < self.count < 180:
            return b"zq" * (size // 2)  # 60 MB without the end of a line
        line = b"INFO [loggers.py:%d] Engine 000: Avg throughput: %d tokens/s, KV cache usage: 1.%d%%\\n"
        if self.count % 3 == 0:
            line = b"zq" * 300_000 + b"%d %d %d"
        block = line % (self.count, self.count, self.count)
        return (block * (size // len(block) + 1))[:size]
triage(Stream())
# Not ru_maxrss: Linux keeps the peak of the parent across fork and exec.
status = open('/proc/self/status').read()
print(int(status.partition('VmHWM:')[2].split()[0]) // 1024)
"""


def test_memory_is_bounded_for_200_megabytes() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(ended.stdout) < 120  # MiB; the interpreter alone takes about 15
