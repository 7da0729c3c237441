"""Settings of Python and of hypothesis, and skips of tests that this machine cannot run."""

import atexit
import copy
import faulthandler
import functools
import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from moedoctor import environment, origin
from moedoctor.processes import interrupts

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: with torch's own threads beside them, small products take ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without byte code, each worker rewrites the assertions of all tests, and each child compiles moedoctor anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests call `main` thousands of times in one process, and typer builds every command of ours each time.
typer.main.get_command = functools.cache(typer.main.get_command)


def _remember_gpus() -> None:
    """Ask NVML once about the GPUs of this machine, not in a new child for each command of a test."""
    ask = environment.ask
    answers: dict[tuple[Any, ...], dict[str, Any]] = {}

    def remembered(module: str, request: Any = None, **options: Any) -> dict[str, Any]:
        variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        key = module, request, *sorted(variables.items())
        if key not in answers:
            answers[key] = ask(module, request, **options)
        return copy.deepcopy(answers[key])

    environment.ask = remembered


_remember_gpus()


def _remember_checkout() -> None:
    """Ask git once about this checkout, not in a new child for each report of a test."""
    describe, describe_once = origin.describe_checkout, functools.cache(origin.describe_checkout)
    origin.describe_checkout = lambda folder=None: describe(folder) if folder else describe_once()


_remember_checkout()

# Programs in the background of a shell ignore Ctrl-C, and those of nohup a closed terminal; tests send both.
for _signal in (*interrupts.SIGNALS, signal.SIGQUIT):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)

settings.register_profile(
    "moedoctor", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples in every CI run: a red build there can be repeated here.
settings.register_profile("ci", settings.get_profile("moedoctor"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "moedoctor")


def _no_gpu() -> str | None:
    import torch  # takes seconds, so only if a collected test needs it

    return None if torch.cuda.is_available() else "needs an NVIDIA GPU that torch can use"


def _no_upstream() -> str | None:
    found = any(importlib.util.find_spec(name) for name in ("vllm", "flashinfer"))
    return None if found else "needs vLLM or FlashInfer: pip install -e '.[vllm]'"


def _not_alone() -> str | None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    return "measures times: run it with -n 0" if workers > 1 else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collection makes out of every later garbage collection.

    All of it lives until the end, and with it one `gc.collect` takes about a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries complain about objects that are left at the end


def _names_marker(path: Path, marker: str) -> bool:
    return f"mark.{marker}" in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a slow test if slow tests alone run: the imports of all files take 12 s."""
    if collection_path.name.startswith("test_") and " or " not in config.option.markexpr:
        wanted = {"slow", "alone"}.intersection(config.option.markexpr.split(" and "))
        if any(not _names_marker(collection_path, marker) for marker in wanted):
            return True
    return None


LONG = {"test_interpreted.py", "test_without_torch.py", "test_cluster.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip marked tests that cannot run here, with the reason, and count them. The longest begin first.

    One of them at the end would leave the other cores idle.
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    assert all(_names_marker(path, "slow") for path in slow), "`pytest_ignore_collect` would not find it"
    for marker, missing in (("gpu", _no_gpu), ("upstream", _no_upstream), ("alone", _not_alone)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def replayed_here() -> Iterator[set[bool]]:
    """Replay here and not in children, each of which imports torch.

    The next judgment is left to a child if False is put into the set, the next backend if True is.
    """
    from moedoctor.diagnose.capsule import replay
    from moedoctor.results import to_plain

    ask, left = replay.ask, set[bool]()

    def answer(module: str, request: dict[str, Any], *, seconds: float) -> Any:
        kind = "variant" in request
        if kind not in left:
            return json.loads(json.dumps(to_plain(replay._carry_out(request))))
        left.discard(kind)
        return ask(module, request, seconds=seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "ask", answer)
        yield left


@pytest.fixture
def forked_examination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let children of `conform` be copies of this process: another would take seconds to import torch."""
    from moedoctor.processes.ask import Ended
    from moedoctor.results import to_plain
    from moedoctor.testing import child, examine

    answers, log = tmp_path / "answers", tmp_path / "log"

    def run(module: str, request: Any, **options: Any) -> Any:
        process = os.fork()
        if process == 0:
            try:
                faulthandler.disable()  # that of pytest
                sys.stderr = log.open("w")
                with answers.open("w", buffering=1) as out:
                    for event in child.answer_request(request):
                        out.write(json.dumps(to_plain(event)) + "\n")
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        events = map(json.loads, answers.read_text().splitlines())
        return Ended(tuple(events), code, log.read_text(), 1.0, 60.0)

    monkeypatch.setitem(examine.__globals__, "run_module", run)


@pytest.fixture
def find_plugins_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Give a function that makes the plug-ins of a folder known as if its project was installed."""
    from moedoctor import catalogue

    def forget() -> None:
        for registry in (catalogue.load_faults, catalogue.load_subjects, catalogue.load_reporters):
            registry.cache_clear()

    def find_in(folder: Path) -> None:
        monkeypatch.syspath_prepend(str(folder))
        forget()

    yield find_in
    forget()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with config.json, whose engines are those of a stand-in and give finite logprobs."""
    import engine_stub

    monkeypatch.setenv("PYTHONPATH", str(engine_stub.write(tmp_path / "site")))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return folder


@pytest.fixture
def dying_plugin(find_plugins_in: Callable[[Path], None]) -> None:
    """The known failure of `tests/dying_plugin`, found through its entry point like another project's."""
    find_plugins_in(Path(__file__).parent / "dying_plugin")


@pytest.fixture(scope="module")
def server_without_torch() -> Iterator[None]:
    """Start the process that forks the cases without torch: it takes seconds, and no dying case needs it."""
    from moedoctor.runner import pool

    start = pool._Server
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_server", None)
        patch.setattr(pool, "_Server", lambda without: start({"torch": "left out of this test", **without}))
        yield
        pool._stop_server()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no browser; run `make browser`, which says how to install one")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()
