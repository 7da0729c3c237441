"""Safe YAML reading: data and lines of good files, one error with a line for every bad one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.text import MAX_BYTES, MAX_NODES, TextFileError, YamlSource, parse, read

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


def error_of(text: str) -> TextFileError:
    with pytest.raises(TextFileError) as caught:
        parse(text)
    return caught.value


def test_data_of_a_good_file() -> None:
    assert parse(GOOD).data == {
        "name": "text",
        "flow": [1, 2.5, True, None],
        "block": [{"a": 1}, {"b": {"c": "1"}}],
        "folded": "two words\n",
    }


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 2),
        (("name",), 2),
        (("flow",), 3),
        (("flow", 3), 3),
        (("block",), 4),
        (("block", 0), 5),
        (("block", 0, "a"), 5),
        (("block", 1), 6),
        (("block", 1, "b"), 6),
        (("block", 1, "b", "c"), 7),
        (("block", 1, "b", "missing", 7), 6),
        (("missing",), 2),
        (("folded",), 8),
    ],
)
def test_line_of_a_path(path: tuple[str | int, ...], line: int) -> None:
    assert parse(GOOD).line(path) == line


def test_known_is_the_part_of_a_path_that_the_file_has() -> None:
    source = parse(GOOD)
    assert source.known(("block", 1, "x")) == ("block", 1)
    assert source.known(("flow", 0)) == ("flow", 0)
    assert source.known(("x",)) == ()


def test_a_value_below_its_key_has_the_line_of_the_value() -> None:
    assert parse("key:\n\n  value").line(("key",)) == 3


def test_crlf_lines_count_once() -> None:
    assert parse("a: 1\r\nb: 2\r\n").line(("b",)) == 2


BAD_TEXT = [
    ("empty", "", 1, "is empty"),
    ("only comments", "# one\n# two\n", 1, "is empty"),
    ("duplicate key", "a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a', first on line 1"),
    ("duplicate key below", "x:\n  - {k: 1,\n     k: 2}\n", 3, "duplicate key 'k', first on line 2"),
    ("duplicate after quoting", "a: 1\n'a': 2\n", 2, "duplicate key 'a', first on line 1"),
    ("alias", "a: &x 1\nb: *x\n", 1, "anchor or alias 'x'"),
    ("unknown alias", "a: 1\nb: *x\n", 2, "anchor or alias 'x'"),
    ("alias as key", "a: 1\n*x : 2\n", 2, "anchor or alias 'x'"),
    ("recursive alias", "&x [*x]\n", 1, "anchor or alias 'x'"),
    ("merge key", "a: 1\n<<: {b: 2}\n", 2, "merge key"),
    ("python tag", "a: !!python/object/apply:os.system [ls]\n", 1, "tag 'tag:yaml.org,2002:python/object"),
    ("core tag", "a: !!str 1\n", 1, "tag 'tag:yaml.org,2002:str'"),
    ("bare tag", "a: ! 1\n", 1, "tag '!'"),
    ("tag on a mapping", "a: 1\nb: !x {}\n", 2, "tag '!x'"),
    ("tag on a key", "a: 1\n!x b: 2\n", 2, "tag '!x'"),
    ("two documents", "a: 1\n---\nb: 2\n", 2, "a second YAML document"),
    ("number as key", "a: 1\n5: 2\n", 2, "the key 5 is not text"),
    ("null as key", "a: 1\n~: 2\n", 2, "the key null is not text"),
    ("boolean as key", "true: 2\n", 1, "the key true is not text"),
    ("list as key", "a: 1\n[b]: 2\n", 2, "a list or mapping as a key"),
    ("mapping as key", "? {b: 1}\n: 2\n", 1, "a list or mapping as a key"),
    ("yes", "a: 1\nb: yes\n", 2, "'yes' is a boolean to some readers"),
    ("date", "a: 1\nb: 2001-01-01\n", 2, "'2001-01-01' is a date to some readers"),
    ("infinity", "a: 1\nb: .inf\n", 2, "'.inf' is not finite"),
    ("long integer", "a: 1\nb: " + "9" * 100_000, 2, "is too large"),
    ("tab", "a:\n\tb: 1\n", 2, "indent with spaces instead of tabs"),
    ("colon in text", "a: MD001: text\n", 1, "quote a text that holds ': '"),
    ("unclosed quote", 'a: "text\n', 2, "not valid YAML"),
    ("unclosed list", "a: [1, 2\nb: 3\n", 2, "not valid YAML"),
    ("control character", "a: 1\nb: \x07\n", 2, "character U+0007"),
    ("odd line end", "a: 1\u2028b: 2\n", 1, "character U+2028"),
    ("lone surrogate", "a: 1\nb: \ud800\n", 2, "character U+D800"),
    ("escaped surrogate", 'a: 1\nb: "\\ud800"\n', 2, "a surrogate"),
    ("escape beyond Unicode", 'a: 1\nb: "\\UFFFFFFFF"\n', 2, "a number out of range"),
    ("escape just beyond Unicode", 'a: 1\nb: "\\U00110000"\n', 2, "a number out of range"),
    ("long version", "%YAML " + "1" * 5000 + ".1\n--- a\n", 1, "not valid YAML"),
    ("other version", "%YAML 9.1\n--- a\n", 1, "not valid YAML"),
    ("long tag handle", "a: !" + "h" * 5000 + "!x 1\n", 1, "not valid YAML"),
    ("flow nesting", "[" * 100_000, 1, "nested too deeply"),
    ("mapping nesting", "{a: " * 30_000, 1, "nested too deeply"),
    ("block nesting", "- " * 50_000, 1, "nested too deeply"),
    ("key nesting", "? " * 50_000, 1, "a list or mapping as a key"),
    ("indented nesting", "".join(" " * i + "a:\n" for i in range(300)), 18, "nested too deeply"),
    ("many values", "a: [" + "1," * (MAX_NODES + 1) + "]", 1, "too many values"),
    ("many keys", "".join(f"k{i}: 1\n" for i in range(9000)), MAX_NODES // 2, "too many values"),
]


@pytest.mark.parametrize(("text", "line", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD_TEXT])
def test_bad_text(text: str, line: int, message: str) -> None:
    error = error_of(text)
    assert message in error.message
    assert error.line == line
    assert len(error.message) < 500
    assert error.message.isprintable()
    assert any(word in error.message for word in ("expected", "indent", "quote"))


def test_the_file_is_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfa: caf\xc3\xa9\n" + b"#" * (MAX_BYTES - 12))
    assert read(tmp_path / "a.yaml").data == {"a": "café"}
    (tmp_path / "b.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(TextFileError, match="too large"):
        read(tmp_path / "b.yaml")


def test_billion_laughs_is_refused_at_its_first_anchor() -> None:
    rows = ['a0: &a0 "lol"'] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert error_of("\n".join(rows)).line == 1


def test_the_limits_are_not_below_what_they_say() -> None:
    nested = "[" * 17 + "]" * 17
    assert parse(nested).data is not None
    assert "nested" in error_of(f"[{nested}]").message
    assert len(parse(",".join(["[1"] + ["1"] * (MAX_NODES - 2)) + "]").data) == MAX_NODES - 1  # type: ignore[arg-type]


PIECES = st.sampled_from([*"abcyn019.-_+:?,[]{}#&*!|>'\"%@`\\~=<x/ \t\n\r\ufeff\x85é", "\n  ", "- ", "---\n"])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=200))
def test_any_text_is_data_or_an_error(text: str) -> None:
    try:
        source = parse(text)
    except TextFileError as raised:
        error = raised
    else:
        assert isinstance(source, YamlSource)
        return
    assert 1 <= error.line <= len(text.splitlines()) + 1
    assert error.message.isprintable()


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


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b c", "on", "1", "é", "<<", "null"]), PLAIN, max_size=5))
def test_what_a_safe_writer_writes_is_read_back(data: dict[str, object]) -> None:
    class NoAliases(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    assert parse(yaml.dump(data, Dumper=NoAliases)).data == data


WORST = {
    "flow list": ("1,", "a: [", "]"),
    "flow mappings": ("{a: 1},", "[", "]"),
    "mapping": ("a: 1\n", "", ""),
    "complex keys": ("? ", "", ""),
    "brackets": ("[", "", ""),
    "braces": ("{", "", ""),
    "braces with keys": ("{a: ", "", ""),
    "shallow brackets": ("[" * 8 + "]" * 8 + ",", "[" * 8, ""),
    "escapes": (r"\x41", '"', '"'),
    "blank lines": ("\n", "", "a"),
    "text lines": ("a\n", "", ""),
    "block text": (" a\n", "|\n", ""),
    "spaces in quotes": (" a", '"', '"'),
    "directives": ("%A\n", "", "--- a"),
    "documents": ("---\n", "", ""),
    "comments": ("#\n", "", ""),
}

CHILD = """
import sys, time
from pathlib import Path
from moedoctor.text import TextFileError
from moedoctor.text import read
for path in sys.argv[1:]:
    began = time.perf_counter()
    try:
        read(Path(path))
    except TextFileError:
        pass
    print(round(time.perf_counter() - began, 3), Path(path).name)
assert "torch" not in sys.modules
# ru_maxrss would count the parent's peak too: Linux keeps it over fork and exec.
status = Path('/proc/self/status').read_text()
print(int(status.partition('VmHWM:')[2].split()[0]) // 1024)
"""


def test_the_worst_files_stay_within_a_second_and_200_mb(tmp_path: Path) -> None:
    for name, (unit, before, after) in WORST.items():
        room = MAX_BYTES - len(before) - len(after)
        (tmp_path / name).write_text(before + unit * (room // len(unit)) + after)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=True,
    )
    *times, megabytes = done.stdout.splitlines()
    assert len(times) == len(WORST)
    assert max(float(line.split()[0]) for line in times) < 0.8, done.stdout
    assert int(megabytes) < 100
