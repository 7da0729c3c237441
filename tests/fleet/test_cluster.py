"""`moedoctor fleet` on a real Ray cluster of processes on this machine: nodes die, hang and lack things."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HAS_RAY = find_spec("ray") is not None  # its import takes a third of a second of every collection
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install ray")]

_ROOT = str(Path(__file__).resolve().parents[2])
_FAKE = "import sys, time, json\n{body}\n"
_REPORT = '{"schema_version": 1, "moedoctor": "0.0.9", "environment": {}, "summary": {"exit_code": 0}}'
_KINDS = {
    "hangs": _FAKE.format(body="print('sleeping', file=sys.stderr, flush=True); time.sleep(600)"),
    "other": _FAKE.format(body=f"print('''{_REPORT}''')"),
    "dies": _FAKE.format(body="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
    "loud": _FAKE.format(body="print('\\x1b[31m::error::' + 'x' * 100); print('y' * (20 << 20))"),
}
"""Kind of node -> the `moedoctor` that it has instead of ours."""
_LACKS = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "moedoctor":
            raise ModuleNotFoundError("No module named 'moedoctor'", name="moedoctor")
if "wheel" not in "".join(sys.path):
    sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster, alone on this machine: the nodes of two at once would share its cores and Ray's ports.

    Each test adds its nodes and removes them; the last one kills the head.
    """
    from ray.cluster_utils import Cluster

    with Path(tempfile.gettempdir(), "moedoctor-ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def add(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Give a function that adds a node of a kind: `right`, `lacks`, or one of `_KINDS`."""

    def add_node(kind: str = "right", **more: Any) -> Any:
        path = _ROOT
        if kind != "right":
            folder = tmp_path / kind
            package = folder / "moedoctor"
            package.mkdir(parents=True, exist_ok=True)
            if kind == "lacks":
                package.rmdir()
                (folder / "sitecustomize.py").write_text(_LACKS)
            else:
                (package / "__init__.py").write_text("")
                (package / "__main__.py").write_text(_KINDS[kind])
            path = f"{folder}{os.pathsep}{_ROOT}"
        return cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path}, **more)

    yield add_node
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)
    if "gcs_server" in cluster.head_node.all_processes:
        cluster.wait_for_nodes()


def _start(tmp_path: Path, address: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "moedoctor", "fleet", *arguments, "--address", address, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _ROOT, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )


def _fleet(tmp_path: Path, address: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    process = _start(tmp_path, address, *arguments)
    out, err = process.communicate(timeout=180)
    return process.returncode, json.loads(out) if out else {}, err


def _statuses(document: dict[str, Any]) -> dict[str, int]:
    statuses: dict[str, int] = document["summary"]["statuses"]
    return statuses


def test_each_odd_node_is_a_row(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    for kind in ("right", "hangs", "lacks", "other", "dies", "loud"):
        add(kind)
    code, document, _ = _fleet(tmp_path, cluster.address, "check", "--node-timeout", "12")
    assert code == 1
    others = ("no answer in time", "no moedoctor", "other version", "died", "unreadable answer")
    assert _statuses(document) == {"answered": 2, **dict.fromkeys(others, 1)}
    assert len(document["groups"]) == 1
    (hung,) = [node for node in document["nodes"] if node["status"] == "no answer in time"]
    assert hung["reason"] == "moedoctor gave no answer within 12 s; its last line: sleeping"
    assert all(Path(document["reports"], node["file"]).exists() for node in document["nodes"])


def test_the_wheel_goes_to_the_node_without_moedoctor(cluster, add, tmp_path):
    add("lacks")
    wheel = tmp_path / "wheel"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(wheel), _ROOT], check=True)
    (file,) = wheel.glob("*.whl")
    _, document, _ = _fleet(tmp_path, cluster.address, "check", "--runtime-env", str(file))
    assert _statuses(document) == {"answered": 2}


