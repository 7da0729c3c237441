"""The rules in the head of an entry: on which machines the failure can strike, and what to do there.

Rules are tried in their order and the first that fits speaks. A rule fits where everything under its ``when``
is so; what the machine does not tell is not so.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from moedoctor.entries.entry import Entry
from moedoctor.text import TextFileError, YamlSource, dotted, explain, parse

Severity = Literal["error", "warning", "note"]
"""``error``: a crash or a wrong result in the use that `needs` names; ``warning``: it takes a rarer setting,
or the evidence is weaker; ``note``: not the machine but the checkpoint, the model or other code decides."""


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"'{text}' is no version range, expected one such as '>=0.17.1,<0.20.0'") from None
    return text


Line = Annotated[str, Field(min_length=1, max_length=300)]
Range = Annotated[str, Field(min_length=1), AfterValidator(_specifier)]
"""Releases, as `packaging` reads them."""
Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Condition(_Strict):
    """What must be so on a machine; everything that is given must hold."""

    packages: dict[Name, Range] = {}
    """Distribution -> the releases meant; ``>=0`` for any."""
    capability: Range | None = None
    """Compute capability of a GPU that CUDA programs see here, ``>=12.0,<13.0``."""
    cuda: Range | None = None
    """The CUDA toolkit that would compile; where there is none, the release that torch was built for."""
    wsl: bool | None = None
    uva: bool | None = None
    """Whether vLLM's CPU offload maps host memory into the GPU, or copies in every forward."""
    pins: bool | None = None
    """Whether vLLM's CPU offload uses pinned memory."""
    variables: dict[Name, str] = {}
    """Environment variables that have just this value."""
    variables_not: dict[Name, str] = {}
    """Environment variables that must not have this value."""
    any_set: list[Name] = []
    """One of these is set, to whatever value."""
    file: Line | None = None
    """A file of an installed package, ``vllm/envs.py``."""

    @model_validator(mode="after")
    def _says_something(self) -> Condition:
        if not self.packages and not self.any_set and self.file is None:
            raise ValueError("must name packages, any_set or file: a failure needs something to fail")
        return self


class Rule(_Strict):
    """One way in which the failure can strike."""

    severity: Severity
    confidence: float = Field(gt=0, le=1)
    """How sure it is that the use named under `needs` fails here: an estimate."""
    when: Condition
    needs: Line | None = None
    """What else it takes and the machine does not show: a flag, a kind of model."""
    why: Line
    next: Line
    """What to do about it."""


class _Rules(_Strict):
    affects: list[Rule] = Field(min_length=1)


@functools.cache
def rules(entry: Entry) -> tuple[Rule, ...]:
    """The rules of `entry`. Raises TextFileError with the line where they are wrong."""
    try:
        source = parse(entry.rules)
        return tuple(_Rules.model_validate(source.data).affects)
    except TextFileError as error:
        raise TextFileError(error.line + entry.rules_line - 1, error.message) from None
    except ValidationError as error:
        line, message = _first(error, source)
        raise TextFileError(line + entry.rules_line - 1, message) from None


def _first(error: ValidationError, source: YamlSource) -> tuple[int, str]:
    finding = error.errors()[0]
    path = source.known(finding["loc"])
    return source.line(path), f"{dotted(path)}: {explain(finding)}"
