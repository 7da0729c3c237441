"""Runs on a node, in a Ray task: moedoctor as a child process, and checksums of kernels beside it.

Ray sends this module by value, also to nodes that have no moedoctor or another version of it. So it imports
only the standard library and nothing of moedoctor.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

MOST_BYTES = 16 << 20
"""The longest report that a node sends."""
_LOG_BYTES = 4096
_LINE_BYTES = 300
_POLL_SECONDS = 0.05
_WORDS_SECONDS = 1.0
"""The seconds after which a node says again what its command wrote last."""
_CHECKSUM_SECONDS = 2.0
"""The time that checksums may take longer than the command itself."""
_CHUNK = 1 << 22
_MOST_FILES = 4000
_OF_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray changes for its tasks; the command gets what the node itself has."""
_KERNELS = {"vllm": "*.so", "flashinfer_cubin": "**/*.cubin", "flashinfer_jit_cache": "**/*.so"}
"""Package -> the files with its kernels."""
_LISTED = 24
"""A package with more files has one checksum over all of them."""
_LAUNCH = """
import os, runpy, sys
parent, module, *arguments = sys.argv[1:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG: a Ray worker that is killed takes this along
    if os.getppid() != int(parent):
        sys.exit(1)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs a module. It is Python of its own and no `preexec_fn`, which may block for ever between the threads of
a Ray worker."""


def answer(request: Mapping[str, Any], wheel: bytes | None = None) -> Iterator[str]:
    """Run the command of `request` once, or once a GPU, and give JSON texts.

    They say that it started, what the command wrote last (``doing``) if that changed, and each answer.

    `request` has ``module`` and ``arguments`` of the command, ``seconds``, ``gpus`` (how many Ray counts; 0
    for one answer of the whole node), ``reserved`` (whether Ray gave it the GPUs) and ``checksums``.
    The `wheel` of moedoctor is unpacked to a folder that is removed at the end.
    """
    folder = tempfile.mkdtemp(prefix="moedoctor-")
    children: list[_Child] = []
    try:
        environ = _restore_environment(request["reserved"])
        if wheel is not None:
            zipfile.ZipFile(io.BytesIO(wheel)).extractall(os.path.join(folder, "wheel"))
            paths = os.path.join(folder, "wheel"), environ["PYTHONPATH"]
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        age = _measure_age()
        started = {"host": platform.node(), "python": platform.python_version(), "worker_seconds": age}
        if wheel is None and _find_package("moedoctor") is None:
            yield json.dumps({**started, "missing": True})
            return
        yield json.dumps(started)
        for gpu in _choose_gpus(environ, request["gpus"]):
            children.append(_Child(request, environ, gpu, tempfile.mkdtemp(dir=folder)))
        sums = _Checksums() if request["checksums"] else None  # a thread: after the forks
        waiting, doing, next_words = list(children), "", 0.0
        while waiting:
            time.sleep(_POLL_SECONDS)
            if (now := time.monotonic()) > next_words:
                next_words = now + _WORDS_SECONDS
                if (words := "; ".join(dict.fromkeys(child.last_line() for child in waiting))) != doing:
                    doing = words
                    yield json.dumps({"doing": doing})
            for child in [child for child in waiting if child.is_over()]:
                waiting.remove(child)
                found = {} if sums is None else {"checksums": sums.finish()}
                yield json.dumps({**child.make_answer(), **found})
    finally:
        for child in children:
            child.end()
        shutil.rmtree(folder, ignore_errors=True)


