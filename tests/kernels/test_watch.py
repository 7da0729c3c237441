"""A kernel that is launched again must have been compiled for the same kind of arguments."""

import itertools
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from moedoctor.kernels.watch import QuickLaunch, check_alignment


def launched(forms: list[Any], version: str, keys: str) -> tuple[list[Any], list[Any]]:
    """Launch once for each key, with its number; return the launches that compile, and all of each form.

    `forms` are what Triton returns from one launch after another: a compiled form, or None to interpret.
    """
    kernel = MagicMock()
    kernel.__getitem__.return_value.side_effect = forms
    launch = QuickLaunch(kernel, version)
    for number, key in enumerate(keys):
        launch(key, 7, number, num_warps=4)
    assert all(grid == call((7,)) for grid in kernel.__getitem__.call_args_list)
    of_forms = [form and form.__getitem__.return_value.mock_calls for form in forms]
    return kernel.__getitem__.return_value.mock_calls, of_forms


def test_a_compiled_form_is_reused_only_for_its_own_key() -> None:
    compiling, reused = launched([MagicMock(), MagicMock()], "3.6.0", "abab")
    assert compiling == [call(0, num_warps=4), call(1, num_warps=4)]
    assert reused == [[call(2)], [call(3)]]


@pytest.mark.parametrize(
    ("form", "version"),
    [(None, "3.6.0"), (MagicMock(), "3.2.0")],
    ids=["an interpreter compiles nothing", "up to Triton 3.2 a compiled form takes no constants"],
)
def test_triton_is_asked_each_time(form: Any, version: str) -> None:
    compiling, _ = launched([form] * 3, version, "aaa")
    assert compiling == [call(number, num_warps=4) for number in range(3)]


def test_the_alignment_of_a_tensor_is_part_of_a_key() -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert check_alignment(x, x[1:], x[8:]) == (True, False, True)


@pytest.mark.gpu
def test_every_kind_of_tensor_gets_a_fitting_kernel() -> None:
    """Runs twice, so that each form is launched again after all others."""
    from moedoctor.trace.nan_state import NanState

    def rows(columns: int, dtype: torch.dtype, offset: int, step: int) -> torch.Tensor:
        whole = torch.zeros(6 * columns * step + offset, device="cuda", dtype=dtype)
        return whole[offset:].view(6, columns * step)[:, ::step]  # [6, columns]

    types = torch.bfloat16, torch.float32, torch.float64
    kinds = list(itertools.product((1, 16, 33, 2048), types, (0, 1), (1, 2)))
    state = NanState("cuda")
    points = [state.add_point(str(kind)) for kind in kinds]
    for _ in range(2):
        state.begin(4, 6)
        for point, (columns, dtype, offset, step) in zip(points, kinds, strict=True):
            x = rows(columns, dtype, offset, step)  # [6, columns]
            x[1, columns - 1], x[5, columns // 2] = float("nan"), float("inf")
            state.watch(point, x)
        state.end()
    counted = {point.point: point for point in state.report().points}
    assert set(counted) == {str(kind) for kind in kinds}
    assert {(point.nan_rows[:2], point.inf_rows[:2]) for point in counted.values()} == {((2, 0), (0, 2))}
