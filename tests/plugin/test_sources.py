"""Every patch of the plug-in against the Python source of the installed vLLM, and the stored answers."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from real_vllm import ask_child, read_release

from moedoctor.plugin import sources
from moedoctor.plugin.extensions import FIXES, TRACES, Extension
from moedoctor.plugin.register import FixError, Patch, apply_patches, list_known_releases
from tests.interpreted import ROOT

STORED = json.loads((ROOT / "reports" / "plugin" / "sources.json").read_text())
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
