"""Reading text files and YAML, and error messages of one line."""

import io
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from hostile import ACTED_ON, COMMAND, TEXTS, echoes_too_much, problem
from hypothesis import assume, example, given
from hypothesis import strategies as st

from moedoctor import text as words

LIMIT = 4096


def file_error(path: Path) -> words.TextFileError:
    with pytest.raises(words.TextFileError) as caught:
        words.read_text(path, LIMIT)
    return caught.value


BAD_BYTES = [
    (b"a: 1\nb: \x00\n", 2, "binary"),
    (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", 3, "binary"),
    (b"a: 1\ntitle: caf\xe9\n", 2, "not UTF-8 text (byte 0xe9)"),
    (b"\xef\xbb\xbfa: 1\ntitle: caf\xe9\n", 2, "not UTF-8 text (byte 0xe9)"),
    (b"\xef\xbb\xbf\n\xe9", 2, "not UTF-8 text (byte 0xe9)"),
    ("a: 1\n".encode("utf-16"), 1, "UTF-16"),
    ("a: 1\n".encode("utf-32"), 1, "UTF-32"),
    (b"#" * (LIMIT + 1), 1, "too large"),
]


@pytest.mark.parametrize(("data", "line", "message"), [pytest.param(*row, id=row[2]) for row in BAD_BYTES])
def test_bad_bytes(tmp_path: Path, data: bytes, line: int, message: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(data)
    error = file_error(file)
    assert message in error.message
    assert "expected" in error.message
    assert error.line == line


def test_folder_and_missing_file(tmp_path: Path) -> None:
    assert "is a folder" in file_error(tmp_path).message
    assert "no such file" in file_error(tmp_path / "none.yaml").message
    assert "too long" in file_error(tmp_path / ("a" * 5000)).message
    assert "not a file name" in file_error(Path("a\0b")).message
    (tmp_path / "file").touch()
    assert "not a directory" in file_error(tmp_path / "file" / "a.yaml").message


def test_links(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert "cannot be read" in file_error(tmp_path / "loop.yaml").message
    (tmp_path / "real.yaml").write_text("a: 1")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    assert words.read_text(tmp_path / "link.yaml", LIMIT) == "a: 1"


def test_a_pipe_swapped_in_after_the_first_look_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    honest = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda path: honest)
    assert "pipe, socket or device" in file_error(tmp_path / "pipe").message


def test_a_read_never_waits() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)  # as some files under /proc behave: regular ones that may have to wait
    with io.BufferedReader(words._File(read)) as file, pytest.raises(BlockingIOError):
        file.read(1)
    os.close(write)


def test_a_file_that_grows_is_cut_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    monkeypatch.setattr("moedoctor.text._require_small", lambda *_: None)  # it was small when this looked
    assert words.read_bytes(tmp_path / "file", 11) == b"x" * 11
    with pytest.raises(words.TextFileError, match="too large"):
        words.read_bytes(tmp_path / "file", 10)


def test_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/deep", "a"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("b/2", "b/1", "b/deep/3", "top"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "a" / "pipe")
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    (tmp_path / "a" / "loop").symlink_to("loop")
    listed = [(str(folder.relative_to(tmp_path)), names) for folder, names in words.walk(tmp_path)]
    assert listed == [(".", ["top"]), ("a", ["link", "loop", "pipe"]), ("b", ["1", "2"]), ("b/deep", ["3"])]
    assert words.list_names(tmp_path / "a", "*o*") == ["loop"]
    with pytest.raises(words.TextFileError, match="cannot be read \\(not a directory\\), expected a folder"):
        list(words.walk(tmp_path / "top"))
    monkeypatch.setattr("moedoctor.text.MAX_LEVELS", 2)
    with pytest.raises(words.TextFileError, match="at most 2 levels"):
        list(words.walk(tmp_path))
    monkeypatch.setattr("moedoctor.text.MAX_LEVELS", 3)
    monkeypatch.setattr("moedoctor.text.MAX_ENTRIES", 9)
    with pytest.raises(words.TextFileError, match="at most 9"):
        list(words.walk(tmp_path))


def test_a_file_that_the_system_refuses_to_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1")

    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert file_error(file).message == "cannot be read (permission denied), expected a text file"


def test_size_is_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(100 * 2**20)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file of this size must not be opened"))
    assert file_error(file).message == "is too large (100.0 MiB), expected at most 4 KiB"


@pytest.mark.parametrize("text", ["\x07", "\x7f", "\x85", "\u2028", "\u2029", "\ud800", "\uffff", "\0"])
def test_characters_that_no_text_needs(text: str) -> None:
    message = f"character U\\+{ord(text):04X} in the file, expected"
    with pytest.raises(words.TextFileError, match=message) as caught:
        words.check_printable(f"a\nb{text}\n")
    assert caught.value.line == 2


def test_printable_text() -> None:
    words.check_printable("a\tb\r\n é \xa0 \u202a 語 \U0001f600")


@given(st.text())
def test_escaped_text_is_printable(text: str) -> None:
    assert words.escape(text).isprintable()
    if text.isprintable():
        assert words.escape(text) == text


def test_escaped_and_shortened_text() -> None:
    assert words.escape("a\n\t\x1b[0m\u202e\ud800é") == r"a\n\t\x1b[0m\u202e\ud800é"
    assert words.shorten("x" * 60) == "x" * 60
    assert words.shorten("x" * 61) == "x" * 40 + "… (61 characters)"
    assert words.shorten("x" * 30, 25) == "x" * 5 + "… (30 characters)"


REFUSED = {
    "a boolean to some readers": ["yes", "Yes", "YES", "no", "No", "NO", "on", "ON", "off", "Off", "OFF"],
    "a date to some readers": ["2001-01-01", "2001-1-1", "2001-12-14t21:59:43.1-05:00", "2001-12-14 21:59"],
    "ambiguous": [
        "010", "-01", "0x1F", "0o17", "0b11", "1_000", "1_0.5", "1:30", "-1:30:59.5", "0_", "00", "0._",
        "-1.5_0", ".5_", "1_0.5e+3",
    ],
    "not finite": [".inf", "-.Inf", "+.INF", ".nan", ".NaN", "1e999", "-1.0e400"],
    "too large": [str(words.MAX_INT + 1), str(-words.MAX_INT - 1), "9" * 21, "1" * 1_000_000],
    "a surrogate": ["a\ud800"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "text"), [(reason, text) for reason, texts in REFUSED.items() for text in texts]
)
def test_refused(reason: str, text: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        words.parse_scalar(text)
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 200
    if reason != "a surrogate":
        assert words.parse_scalar(text, quoted=True) == text


@given(st.text("0123456789+-._:exobinfatruYNOl~ T", max_size=8))
def test_a_scalar_has_the_same_value_in_pyyaml(text: str) -> None:
    plain = text.strip()
    try:
        ours = words.parse_scalar(plain)
    except ValueError:
        return
    resolver: Any = yaml.SafeLoader("")
    tag = resolver.resolve(yaml.ScalarNode, plain, (True, False))
    theirs = yaml.SafeLoader.yaml_constructors[tag](resolver, yaml.ScalarNode(tag, plain))
    if isinstance(ours, float) and isinstance(theirs, str):
        return  # YAML 1.1 wants a dot and a sign in 1e3; nobody takes it for another number.
    assert ours == theirs
    assert type(ours) is type(theirs)


GOOD = """\
# a comment
name: text
flow: [1, 2.5, true, null]
block:
  - {a: 1}
  - b:
      c: "1"
folded: >
  two
  words
"""


def error_of(text: str) -> words.TextFileError:
    with pytest.raises(words.TextFileError) as caught:
        words.parse_yaml(text)
    return caught.value


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 2), (("name",), 2), (("flow",), 3), (("flow", 3), 3), (("block",), 4), (("block", 0), 5),
        (("block", 0, "a"), 5), (("block", 1), 6), (("block", 1, "b"), 6), (("block", 1, "b", "c"), 7),
        (("block", 1, "b", "missing", 7), 6), (("missing",), 2), (("folded",), 8),
    ],
)  # fmt: skip
def test_line_of_a_path(path: tuple[str | int, ...], line: int) -> None:
    source = words.parse_yaml(GOOD)
    assert source.find_line(path) == source.find_line(source.keep_known(path)) == line


