"""One YAML scalar as a value: what YAML 1.1 and 1.2 read alike. The rest is refused, not guessed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from moedoctor.wording import show

MAX_INT = 2**63 - 1

YamlScalar = str | int | float | bool | None

_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_YES_NO = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt\s].*)?", re.DOTALL)
_ODD_NUMBER = re.compile(
    r"[-+]?(?:0[0-9_]+|0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0b[01_]+"  # other bases
    r"|[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?"  # digit groups
    r"|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)"  # base 60: 1:30 is 90
)
_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class YamlScalarError(Exception):
    """A scalar that cannot be used; as text, what it is and what was expected."""


def resolve(text: str, *, plain: bool) -> YamlScalar:
    """The value of a scalar; `plain` where it stands without quotes. Raises `YamlScalarError`."""
    if _SURROGATE.search(text):
        raise YamlScalarError(f"{show(text)} holds half a character (a surrogate), expected Unicode text")
    if not plain:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        # Digits are counted first: Python refuses to convert, or is slow on, numbers of thousands of digits.
        if len(text) > 20 or abs(int(text)) > MAX_INT:
            raise YamlScalarError(f"the number {show(text)} is too large, expected at most {MAX_INT}")
        return int(text)
    if _YES_NO.fullmatch(text):
        raise YamlScalarError(f"{show(text)} is a boolean to some readers, expected true, false or quotes")
    if _DATE.fullmatch(text):
        raise YamlScalarError(f"{show(text)} is a date to some readers, expected quoted text")
    if _ODD_NUMBER.fullmatch(text):
        raise YamlScalarError(f"{show(text)} is ambiguous, expected a decimal number or quoted text")
    if _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and not math.isfinite(float(text))):
        raise YamlScalarError(f"{show(text)} is not finite, expected a finite number")
    return float(text) if _FLOAT.fullmatch(text) else text