def _measure_age() -> float | None:
    """Return how long ago this process was started, or None on a system without /proc."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


def _find_package(name: str) -> Any:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name)
    return None


def _restore_environment(reserved: bool) -> dict[str, str]:
    """Return this process's variables, with the node's own values of those that Ray changes."""
    environ = dict(os.environ)
    own: dict[str, str] = {}
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/environ", "rb") as file:
        entries = file.read().decode("utf-8", "replace").split("\0")
        own = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    for name in _OF_RAY:
        if reserved and name == "CUDA_VISIBLE_DEVICES":
            continue
        environ.pop(name, None)
        if name in own:
            environ[name] = own[name]
    # The child works in its own folder, so what is relative must be absolute.
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    return environ


def _choose_gpus(environ: Mapping[str, str], count: int) -> Sequence[str | None]:
    """Return a value of CUDA_VISIBLE_DEVICES for each answer; None leaves it as it is."""
    if not count:
        return (None,)
    visible = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [entry for entry in visible if entry][:count] or [str(index) for index in range(count)]


class _Child:
    """One run of the command. It ends at its time limit, if it writes too much, or with this process."""

    def __init__(
        self, request: Mapping[str, Any], environ: Mapping[str, str], gpu: str | None, folder: str
    ) -> None:
        self.gpu = gpu
        self.started = time.monotonic()
        self._deadline = self.started + request["seconds"]
        self._problem = ""
        self._ended = 0.0
        self._files = tuple(open(os.path.join(folder, name), "w+b") for name in ("report", "log"))  # noqa: SIM115
        variables = dict(environ) if gpu is None else {**environ, "CUDA_VISIBLE_DEVICES": gpu}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), request["module"], *request["arguments"]],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            cwd=folder,
            env={**variables, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )

    def is_over(self) -> bool:
        """Return whether it ended, or end it if it is over one of its limits."""
        if self._process.poll() is None:
            sizes = [os.fstat(file.fileno()).st_size for file in self._files]
            if max(sizes) > MOST_BYTES:
                self._problem = "long"
            elif time.monotonic() > self._deadline:
                self._problem = "late"
            else:
                return False
            self.end()
        self._ended = self._ended or time.monotonic()
        return True

    def last_line(self) -> str:
        """Return the last line that it wrote to stderr, or an empty text."""
        lines = _read_end(self._files[1], _LINE_BYTES).split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def make_answer(self) -> dict[str, Any]:
        """Return what it wrote, at most `MOST_BYTES`, and how it ended."""
        report, log = map(_read_end, self._files, (MOST_BYTES, _LOG_BYTES))
        return {
            "gpu": self.gpu,
            "problem": self._problem,
            "code": self._process.returncode,
            "report": "" if self._problem else report,
            "log": log,
            "seconds": self._ended - self.started,
        }

    def end(self) -> None:
        """End it with everything that it started. moedoctor's guardians end what is in another session."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _read_end(file: IO[bytes], last: int) -> str:
    """Return the end of a file that a child may still write to: its place in the file is not moved."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), last, max(0, size - last)).decode("utf-8", "replace")


class _Checksums:
    """SHA-256 of the files with kernels, read while the command runs."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, str]:
        """Return name -> checksum, or why there is none."""
        self._thread.join(_CHECKSUM_SECONDS)
        self._stop.set()
        self._thread.join()
        return dict(self._found)

    def _read(self) -> None:
        for name, root, files in self._list_places():
            sums = {}
            for file in files:
                sums[os.path.relpath(file, root)] = value = self._sum(file)
                if value == "not read in time":
                    break
            if len(files) <= _LISTED:
                self._found.update({f"{name} {file}": value for file, value in sums.items()})
                continue
            late = "not read in time" in sums.values()
            whole = hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:16]
            self._found[f"{name} ({len(files)} files)"] = "not read in time" if late else whole

    def _list_places(self) -> Iterator[tuple[str, str, list[str]]]:
        """Give (name, folder, files): packages with kernels, and FlashInfer's compiled and loaded ones."""
        for package, pattern in _KERNELS.items():
            spec = _find_package(package)
            for folder in spec.submodule_search_locations or () if spec else ():
                yield package, folder, _list_files(folder, pattern)
        base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or os.path.expanduser("~")
        folder = os.path.join(base, ".cache", "flashinfer")
        yield "JIT cache", folder, _list_files(folder, "**/*.so")
        loaded = os.environ.get("FLASHINFER_CUBIN_DIR") or os.path.join(folder, "cubins")
        yield "cubin cache", loaded, _list_files(loaded, "**/*.cubin")

    def _sum(self, file: str) -> str:
        digest = hashlib.sha256()
        try:
            with open(file, "rb") as stream:
                while chunk := stream.read(_CHUNK):
                    if self._stop.is_set():
                        return "not read in time"
                    digest.update(chunk)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return digest.hexdigest()[:16]


def _list_files(folder: str, pattern: str) -> list[str]:
    found = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(file for file in found if os.path.isfile(file))[:_MOST_FILES]
