"""Functions are recognized by their code, and every patch of the plug-in fits the source of its releases."""

import ast
import json
import re
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from real_vllm import ask_child, read_release

from moedoctor.plugin import known_code, sources
from moedoctor.plugin.extensions import FIXES, TRACES, Extension, Need
from moedoctor.plugin.known_code import Code, find_difference, load_table
from moedoctor.plugin.register import FixError, Patch, apply_patches, find_base, list_known_releases, need
from tests.interpreted import ROOT

RUNNER = '''
from vllm.base import Base as Root, helper


class Runner(Root):
    def step(self, rows: int = 3) -> None:
        """Run a step."""
        # a comment
        return self.model(rows, name="x")
'''
FILES = {
    "vllm/runner.py": RUNNER,
    "vllm/base/__init__.py": "from .inner import Base\n\n\ndef helper():\n    return 1\n",
    "vllm/base/inner.py": "class Base:\n    def sleep(self, level=1):\n        return level\n",
}
NEEDS = ["vllm.runner:Runner.step", "vllm.runner:Runner.sleep", "vllm.runner.helper"]


def hash_all(files: Mapping[str, str]) -> list[str | None]:
    code = Code(lambda file: files[file])
    return [code.hash(name) for name in NEEDS]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = dict(zip(NEEDS, ({"0.33.0": each} for each in hash_all(FILES)), strict=True))
    table = {"needs": {"offload": {"0.33.0": NEEDS}}, "functions": hashes}
    monkeypatch.setattr(known_code, "load_table", lambda: table)


def change(file: str, old: str, new: str) -> dict[str, str]:
    assert old in FILES[file]
    return {**FILES, file: FILES[file].replace(old, new)}


@pytest.mark.parametrize(
    ("file", "old", "new", "difference"),
    [
        # Layout, comments and annotations do not count.
        ("vllm/runner.py", "# a comment", "# another one", None),
        ("vllm/runner.py", '"""Run a step."""', "", None),
        ("vllm/runner.py", ": int = 3", " = 3", None),
        ("vllm/runner.py", 'rows, name="x"', "rows,\n            name='x',\n        ", None),
        ("vllm/runner.py", '"x"', '"y"', f"its {NEEDS[0]} differs from 0.33.0's"),
        ("vllm/runner.py", "= 3", "= 4", f"its {NEEDS[0]} differs from 0.33.0's"),
        ("vllm/runner.py", "class Runner", "class Walker", f"{NEEDS[0]} was not found in it"),
        ("vllm/runner.py", " def step", " @property\n    def step", f"its {NEEDS[0]} differs from 0.33.0's"),
        ("vllm/runner.py", "Runner(Root)", "Runner", f"{NEEDS[1]} was not found in it"),
        ("vllm/base/inner.py", "return level", "return -level", f"its {NEEDS[1]} differs from 0.33.0's"),
        ("vllm/base/__init__.py", "return 1", "return 2", f"its {NEEDS[2]} differs from 0.33.0's"),
        ("vllm/runner.py", "class Runner", "class (Runner", f"{NEEDS[0]} was not found in it"),
    ],
)
@pytest.mark.usefixtures("stored")
def test_the_function_that_differs_is_named(file: str, old: str, new: str, difference: str | None) -> None:
    assert find_difference("offload", "0.33.0", change(file, old, new).__getitem__) == difference


@pytest.mark.usefixtures("stored")
def test_what_was_not_compared_is_never_the_same() -> None:
    assert find_difference("offload", "0.33.0", FILES.__getitem__) is None
    for extension, release in (("offload", "0.32.0"), ("moe", "0.33.0")):
        nothing = f"no functions of {release} are stored for {extension}, so nothing was compared"
        assert find_difference(extension, release, FILES.__getitem__) == nothing
    load = known_code.load_table()
    load["functions"][NEEDS[1]].clear()
    missing = f"{NEEDS[1]} of 0.33.0 is not stored, so it was not compared"
    assert find_difference("offload", "0.33.0", FILES.__getitem__) == missing


@pytest.mark.parametrize("text", ["from vllm.runner import step as Runner\n", "(" * 9999, "-" * 99_999 + "1"])
def test_hostile_files_are_no_code(text: str) -> None:
    assert Code(lambda file: text).hash("vllm.runner:Runner.step") is None


