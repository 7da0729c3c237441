"""Files and YAML that a stranger may have written, and how such text is shown.

`open_file`, `read_text` and `read_bytes` are the one way to open input, `walk` to list it. `read_yaml` reads
one YAML document with the line of every value. `explain`, `join_path`, `show` and `suggest_nearest` say what
is wrong with a value and what was expected. `print_message` is the way to stderr; pages and reports use
`clean`, `join_lines`, `escape_json` and `escape_commands`.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import json
import math
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

    _Model = TypeVar("_Model", bound=BaseModel)

# Not compiled here: that takes 5 ms, also of every command that reads no file.
_UNPRINTABLE = "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"

MAX_ENTRIES = 1_000_000
MAX_LEVELS = 64


class TextFileError(Exception):
    """A file that cannot be used: on which line, and what was expected."""

    def __init__(self, line: int, message: str) -> None:
        """`line` counts from 1 and is 1 if none is known."""
        super().__init__(line, message)
        self.line = line
        self.message = message

    def __str__(self) -> str:
        return self.message


def read_text(path: Path, limit: int, expected: str = "a text file") -> str:
    """Return the text of the regular file at `path`: UTF-8, at most `limit` bytes; drops a byte order mark.

    Raises `TextFileError` for anything else; it never waits for a pipe and never opens a device.
    """
    return _decode(read_bytes(path, limit, expected))


def format_size(count: int) -> str:
    """Return a number of bytes in MB (10^6), or in kB if it is less than a tenth of one."""
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def read_bytes(path: Path, limit: int, expected: str = "a text file") -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes. Raises `TextFileError` for another."""
    with open_file(path, limit, expected) as file, _name_errors(expected):
        data = file.read(limit + 1)
    if len(data) > limit:  # it grew, or is one of the system's, which have no size
        raise TextFileError(1, f"is too large, expected at most {limit // 1024} KiB")
    return data