def test_a_value_below_its_key_has_the_line_of_the_value_and_crlf_counts_once() -> None:
    assert words.parse_yaml("key:\n\n  value").find_line(("key",)) == 3
    assert words.parse_yaml("a: 1\r\nb: 2\r\n").find_line(("b",)) == 2


BAD_TEXT = [
    ("", 1, "is empty"),
    ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a', first on line 1"),
    ("a: &x 1\nb: *x\n", 1, "anchor or alias 'x'"),
    ("a: 1\n<<: {b: 2}\n", 2, "merge key"),
    ("a: !!python/object/apply:os.system [ls]\n", 1, "tag 'tag:yaml.org,2002:python/object"),
    ("a: !!str 1\n", 1, "tag 'tag:yaml.org,2002:str'"),
    ("a: 1\n---\nb: 2\n", 2, "but found another document; expected one document"),
    ("a: 1\n5: 2\n", 2, "the key 5 is not text"),
    ("a: 1\n[b]: 2\n", 2, "a list or mapping as a key"),
    ("a:\n\tb: 1\n", 2, "indent with spaces instead of tabs"),
    ("a: MD001: text\n", 1, "quote a text that holds ': '"),
    ('a: "text\n', 2, "not valid YAML"),
    ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
    ("a: 1\nb: \x07\n", 2, "character U+0007"),
    ('a: 1\nb: "\\ud800"\n', 2, "a surrogate"),
    ('a: 1\nb: "\\UFFFFFFFF"\n', 2, "a number out of range"),
    ("%YAML " + "1" * 5000 + ".1\n--- a\n", 1, "not valid YAML"),
    ("{a: " * 30_000, 1, "nested too deeply"),
    ("".join(" " * i + "a:\n" for i in range(300)), 17, "nested too deeply"),
    ("".join(f"k{i}: 1\n" for i in range(9000)), words.MAX_NODES // 2, "too many values"),
]


@pytest.mark.parametrize(("text", "line", "message"), [pytest.param(*row, id=row[2]) for row in BAD_TEXT])
def test_bad_text(text: str, line: int, message: str) -> None:
    error = error_of(text)
    assert message in error.message
    assert error.line == line
    assert len(error.message) < 500
    assert error.message.isprintable()
    assert any(word in error.message for word in ("expected", "indent", "quote"))


def test_the_file_is_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfa: caf\xc3\xa9\n" + b"#" * (words.MAX_YAML_BYTES - 12))
    assert words.read_yaml(tmp_path / "a.yaml").data == {"a": "café"}
    assert words.read_text(tmp_path / "a.yaml", words.MAX_YAML_BYTES).startswith("a: café\n#")
    (tmp_path / "b.yaml").write_bytes(b"#" * (words.MAX_YAML_BYTES + 1))
    with pytest.raises(words.TextFileError, match="too large"):
        words.read_yaml(tmp_path / "b.yaml")


def test_the_limits_are_not_below_what_they_say() -> None:
    nested = "[" * 17 + "]" * 17
    assert words.parse_yaml(nested).data is not None
    assert "nested" in error_of(f"[{nested}]").message
    ones: Any = words.parse_yaml(f"[{','.join('1' * (words.MAX_NODES - 1))}]").data
    assert len(ones) == words.MAX_NODES - 1


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    # No digits: the writer, of YAML 1.1, leaves a text such as 1e3 unquoted, which is a number in 1.2.
    | st.text(st.characters(codec="utf-8", exclude_categories=["Nd"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcyesno", max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "b c", "on", "1", "é", "<<", "null"]), PLAIN, max_size=5))
def test_what_a_safe_writer_writes_is_read_back(data: dict[str, object]) -> None:
    class NoAliases(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    assert words.parse_yaml(yaml.dump(data, Dumper=NoAliases)).data == data


hostile_texts = st.lists(st.sampled_from(TEXTS) | st.text(max_size=20)).map("".join) | st.text(
    alphabet=st.characters()
    | st.sampled_from("\x1b[]m\x07\x9b\x9d\x9c\r\n\t;0:#\udc80\u202e\u2066\u2028\x85\x7f\0")
)


@given(hostile_texts)
def test_no_text_makes_a_terminal_or_a_ci_server_act(text: str) -> None:
    assert not problem(words.escape_commands(words.clean(text)))
    assert not problem(words.escape_commands(words.join_lines(text)))
    assert not problem(words.escape_commands(words.escape(text)))
    assert all(change(change(text)) == change(text) for change in (words.clean, words.escape))
    assert not {"\n"} & {*words.join_lines(text), *words.escape(text)}
    assert len(words.escape_commands(text)) == len(text)


@given(hostile_texts, st.sampled_from((None, 2)))
def test_escaped_json_has_the_same_data(text: str, indent: int | None) -> None:
    data = {text.encode("utf-8", "replace").decode(): [text.encode("utf-8", "replace").decode()]}
    escaped = words.escape_json(json.dumps(data, ensure_ascii=False, indent=indent))
    assert json.loads(escaped) == data
    assert not problem(escaped)


@given(hostile_texts, hostile_texts, st.booleans())
@example("x" * 100_000, "many words " * 500, True)
@example("\x1b" * 199, "9" * 201, False)
def test_a_message_is_one_short_line_whatever_it_echoes(first: str, second: str, known: bool) -> None:
    inputs = (first, second) if known else ()
    line = words.format_message(f"--option {first}: expected {second}, such as a, b", inputs)
    assert not problem(line)
    assert len(line) <= 1000
    assert line.startswith("--option ")
    assert line.endswith(", such as a, b")
    assert not any(echoes_too_much(line, text) for text in inputs)


def test_a_message_of_ours_stays_as_it_is() -> None:
    path = "/home/somebody/a folder/é中.yaml"
    message = f"{path}:3: a::b is unknown, expected one of {', '.join(['twelve_letters'] * 40)}"
    assert words.format_message(message, [path]) == message
    assert words.format_message("::x ##[y] ##vso[z]\n::w") == "\\:x \\#[y] \\#vso[z]\\n::w"


def test_the_characters_that_must_not_be_printed() -> None:
    """The oracle of these tests finds each of them alone, and no ordinary text."""
    for character in "\x00\x07\x08\x1b\x7f\x80\x9b\x9f\r\u202a\u202e\u2066\u2069\u200f\u2028\ud800":
        assert ACTED_ON.search(character)
    assert not problem("std::vector # [x] a ## b\nx ::y é中🙂")
    assert COMMAND.search("x\n \t::error::y")
    assert COMMAND.search("x ##[error]y")


NAMES = [
    *("MARLIN", "FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "VLLM_CUTLASS", "TRITON", "HUMMING", "OURS"),
    *("gemma-4-26b-a4b", "nemotron-3-super-120b", "qwen3-30b-a3b", "qwen3.5-35b-a3b"),
    *("table", "json", "markdown", "junit", "github", "lfru", "aging", "belady"),
]


@given(st.sampled_from(NAMES), st.data())
def test_a_slip_of_the_finger_finds_the_name(name: str, data: st.DataObject) -> None:
    """A letter that is doubled, left out or swapped; a digit is never guessed."""
    places = [at for at in range(1, len(name) - 1) if name[at].isalpha() and name[at + 1].isalpha()]
    assume(len(name) > 4 and places)
    at = data.draw(st.sampled_from(places))
    rest = name[at:]
    slip = data.draw(st.sampled_from([rest[0] + rest, rest[1:], rest[1] + rest[0] + rest[2:]]))
    assert name in words.find_closest(name[:at] + slip, NAMES, most=30)


@given(st.text(max_size=80), st.lists(st.text(max_size=20), max_size=8))
def test_a_suggestion_is_a_valid_name_and_keeps_every_number(name: str, valid: list[str]) -> None:
    def numbers(text: str) -> set[int]:
        return {int(digits) for digits in re.findall(r"\d+", text)}

    for known in words.find_closest(name, valid):
        assert known in valid
        assert numbers(name[:60].lower()) <= numbers(known.lower())
