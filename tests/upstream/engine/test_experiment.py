"""Rows of reports about engines that stopped."""

import pytest

from moedoctor.results import Death
from moedoctor.upstream.engine.engine import EngineError
from moedoctor.upstream.engine.experiment import shorten_error

UNKNOWN_MODEL = """1 validation error for ModelConfig
  Value error, The checkpoint has model type `gemma4` [type=value_error, input_value=ArgsKwargs((), {'m': 1})]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""
"""In pydantic's form: the first line only counts errors."""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (UNKNOWN_MODEL, "ValidationError: The checkpoint has model type `gemma4`"),
        ("\n  no room left \n of 3 GiB", "ValidationError: no room left"),
        ("", "ValidationError: "),
    ],
)
def test_an_error_is_told_by_the_line_that_says_what_is_wrong(message: str, line: str) -> None:
    error = EngineError("pydantic_core.ValidationError", message, "load", Death.EXCEPTION)
    assert shorten_error(error) == line
