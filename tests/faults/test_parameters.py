"""Points that no layer has, or that could not show the failure, are refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from moedoctor import catalogue
from tests.cases import load_cases

NEEDED = {"MD010": {"release": "0.21.0", "setting": "VLLM_NVFP4_MOE_BACKEND=MARLIN", "wants": "MARLIN"}}
CASES = load_cases(__file__)


@pytest.mark.parametrize(("id_", "wrong", "message"), CASES["impossible_parameters_are_refused"])
def test_impossible_parameters_are_refused(id_: str, wrong: dict[str, Any], message: str) -> None:
    parameters, right = catalogue.load_faults()[id_].parameters, NEEDED.get(id_, {})
    parameters.model_validate(right)
    with pytest.raises(ValidationError, match=message):
        parameters.model_validate({**right, **wrong})
