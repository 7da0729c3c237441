"""A server's command line taken apart: the variables that are set in front of it, its own words, and what it
says about parallel settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moedoctor.diagnose.settings.flags import GivenFlag, given_flags

_PROGRAM = re.compile(r"(?:.*/)?vllm|vllm\.\S+|\S*vllm-openai\S*")
"""``vllm``, ``python -m vllm.entrypoints.openai.api_server``, the image ``vllm/vllm-openai:v0.21.0``."""
_SETTING = re.compile(r"(?:--env=|-e)?((?:vllm|flashinfer)_\w+)=(.*)", re.IGNORECASE | re.DOTALL)
"""As in ``NAME=VALUE vllm serve`` and ``docker run -e NAME=VALUE``."""

_SHORT = re.compile(r"-dp(=.*)?")


@dataclass(frozen=True)
class Served:
    """A command line that starts a server."""

    settings: Mapping[str, str]
    """``VLLM_*`` and ``FLASHINFER_*`` variables that are set on the line itself."""
    command: tuple[str, ...]
    """From ``vllm`` on: what comes before is another program's."""


def served(words: Sequence[str]) -> Served:
    """Split a command line at the program; where vLLM is not named, all of it is vLLM's."""
    start = next((place for place, word in enumerate(words) if _PROGRAM.fullmatch(word)), 0)
    matches = [_SETTING.fullmatch(word) for word in words[:start]]
    return Served({one[1]: one[2] for one in matches if one}, tuple(words[start:]))


def parallel_of(command: Sequence[str], release: str) -> tuple[bool, bool]:
    """(expert parallelism, data parallelism), as the command line asks for them."""
    long = [f"--data-parallel-size{word[3:]}" if _SHORT.fullmatch(word) else word for word in command]
    flags = given_flags(long, release)
    expert = [one for one in flags if one.name == "--enable-expert-parallel"]
    sizes = [one.value or "" for one in flags if one.name == "--data-parallel-size"]
    return bool(expert and _is_on(expert[-1])), bool(sizes) and sizes[-1] not in ("", "1")


def _is_on(flag: GivenFlag) -> bool:
    return not flag.written.startswith(("--no", "--disable")) and (flag.value or "").lower() != "false"