def open_file(path: Path, limit: int | None = None, expected: str = "a text file") -> io.BufferedReader:
    """Open the regular file at `path`, of at most `limit` bytes now. Raises `TextFileError` for another.

    Neither this nor a read waits for a pipe, a terminal or a device. A read may raise OSError.
    """
    with _name_errors(expected):
        # Before the open, which can act on a device; after it again, in case the file was swapped.
        _require_small(os.stat(path), limit, expected)
        file = _File(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
        try:
            _require_small(os.fstat(file.fileno()), limit, expected)
        except TextFileError:
            file.close()
            raise
    return io.BufferedReader(file)


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder from `folder` down with the names in it that are not folders, all in order.

    Links to folders are not followed; folders that cannot be read are left out, apart from the first. Raises
    `TextFileError` for more than `MAX_ENTRIES` names or `MAX_LEVELS` levels.
    """
    waiting, left = [(folder, 1)], MAX_ENTRIES
    while waiting:
        parent, level = waiting.pop()
        names: list[str] = []
        folders: list[str] = []
        errors = _name_errors("a folder") if parent is folder else contextlib.suppress(OSError)
        with errors, os.scandir(parent) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    raise TextFileError(1, f"holds too many files, expected at most {MAX_ENTRIES}")
                (folders if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
        if folders and level == MAX_LEVELS:
            raise TextFileError(1, f"holds too many folders in folders, expected at most {MAX_LEVELS} levels")
        yield parent, sorted(names)
        waiting += [(parent / name, level + 1) for name in sorted(folders, reverse=True)]


def list_names(folder: Path, pattern: str) -> list[str]:
    """Return the sorted names in `folder` of what matches `pattern` and is not a folder, as `walk`."""
    return fnmatch.filter(next(walk(folder))[1], pattern)


def check_printable(text: str) -> None:
    """Refuse control characters, half characters, and line ends that editors count differently."""
    if found := re.search(_UNPRINTABLE, text):
        line = text.count("\n", 0, found.start()) + 1
        raise TextFileError(
            line, f"character U+{ord(found.group()):04X} in the file, expected printable text"
        )


class _File(io.FileIO):
    """A file whose reads fail if they would have to wait: the system has such regular files under /proc."""

    def readinto(self, buffer: Any, /) -> int:
        count: int | None = super().readinto(buffer)
        if count is None:
            raise BlockingIOError(errno.EAGAIN, "a read would have to wait")
        return count


@contextlib.contextmanager
def _name_errors(expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise TextFileError(1, f"cannot be read ({reason}), expected {expected}") from error
    except ValueError:
        raise TextFileError(1, f"is not a file name, expected the path of {expected}") from None


def _require_small(info: os.stat_result, limit: int | None, expected: str) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise TextFileError(1, f"is a folder, expected {expected}")
    if not stat.S_ISREG(info.st_mode):
        raise TextFileError(1, f"is a pipe, socket or device, expected {expected}")
    if limit is not None and info.st_size > limit:
        size = f"{info.st_size / 2**20:.1f} MiB"
        raise TextFileError(1, f"is too large ({size}), expected at most {limit // 1024} KiB")


def _decode(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TextFileError(1, "is UTF-16 or UTF-32 text, expected UTF-8")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise TextFileError(line, "is a binary file (it holds NUL bytes), expected UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `error.object` and not `data`: the decoder counts from behind the byte order mark.
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{error.object[error.start]:02x}"
        raise TextFileError(line, f"is not UTF-8 text ({found}), expected UTF-8") from None


_LIMIT = 60
_LISTED = 12
_BY_WORDS = 2
"""The kind of match below which names differ by slips of the finger only."""
_FAR = 8
"""Edits between two names that are not counted further."""
_EXPECTED = {
    "model_type": "must be a mapping (key: value)",
    "dict_type": "must be a mapping (key: value)",
    "dataclass_type": "must be a mapping (key: value)",
    "list_type": "must be a list ([a, b])",
    "tuple_type": "must be a list ([a, b])",
    "string_type": "must be text (quote it)",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}
_MOST_ECHOED = 200
"""Characters of an input in a message."""
_LONGEST_MESSAGE = 1000
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colors, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC, DCS and other strings: titles, links
    r"|\x1b[ -/]*[0-~]?"  # also the start of a string that never ends: what follows is evidence
)
_LINE_END = re.compile("\r\n|[\r\v\f\x85\u2028\u2029]")
_UNSEEN = (
    "\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\U000e0000-\U000e007f"
)
"""Characters that are invisible, or that reorder the text around them."""
_INVISIBLE = re.compile(f"[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff{_UNSEEN}]")
# JSON itself escapes only what is below U+0020.
_NOT_IN_JSON = re.compile(rf"[\x7f-\x9f\u2028\u2029{_UNSEEN}]|(?<=#)#(?=\w*\[)")
COMMAND = re.compile(r"^((?:[^\S\n]|\x1b\[[0-9;]*m)*):(?=:)|#(?=#\w*\[)", re.MULTILINE)
"""A command to a CI server that reads a log: ``::error`` at the start of a line, ``##[error]`` anywhere."""


def clean(text: str) -> str:
    """Return `text` without escape sequences, control characters and tabs; lines end in ``\\n``."""
    text = _LINE_END.sub("\n", _ESCAPE_SEQUENCE.sub("", text))
    return _INVISIBLE.sub("", text).expandtabs(4)


def join_lines(text: str) -> str:
    """Return `text` cleaned, on one line."""
    return " ".join(clean(text).split())


def escape(text: str) -> str:
    """Return `text` with an escape for everything that a terminal might act on, line ends included."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escape_json(document: str) -> str:
    """Return a JSON document with an escape for what a terminal or CI server might act on; its data stays."""
    return _NOT_IN_JSON.sub(lambda match: json.dumps(match[0])[1:-1].replace("#", r"\u0023"), document)


def escape_commands(text: str) -> str:
    """Return `text` without commands for a CI server: ``::`` at the start of a line, ``##[`` anywhere.

    A backslash takes the place of the first character, so that each line keeps its width.
    """
    return COMMAND.sub(r"\1\\", text)


def print_message(text: str, inputs: Iterable[str] = ()) -> None:
    """Print ``moedoctor: text`` on stderr as `format_message` returns it."""
    print(format_message(f"moedoctor: {text}", inputs), file=sys.stderr)


def format_message(text: str, inputs: Iterable[str] = ()) -> str:
    """Return `text` as one line for stderr or a log: escaped, with at most 200 characters of an input.

    `inputs` are what a user gave, such as the arguments of the command line.
    """
    long_inputs = [given for given in inputs if len(given) > _MOST_ECHOED]
    # Commands strip a value, and split KEY=VALUE and lists.
    parts = {part for given in long_inputs for part in (given, *re.split("[=:,]", given))}
    parts |= {form for part in parts for form in (part.strip(), " ".join(part.split()))}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) > _MOST_ECHOED:
            text = text.replace(part, shorten(part, _MOST_ECHOED))
    # What is not among `inputs` comes from a file. Our own words are shorter.
    long_word = rf"\S{{{_MOST_ECHOED},}}[^\s,;:.]"
    line = re.sub(long_word, lambda word: shorten(word[0], _MOST_ECHOED), escape(text))
    if len(line) > _LONGEST_MESSAGE:
        line = f"{line[:_MOST_ECHOED]} … ({len(line)} characters) … {line[-2 * _MOST_ECHOED :]}"
    return escape_commands(line)


def explain_missing_package(package: str, extra: str) -> str:
    """Return what to do without an optional package, which an extra of moedoctor brings."""
    return (
        f"this needs {package}, which this Python lacks: pip install {package}, or install moedoctor[{extra}]"
    )


def explain_missing_torch(error: BaseException | str) -> str | None:
    """Return what to do if an exception, or its last line, says that torch or Triton is not installed.

    Only a package that is not there is meant: if an installed one cannot be imported, that is a finding.
    """
    text = str(error) if isinstance(error, ModuleNotFoundError | str) else ""
    match = re.search(r"No module named '(torch|triton)'", text)
    return explain_missing_package(match[1], "torch") if match else None


def print_traceback(mask: Callable[[str], str]) -> None:
    """Print the traceback of the exception that is being handled on stderr, each line masked and escaped."""
    import traceback

    lines = traceback.format_exc().splitlines()
    print(*(escape_commands(shorten(escape(mask(line)), 1000)) for line in lines), sep="\n", file=sys.stderr)


def shorten(text: str, limit: int = _LIMIT) -> str:
    """Return `text`, cut after about `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 20]}… ({len(text)} characters)"


def join_some(names: Sequence[str], most: int = 8) -> str:
    """Return up to `most` names, each short, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(shorten, names[:most])) + more


def show(value: object) -> str:
    """Return a value from a file as its author would write it: short, escaped, never a whole list."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    shown = escape(shorten(str(value)))
    return f"'{shown}'" if isinstance(value, str) else shown


def join_path(path: Iterable[str | int]) -> str:
    """Return keys and list indices as ``claims[0].key``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{escape(shorten(step))}" for step in path)
    return "".join(steps).removeprefix(".")


def suggest_nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``did you mean X?`` if a valid name is close to `name`, else the valid names."""
    names = list(valid)
    if close := find_closest(name, names):
        return suggest_names(close)
    listed = ", ".join(names[:_LISTED]) or "nothing here"
    return f"expected {'one of ' if len(names) > 1 else ''}{listed}{' …' if len(names) > _LISTED else ''}"


def suggest_names(names: Sequence[str]) -> str:
    """Return ``did you mean X or Y?``, or no text without names."""
    return f"did you mean {' or '.join(names)}?" if names else ""


def suggest_expected(name: str, valid: Iterable[str]) -> str:
    """Return what is close to `name`, if anything is, and all the valid names."""
    names = list(valid)
    hint = suggest_names(find_closest(name, names))
    return f"{hint} {'E' if hint else 'e'}xpected one of {', '.join(names)}".lstrip()


def find_closest(
    name: str, valid: Iterable[str], most: int = 3, *, misspelt: bool = False
) -> tuple[str, ...]:
    """Return up to `most` valid names that `name` may mean, the likeliest first; none if nothing is close.

    Numbers carry meaning: MD01 is MD001 and never MD019, and fp9 is not fp8. Words count more than letters:
    ``cutlass`` names VLLM_CUTLASS and FLASHINFER_CUTLASS. Only the likeliest kind of match is returned. With
    `misspelt`, only names that differ by slips of the finger are.
    """
    wanted = _split_words(name[:_LIMIT])
    ranks: dict[str, tuple[int, int]] = {}
    for known in valid:
        rank = _rank(wanted, _split_words(known))
        if rank is not None and (rank[0] < _BY_WORDS or not misspelt):
            ranks[known] = rank
    best = min((kind for kind, _ in ranks.values()), default=0)
    near = [known for known, (kind, _) in ranks.items() if kind == best]
    return tuple(sorted(near, key=lambda known: ranks[known][1])[:most])


def _split_words(name: str) -> tuple[str, ...]:
    """Return the words and numbers of a name: ``md``, ``1`` for MD001."""
    return tuple(part.lstrip("0") or "0" for part in re.findall(r"[^\W\d_]+|\d+", name.lower()))


def _rank(wanted: Sequence[str], known: Sequence[str]) -> tuple[int, int] | None:
    """Return how well two names match: the kind of match and the distance, smaller is better, or None."""
    numbers, others = ([word for word in words if word.isdigit()] for words in (wanted, known))
    # A number may be left out. A name with another number is the name of something else.
    if not wanted or Counter(numbers) - Counter(others):
        return None
    whole, other = ("".join(word for word in words if not word.isdigit()) for words in (wanted, known))
    if not whole:
        return _BY_WORDS, len(known)
    distance = _count_edits(whole, other)
    if numbers == others and 2 * distance <= len(whole) and distance <= 1 + len(whole) // 10:
        return (0 if distance < 2 else 1), distance
    least = 1 if numbers else 2  # fp4 means nvfp4, and fp alone means nothing
    words = [word for word in wanted if len(word) > least and not word.isdigit()]
    for kind, slips in enumerate((0, 1), _BY_WORDS):
        if words and all(_has_word(known, word, slips) for word in words):
            return kind, len(known) - len(wanted)
    if len(whole) > 1 and _is_abbreviation(whole, other):
        return _BY_WORDS + 2, len(other)
    return None


def _has_word(known: Sequence[str], word: str, slips: int) -> bool:
    """Return whether a word of `known` begins or ends with `word`, or is it up to `slips`."""
    long = len(word) > 4
    return any(
        part.startswith(word) or part.endswith(word) or (long and _count_edits(word, part) <= slips)
        for part in known
    )


def _is_abbreviation(short: str, long: str) -> bool:
    """Return whether `short` has the first letter of `long` and others of it in order, as ``md`` has."""
    letters = iter(long)
    return short[0] == long[:1] and 2 * len(short) <= len(long) and all(letter in letters for letter in short)


def _count_edits(left: str, right: str) -> int:
    """Return how many letters must be added, left out, changed or swapped with the next one."""
    if abs(len(left) - len(right)) > _FAR or max(len(left), len(right)) > _LIMIT:
        return _FAR
    before: list[int] = []
    last = list(range(len(right) + 1))
    for row, letter in enumerate(left, 1):
        now = [row]
        for column, other in enumerate(right, 1):
            cost = min(last[column] + 1, now[-1] + 1, last[column - 1] + (letter != other))
            if row > 1 and column > 1 and letter == right[column - 2] and left[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]


def explain(error: ErrorDetails, valid: Iterable[str] = ()) -> str:
    """Return a pydantic finding in a user's words; `valid` are the keys allowed beside an unknown key."""
    kind, message, value = error["type"], error["msg"], error["input"]
    if kind == "missing":
        return "is missing, expected a value"
    if kind == "extra_forbidden":
        return f"unknown key, {suggest_nearest(str(error['loc'][-1]), valid)}"
    if kind == "value_error":
        return str(error.get("ctx", {}).get("error", message))
    expected = _EXPECTED.get(kind) or re.sub(r"^\w+ should (.*?)( after validation.*)?$", r"must \1", message)
    if not kind.endswith("_type") and (isinstance(value, (dict, list)) or value == ""):
        return expected  # the value says no more: a list that is too long
    return f"{expected}, not {show(value)}"


MAX_INT = 2**63 - 1

YamlScalar = str | int | float | bool | None
YamlPath = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""

# Together these bound the slowest file to about 0.3 s in the pure-Python scanner.
MAX_YAML_BYTES = 128 * 1024
MAX_NODES = 10_000
MAX_DEPTH = 16

_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_REFUSED = (
    (
        "yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF",
        "a boolean to some readers, expected true, false or quotes",
    ),
    (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt\s].*)?", "a date to some readers, expected quoted text"),
    # Other bases, groups of digits, and base 60, in which 1:30 is 90.
    (
        r"[-+]?(0[0-9_]+|0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0b[01_]+"
        r"|(?=[0-9.]*_)([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)",
        "ambiguous, expected a decimal number or quoted text",
    ),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "not finite, expected a finite number"),
)
"""Unquoted text that YAML 1.1 and 1.2 read differently, or that is not a number of JSON."""
_HINTS = {
    "mapping values are not allowed here": "quote a text that holds ': ', indent keys of one mapping alike",
    "found character '\\t' that cannot start any token": "indent with spaces instead of tabs",
    "but found another document": "expected one document in a file",
}


@dataclass(frozen=True)
class YamlSource:
    """Plain data (dict with text keys, list, str, int, float, bool, None) and its lines."""

    data: object
    lines: Mapping[YamlPath, int]
    """Path -> line, counted from 1: a scalar's own line; the line of its key for a list or mapping."""

    def keep_known(self, path: YamlPath) -> YamlPath:
        """Return the longest part of `path`, from the root, that the file has."""
        return next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), ())

    def find_line(self, path: YamlPath) -> int:
        """Return the line of the value at `path`, or of the nearest value that holds it."""
        return self.lines.get(self.keep_known(path), 1)


def load_yaml(package: str, name: str) -> Any:
    """Return a YAML file of one of our own packages; for a file of somebody else, see `read_yaml`."""
    # The C loader takes a tenth of the time; PyYAML without libyaml does not have it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((files(package) / name).read_text(encoding="utf-8"), loader)


def read_yaml(path: Path) -> YamlSource:
    """Return the one YAML document in the file at `path`. Raises `TextFileError` for anything else."""
    return parse_yaml(read_text(path, MAX_YAML_BYTES))


def parse_yaml(text: str) -> YamlSource:
    """Return the one YAML document in `text`: no aliases, no tags, no key twice, no value that two readers
    would read differently. Raises `TextFileError` for anything else.
    """
    check_printable(text)
    loader = _PlainLoader(text)
    try:
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise TextFileError(mark.line + 1 if mark else 1, _explain_syntax(error)) from None
    except (ValueError, OverflowError):
        # The scanner's own chr() and int(): an escape beyond Unicode, a %YAML version of thousands of digits.
        problem = "a number out of range in an escape or directive, expected a Unicode code point"
        raise TextFileError(loader.line + 1, f"not valid YAML: {problem}") from None
    if root is None:
        raise TextFileError(1, "is empty, expected a YAML mapping")
    lines: dict[YamlPath, int] = {}
    return YamlSource(_read_node(root, (), lines), lines)


def validate(
    model: type[_Model],
    source: YamlSource,
    *,
    inner: Mapping[str, type[BaseModel]] | None = None,
    **more: object,
) -> _Model:
    """Return the `model` of a YAML mapping, completed by `more` fields that are not in the YAML.

    `inner` names the models of nested mappings by their key, for the keys that a message suggests. Raises
    TextFileError with the line of the first value that does not fit.
    """
    from pydantic import ValidationError

    data = source.data
    try:
        # Through JSON, because pydantic's strict mode takes enums and tuples from text only there.
        return model.model_validate_json(json.dumps({**data, **more} if isinstance(data, dict) else data))
    except ValidationError as error:
        errors = error.errors(include_url=False)

    def rank(error: ErrorDetails) -> tuple[bool, int, int]:
        # A misspelt key is also a missing one, a bad item leaves its list too short: the cause comes first.
        follows = error["type"] == "missing" or (error["type"] == "too_short" and bool(error["input"]))
        return follows, source.find_line(error["loc"]), -len(error["loc"])

    first = min(errors, key=rank)
    around = [str(step) for step in first["loc"][:-1] if isinstance(step, str)]
    beside = next((inner[key] for key in reversed(around) if inner and key in inner), model)
    path = first["loc"] if first["type"] == "missing" else source.keep_known(first["loc"])
    message = explain(first, beside.model_fields)
    raise TextFileError(source.find_line(path), f"{join_path(path)}: {message}" if path else message)


def parse_scalar(text: str, *, quoted: bool = False) -> YamlScalar:
    """Return the value of a YAML scalar. Raises ValueError, with what was expected, for an ambiguous one."""
    if _SURROGATE.search(text):
        raise ValueError(f"{show(text)} holds half a character (a surrogate), expected Unicode text")
    if quoted:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        # Digits are counted first: Python refuses to convert, or is slow on, numbers of thousands of digits.
        if len(text) > 20 or abs(int(text)) > MAX_INT:
            raise ValueError(f"the number {show(text)} is too large, expected at most {MAX_INT}")
        return int(text)
    for pattern, problem in _REFUSED:
        if re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(f"{show(text)} is {problem}")
    if not _FLOAT.fullmatch(text):
        return text
    if not math.isfinite(float(text)):
        raise ValueError(f"{show(text)} is not finite, expected a finite number")
    return float(text)


def _explain_syntax(error: yaml.MarkedYAMLError) -> str:
    context = f" {error.context}" if error.context else ""
    expected = _HINTS.get(error.problem or "", "expected keys, values and lists indented with spaces")
    return f"not valid YAML{shorten(context, 120)}: {shorten(error.problem or '', 120)}; {expected}"


class _PlainLoader(yaml.SafeLoader):
    """PyYAML up to its nodes, which refuses anchors, aliases, tags and too much of anything as it reads."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (every scalar stays text here)
    nodes = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise TextFileError(line, f"too many values, expected at most {MAX_NODES}")
        if self.depth > MAX_DEPTH:
            raise TextFileError(line, f"nested too deeply, expected at most {MAX_DEPTH} levels")
        if anchor is not None:
            raise TextFileError(line, f"anchor or alias {show(anchor)}, expected the value written out")
        if tag is not None:
            raise TextFileError(line, f"tag {show(tag)} is not supported, expected the plain value")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _read_node(node: yaml.Node, path: YamlPath, lines: dict[YamlPath, int]) -> object:
    """Return the data of a node and write its lines into `lines`."""
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        return _read_scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_read_node(item, (*path, index), lines) for index, item in enumerate(node.value)]
    result: dict[str, object] = {}
    key_lines: dict[str, int] = {}
    for key_node, value in node.value:
        key, line = _read_key(key_node), key_node.start_mark.line + 1
        if key in result:
            first = key_lines[key]
            raise TextFileError(line, f"duplicate key {show(key)}, first on line {first}; expected it once")
        key_lines[key] = line
        child = (*path, key)
        result[key] = _read_node(value, child, lines)
        if not isinstance(value, yaml.ScalarNode):
            lines[child] = line
    return result


def _read_key(node: yaml.Node) -> str:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode):
        raise TextFileError(line, "a list or mapping as a key, expected text")
    if node.value == "<<" and node.style is None:
        raise TextFileError(line, "merge key '<<' is not supported, expected the values written out")
    key = _read_scalar(node)
    if not isinstance(key, str):
        raise TextFileError(line, f"the key {show(key)} is not text, expected a name (quote it)")
    return key


def _read_scalar(node: yaml.ScalarNode) -> YamlScalar:
    try:
        return parse_scalar(node.value, quoted=node.style is not None)
    except ValueError as error:
        raise TextFileError(node.start_mark.line + 1, str(error)) from None
