"""Plug-ins of other projects that cannot be used are named and left out; everything else runs."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from moedoctor import catalogue
from moedoctor.cli import main

BROKEN = {
    "raises": ("raise OSError('no such library')", "OSError: no such library"),
    "exits": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "leaves": ("import os; os._exit(0)", "loading it ended its process: exit status 0"),
    "dies": ("import os; os.abort()", "loading it ended its process: killed by SIGABRT"),
    "hangs": ("import time; time.sleep(600)", "loading it ended its process: no answer within 2 s"),
    "malformed value": ("", "does not load"),
    "other": ("class Plugin: pass", "is not a moedoctor.interfaces.Fault"),
}
DISTRIBUTION = "Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n"


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find_plugins_in: Callable[[Path], None]) -> Path:
    """A project whose plug-ins break in every way, beside one whose plug-ins work."""
    for name, (text, _) in BROKEN.items():
        (tmp_path / f"{name}_plugin.py").write_text(text)
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(DISTRIBUTION)
    entries = (f"{name} = {name}_plugin:Plugin" for name in BROKEN)
    (info / "entry_points.txt").write_text("\n".join(["[moedoctor.faults]", *entries, ""]))
    monkeypatch.setattr(catalogue, "_LOAD_SECONDS", 2.0)
    catalogue._try_loading.cache_clear()
    find_plugins_in(Path(__file__).parent / "dying_plugin")
    find_plugins_in(tmp_path)
    return info


@pytest.mark.usefixtures("others")
@pytest.mark.slow
def test_a_plug_in_that_breaks_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"MD001", "MD901"} <= set(catalogue.load_faults())
    assert {name.partition(":")[2] for name in catalogue.find_left_out()} == set(BROKEN)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(BROKEN)
    for line, (name, (_, problem)) in zip(lines, BROKEN.items(), strict=True):
        assert f"another project is left out: moedoctor.faults:{name}: " in line
        assert problem in line


def test_a_malformed_list_of_plug_ins_is_one_error(others: Path) -> None:
    (others / "entry_points.txt").write_bytes(b"[moedoctor.faults]\nx = \xff")
    with pytest.raises(catalogue.PluginError, match=r"expected a valid entry_points\.txt"):
        catalogue.load_faults()


@pytest.mark.parametrize(("module", "code"), [("another.project", 2), ("moedoctor.reporters.table", 3)])
def test_a_reporter_that_raises_does_not_lose_the_report(module, code, tmp_path, monkeypatch, capsys):
    render = Mock(side_effect=KeyError("colour"))
    reporter = type("Broken", (), {"render": render, "__module__": module})()
    monkeypatch.setitem(catalogue.load_reporters(), "table", reporter)  # type: ignore[arg-type]
    stored = sorted((Path(__file__).parents[1] / "reports" / "releases").rglob("*.json"))[0]
    assert main(["show", str(stored)]) == code
    out, err = capsys.readouterr()
    assert json.loads(out)["scenarios"]
    assert err == "moedoctor: --format table failed, this is JSON instead: KeyError: 'colour'\n"