def test_a_node_killed_in_the_middle_is_a_row(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    add("right")
    victim = add("hangs")
    process = _start(tmp_path, cluster.address, "check", "--node-timeout", "100")
    _wait_for_stored(tmp_path, 2)
    cluster.remove_node(victim, allow_graceful=False)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    document = json.loads(out)
    assert _statuses(document) == {"answered": 2, "died": 1}, document["nodes"]


def test_interrupted_and_resumed(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    add("right")
    add("hangs")
    folder = tmp_path / "reports"
    process = _start(tmp_path, cluster.address, "check", "--node-timeout", "100", "--reports", str(folder))
    _wait_for_stored(folder, 2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert _statuses(json.loads(out)) == {"answered": 2, "cancelled": 1}
    commands = _processes(str(tmp_path / "hangs")).values()
    assert not [command for command in commands if "runpy" in command]
    (tmp_path / "hangs" / "moedoctor" / "__main__.py").write_text(_KINDS["other"])
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    code, document, err = _fleet(tmp_path, cluster.address, "check", "--resume", str(folder))
    assert (code, _statuses(document)) == (1, {"answered": 2, "other version": 1})
    assert "asking 1 of 3 nodes" in err
    assert sum(file.stat().st_mtime_ns != changed for file, changed in before.items()) == 1


def test_a_busy_node_is_left_alone(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    import ray

    made = add("right", num_gpus=2)
    ray.init(cluster.address, log_to_driver=False)
    try:
        holder = ray.remote(num_cpus=0, num_gpus=1)(_Holder).remote()
        ray.get(holder.ready.remote())
        _, document, _ = _fleet(tmp_path, cluster.address, "check", "--idle-only", "--wait", "15")
        assert _statuses(document) == {"answered": 1, "busy": 1}
        (reason,) = {node["reason"] for node in document["nodes"]} - {None}
        assert reason.startswith("waited 15 s for 2 GPUs and 1 CPU; free in the cluster: 1 of 2 GPUs, ")
    finally:
        ray.shutdown()
    # Both GPUs of the node are asked after other calls. They are Ray's numbers only: both compute on the CPU.
    options = ("--show-hosts", "--nodes", made.node_id)
    code, document, err = _fleet(tmp_path, cluster.address, "run", "parity", *options)
    assert code == 0, err
    assert _statuses(document) == {"answered": 2}
    assert [node["name"].partition(" ")[2] for node in document["nodes"]] == ["GPU 0", "GPU 1"]
    assert list(document["bits"]["compared"].values()) == [2]


class _Holder:
    def ready(self) -> bool:
        return True


def test_a_dead_head_costs_no_report(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    """Ray ends a driver that has no head for 60 s, without a word of ours."""
    add("right")
    add("hangs")
    process = _start(tmp_path, cluster.address, "check", "--node-timeout", "100")
    _wait_for_stored(tmp_path, 2)
    cluster.global_state.disconnect()  # it would end this process, as it ends a driver
    cluster.head_node.kill_gcs_server()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    document = json.loads(out)
    assert _statuses(document) == {"answered": 2, "died": 1}
    (reason,) = {node["reason"] for node in document["nodes"]} - {None}
    assert reason == "the head of the Ray cluster died before this node answered"


def test_an_address_that_does_not_answer(tmp_path: Path) -> None:
    addresses = ("127.0.0.1:1", "auto", "nonsense", "ray://127.0.0.1:1")
    for address, process in [(address, _start(tmp_path, address, "check")) for address in addresses]:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert len(err.splitlines()) == 1, err
        assert f"--address {address}" in err


def test_a_port_that_is_not_of_ray_is_one_line_within_seconds(tmp_path: Path) -> None:
    """It hangs up, says nothing, or speaks HTTP/2 as Ray does."""
    taken: list[socket.socket] = []

    def serve(server: socket.socket, words: bytes | None) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                taken.append(connection)
                if words is None:
                    connection.close()
                elif words:
                    connection.sendall(words)

    with contextlib.ExitStack() as open_servers:
        started, processes = time.monotonic(), {}
        for words in (None, b"", b"\0\0\0\4" + b"\0" * 5):
            server = open_servers.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=serve, args=(server, words), daemon=True).start()
            address = f"127.0.0.1:{server.getsockname()[1]}"
            processes[address] = _start(tmp_path, address, "check")
        for address, process in processes.items():
            _, err = process.communicate(timeout=60)
            assert process.returncode == 2
            assert err.startswith(f"moedoctor: --address {address}: ")
            assert len(err.splitlines()) == 1, err
        assert time.monotonic() - started < 20


def test_ray_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')")
    command = [sys.executable, "-m", "moedoctor", "fleet", "check"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{_ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "moedoctor: Ray is not installed; run `pip install 'ray>=2.40'` beside moedoctor\n"


def test_a_local_ray_is_one_node(tmp_path: Path) -> None:
    code, document, err = _fleet(tmp_path, "local", "check", "--release", "0.19.1", "--sm", "12.0")
    assert (code, _statuses(document)) == (1, {"answered": 1}), err


def _wait_for_stored(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.rglob("node-*.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _processes(word: str) -> dict[int, str]:
    """Return number -> command of the processes whose variables or command hold the word."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if word.encode() in command + (folder / "environ").read_bytes():
                found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found
