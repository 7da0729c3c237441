"""`--keep-capsules` and engines: which engines of a case record a call, and what the case says of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine_stub
import pytest

from moedoctor import catalogue
from moedoctor.results import Case, Observation, Tier
from moedoctor.runner import child
from moedoctor.runner.child import Request
from moedoctor.upstream.engine import engine
from moedoctor.upstream.engine.engine import EngineRequest, run_engine


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(engine_stub.write(tmp_path / "site")))
    monkeypatch.delenv("MOEDOCTOR_RECORD", raising=False)
    monkeypatch.setattr(engine, "_recorder", {})
    monkeypatch.setattr(engine, "read_vllm_version", lambda: "0.21.0")


@pytest.fixture
def observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a case that starts one engine; return its evidence."""

    def run(
        fault: str, tier: Tier = Tier.ENGINE, *, keep: bool = True, environ: Mapping[str, str] = {}
    ) -> Mapping[str, Any]:
        def measure(case: Case, implementation: Any) -> Observation:
            result = run_engine(EngineRequest("records", [[1]], environ=environ))
            assert result.error is None
            return Observation({"fixes": result.fixes})

        tested = catalogue.load_faults()[fault]
        monkeypatch.setattr(type(tested), "observe", lambda _, *given: measure(*given))
        parameters = tested.parameters().model_dump()
        case = Case(fault, "fixed", tier, parameters)
        folder = str(tmp_path / "kept") if keep else None
        return child._observe(tested, Request(fault, {}, 60.0, case=case, capsules=folder), None).evidence

    return run


@pytest.mark.parametrize(
    ("fault", "name", "when"),
    [("MD014", "global_scale_mismatch", "mismatch=1"), ("MD015", "input_scale_missing", "nan")],
)
@pytest.mark.slow
def test_an_engine_records_the_call_that_shows_the_failure(observe, tmp_path, fault, name, when):
    evidence = observe(fault)
    (capsule,) = evidence["capsules"]
    assert capsule.startswith(f"{name}-fixed-engine-")
    assert capsule.endswith(f"/{when}.moecapsule")
    assert (tmp_path / "kept" / capsule).is_file()
    assert evidence["fixes"] is None, "a recording must not pass for the fix that a case asked for"


@pytest.mark.slow
def test_what_an_earlier_run_left_is_not_named_unless_it_was_written_again(observe, tmp_path):
    (capsule,) = observe("MD014")["capsules"]
    older = (tmp_path / "kept" / capsule).with_name("older.moecapsule")
    older.touch()
    assert observe("MD014")["capsules"] == [capsule]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("without the option", {"fault": "MD014", "keep": False}),
        ("no call shows it", {"fault": "MD012"}),
        ("no engine tier", {"fault": "MD014", "tier": Tier.KERNEL}),
    ],
)
def test_other_engines_do_not_record(observe: Any, tmp_path: Path, case: str, options: Any) -> None:
    assert observe(**options) == {"fixes": None}, case
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("release", ["0.20.0", "99.0.0"])
def test_a_release_that_cannot_record_runs_without(observe, monkeypatch, release):
    monkeypatch.setattr(engine, "read_vllm_version", lambda: release)
    assert observe("MD014") == {"fixes": None}


def test_a_request_with_a_recording_of_its_own_keeps_it(observe: Any, tmp_path: Path) -> None:
    evidence = observe("MD014", environ={"MOEDOCTOR_RECORD": str(tmp_path / "own")})
    assert evidence == {"fixes": "record (MoE calls are watched)"}
    assert [file.name for file in (tmp_path / "own").iterdir()] == [".moecapsule"], "with its own condition"
    assert not (tmp_path / "kept").exists()
