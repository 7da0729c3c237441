"""The shapes that the kernels are launched in, and that every launch is on the GPU of its tensors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton")

import hypothesis.strategies as st
from hypothesis import given

from moedoctor.kernels.routing import launch
from tests.interpreted import ROOT


def _assert_covers(shape: launch.Shape, columns: int, top_k: int) -> None:
    for size in (shape.rows, shape.lanes, shape.width, shape.warps):
        assert size & (size - 1) == 0, f"{shape}: Triton takes powers of two"
    assert shape.lanes * shape.width >= columns
    assert shape.lanes >= top_k


@given(st.integers(0, 200_000), st.integers(1, 512), st.data())
def test_half_softmax_shapes_hold_every_expert_and_pick(tokens, experts, data):
    top_k = data.draw(st.integers(1, min(experts, 16)))
    shape = launch.choose_half_softmax_shape(tokens, experts)
    _assert_covers(shape, experts, top_k)
    assert shape.width <= 8, "one vector load a lane"


GROUPS, SIZES = st.sampled_from([1, 3, 8, 33, 64]), st.sampled_from([1, 2, 3, 20, 600])


@given(GROUPS, SIZES, st.sampled_from([2, 4, 8]), st.data())
def test_topk_shapes_give_each_group_its_own_lanes(groups, size, element_size, data):
    experts = groups * size
    top_k = data.draw(st.integers(1, experts))
    shape = launch.choose_topk_shape(data.draw(st.integers(0, 200_000)), experts, top_k, groups, element_size)
    padded = 1 << (groups - 1).bit_length()
    _assert_covers(shape, experts, top_k)
    assert shape.lanes % padded == 0
    assert shape.lanes * shape.width // padded >= size


def _modules() -> dict[Path, ast.Module]:
    """The modules that hold a kernel or the name of one."""
    texts = {path: path.read_text() for path in (ROOT / "moedoctor").rglob("*.py")}
    kernels = re.findall(r"@triton\.jit.*\ndef (\w+)", "\n".join(texts.values()))
    named = re.compile(rf"\b(?:{'|'.join(kernels)}|QuickLaunch)\b")
    return {path: ast.parse(text) for path, text in texts.items() if named.search(text)}


def _kernels(trees: dict[Path, ast.Module]) -> set[str]:
    """The names of all functions with the decorator `triton.jit`."""
    return {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    }


def _quick_launches(trees: dict[Path, ast.Module]) -> set[str]:
    """The names that a `QuickLaunch` is assigned to."""
    return {
        name.id
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and "QuickLaunch(" in ast.unparse(node.value)
        for name in ast.walk(node.targets[0])
        if isinstance(name, ast.Name)
    }


def _launches(
    node: ast.AST, kernels: set[str], quick: set[str], *, guarded: bool = False
) -> Iterator[tuple[int, ast.expr, bool]]:
    """The line and grid of each ``kernel[grid]``, and whether it is in a `with make_current(...)` block."""
    if isinstance(node, ast.With):
        guarded = guarded or any("make_current(" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in kernels:
        yield node.lineno, node.slice, guarded
    if isinstance(node, ast.Call) and ast.unparse(node.func) in quick:
        yield node.lineno, ast.Tuple([node.args[1]]), guarded
    for child in ast.iter_child_nodes(node):
        yield from _launches(child, kernels, quick, guarded=guarded)


def test_every_launch_is_on_the_gpu_of_its_tensors_and_no_grid_overflows() -> None:
    """CUDA's grid ends at 65,535 in y and z: tokens, rows, experts and blocks are in x, or counted there."""
    trees = _modules()
    kernels, quick = _kernels(trees), _quick_launches(trees)
    launched: list[str] = []
    for path, tree in trees.items():
        for line, grid, guarded in _launches(tree, kernels, quick):
            assert guarded, f"{path}:{line}: not in `with make_current(...)`"
            assert isinstance(grid, ast.Tuple), f"{path}:{line}: a grid is written where it is launched"
            others = [ast.unparse(length) for length in grid.elts[1:]]
            few = ("_MOST_ROWS", "tile.depth_splits")  # the second is at most 8
            assert all(any(name in length for name in few) for length in others), (path, line, others)
            launched.append(path.name)
    # At least; a launch that is written in another way must not be missed.
    for name, number in {"launch.py": 8, "watch.py": 4, "lookup.py": 2, "transfer.py": 2}.items():
        assert launched.count(name) >= number, name