def test_every_mutation_of_a_function_changes_its_hash() -> None:
    code = RUNNER.replace(": int = 3", " = 3").replace(" -> None", "")
    tree = ast.parse(code)
    own = known_code.hash_code(tree)
    for number, node in enumerate(ast.walk(tree)):
        changed = list(ast.walk(ast.parse(code)))
        twin: Any = changed[number]
        for field in ("id", "attr", "name", "arg"):
            if isinstance(getattr(twin, field, None), str):
                setattr(twin, field, "changed")
                assert known_code.hash_code(changed[0]) != own, ast.dump(node)


@pytest.mark.parametrize(
    ("version", "base"),
    [
        ("0.33.0", "0.33.0"),
        ("0.33.1.dev5", "0.33.0"),
        ("0.33.0rc1", "0.33.0"),
        ("0.27.1.post2", "0.27.1"),
        ("0.16.9", None),
        ("dev-build", None),
    ],
)
def test_a_build_follows_a_known_release(version: str, base: str | None) -> None:
    assert find_base(version) == base


@pytest.mark.usefixtures("stored")
def test_a_build_with_the_same_code_gets_the_fix() -> None:
    def ask(version: str, files: Mapping[str, str]) -> tuple[Need, str]:
        return need("offload", FIXES["offload"], version, files.__getitem__)

    same = "same code as 0.33.0 where this fix changes it"
    assert ask("0.33.1.dev5", FILES) == (Need.MADE_FOR, same)
    changed = change("vllm/runner.py", '"x"', '"y"')
    assert ask("0.33.1.dev5", changed) == (Need.REFUSED, f"its {NEEDS[0]} differs from 0.33.0's")
    assert ask("0.33.0", changed) == (Need.MADE_FOR, "")
    assert ask("0.16.0", FILES)[0] is Need.REFUSED


def test_the_table_has_the_newest_release_and_only_known_ones() -> None:
    table = load_table()
    assert table["needs"].keys() == {*FIXES, *TRACES}
    newest = list_known_releases()[-1]
    for name, extension in {**FIXES, **TRACES}.items():
        rows = table["needs"][name]
        assert set(rows) <= set(list_known_releases())
        assert (newest in rows) is (extension.need(newest)[0] is Need.MADE_FOR)
        for release, functions in rows.items():
            assert functions
            assert all(release in table["functions"][each] for each in functions), (name, release)


STORED = json.loads((ROOT / "evidence" / "plugin_sources.json").read_text())
CODE = (
    "import json; from moedoctor.plugin.sources import check_sources;"
    "print('\\nANSWER ' + json.dumps(check_sources()))"
)


@pytest.mark.upstream
def test_every_patch_fits_the_installed_release_and_the_stored_answers_say_so() -> None:
    answer, _ = ask_child(CODE)
    assert list(answer) == [*FIXES, *TRACES]
    assert all(row.get("patches") or row.get("reason") for row in answer.values())
    release = read_release()
    for row in answer.values():
        row.pop("patches", None)
    assert STORED[release] == answer


def test_all_known_releases_are_stored_and_those_that_make_test_upstream_asks_are_among_them() -> None:
    listed = re.findall(r"(?m)^vllm (.+)$", (ROOT / "scripts" / "releases.txt").read_text())
    assert list(STORED) == list(list_known_releases())
    assert set(listed) <= set(STORED)
    assert all(list(rows) == [*FIXES, *TRACES] for rows in STORED.values())


def test_an_extension_that_does_not_fit_its_own_release_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(version: str) -> str:
        fits = Patch("moedoctor.plugin.sources", "check_sources", None)
        apply_patches("mine", version, [fits, Patch("no_such_module", "f", None)])
        return ""

    monkeypatch.setitem(sys.modules, "moedoctor_mine", SimpleNamespace(apply=apply))
    original = Patch.check
    with pytest.raises(FixError, match=r"mine was made for vLLM 0\.33\.0, but: there is no no_such_module"):
        sources._check("mine", Extension("moedoctor_mine"), "0.33.0")
    assert Patch.check is original
