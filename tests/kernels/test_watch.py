"""A kernel that is launched again must have been compiled for the same kind of arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from moedoctor.kernels.watch import QuickLaunch, aligned, device_of


class Kernel:
    """Replaces Triton's kernel: a launch compiles a form, except in an interpreter."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.compiled: list[dict[str, Any]] = []
        self.launches: list[tuple[int, tuple[Any, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            self.compiled.append(options)
            form = Form(self, len(self.compiled))
            form[grid](*arguments)
            return None if self.interpreted else form

        return run


class Form:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self._kernel, self._number = kernel, number

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._kernel.launches.append((self._number, grid, arguments))


def test_a_compiled_form_is_reused_only_for_its_own_key() -> None:
    kernel = Kernel()
    launch = QuickLaunch(kernel, "3.6.0")
    for key, argument in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
        launch(key, 7, argument, num_warps=4)
    assert [(number, arguments) for number, _, arguments in kernel.launches] == [
        (1, (1,)),
        (2, (2,)),
        (1, (3,)),
        (2, (4,)),
    ]
    assert {grid[0] for _, grid, _ in kernel.launches} == {7}
    assert kernel.compiled == [{"num_warps": 4}] * 2


def test_an_interpreter_that_compiles_nothing_is_called_each_time() -> None:
    kernel = Kernel(interpreted=True)
    launch = QuickLaunch(kernel, "3.6.0")
    for argument in range(3):
        launch("key", 1, argument, num_warps=1)
    assert [arguments for _, _, arguments in kernel.launches] == [(0,), (1,), (2,)]


def test_an_older_triton_finds_the_form_itself() -> None:
    """Up to Triton 3.2 a compiled form takes no constants."""
    kernel = Kernel()
    launch = QuickLaunch(kernel, "3.2.0")
    for argument in range(2):
        launch("key", 1, argument, num_warps=1)
    assert [number for number, *_ in kernel.launches] == [1, 2]


def test_the_alignment_of_a_tensor_is_part_of_a_key() -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert aligned(x, x[1:], x[8:]) == (True, False, True)


def test_nothing_is_changed_for_a_tensor_on_the_cpu() -> None:
    with device_of(torch.zeros(1)):
        pass


@pytest.mark.gpu
def test_every_kind_of_tensor_gets_a_fitting_kernel() -> None:
    """Runs twice, so that each form is launched again after all others."""
    from moedoctor.trace.nan_state import NanState

    def rows(columns: int, dtype: torch.dtype, offset: int, step: int) -> torch.Tensor:
        whole = torch.zeros(6 * columns * step + offset, device="cuda", dtype=dtype)
        return whole[offset:].view(6, columns * step)[:, ::step]  # [6, columns]

    kinds = list(
        itertools.product((1, 16, 33, 2048), (torch.bfloat16, torch.float32, torch.float64), (0, 1), (1, 2))
    )
    state = NanState("cuda")
    points = [state.point(str(kind)) for kind in kinds]
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
