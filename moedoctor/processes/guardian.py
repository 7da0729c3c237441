"""Nothing that moedoctor starts outlives it, or outlives its own time.

``python -m moedoctor.processes.guardian VARIABLES MODULE ARGUMENT ...`` forks at once. The child runs the
module. The parent stays as its guardian, a process of a few megabytes. When the child ends, or when the
process that started both does (its end closes our stdin, even if it is killed), the guardian ends everything
below it and removes the folder in which the child worked.

On Linux the guardian inherits orphans (it is a "child subreaper"), so a process that left its group or
session is found too. Elsewhere only the child's own process group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection

NO_FOLDER = 71
"""Exit status of a guardian that cannot make the child's folder."""

_PREFIX = "moedoctor-"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 5.0
"""A process that the kernel cannot end, as one that waits for a disk, is left after that."""


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends. Linux only."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """End this process when its parent ends, which has the id `parent`. Linux only."""
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it ended before the call


def end_tree(pid: int) -> None:
    """Kill a process, everything below it, and its group, if it leads one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in (*_list_below(pid), pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def end_children(spare: Collection[int] = ()) -> None:
    """Kill and reap everything below this process, except the children in `spare` and what is below them."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        children = [pid for pid in _list_children().get(os.getpid(), ()) if pid not in spare]
        if not children:
            return
        for pid in children:
            end_tree(pid)
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)  # it is ending


def keep(child: int, folder: str) -> None:
    """Wait for the end of `child`, or of the process that holds our stdin; end all others; end likewise."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    _close_others({0, wake, woken})
    status = None
    with contextlib.suppress(ChildProcessError):
        while status is None:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                status = ended
            elif pid == 0:
                ready, _, _ = select.select([0, wake], [], [])
                if wake in ready:
                    os.read(wake, 4096)
                if 0 in ready and not os.read(0, 4096):
                    break
    if status is None:
        end_tree(child)
    end_children()
    parent, prefix = os.path.split(folder)
    with contextlib.suppress(OSError):  # the child removed the parent too
        for name in os.listdir(parent):
            if name == prefix or name.startswith(f"{prefix}-"):  # the fork server makes one for each case
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    _end_like(status)


def main() -> None:
    """Guard the module that is named on the command line, and run it as ``__main__``.

    The first argument lists variables, with commas, that shall name the child's own folder for caches.
    """
    variables, module, *arguments = sys.argv[1:]
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
    except OSError as error:
        print(f"no usable temporary folder: {error.strerror or error}", file=sys.stderr)
        sys.exit(NO_FOLDER)
    guardian = os.getpid()
    adopt_orphans()
    child = os.fork()
    if child:
        keep(child, folder)
    end_with(guardian)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.path[:] = [path for path in sys.path if path != os.getcwd()]  # put there by `python -m`
    work_in(folder)
    caches = os.path.join(folder, "cache")
    os.mkdir(caches)
    os.environ.update(dict.fromkeys(filter(None, variables.split(",")), caches))
    sys.argv = [module, *arguments]
    import runpy

    runpy.run_module(module, run_name="__main__", alter_sys=True)


def make_temporary_folder() -> contextlib.AbstractContextManager[str]:
    """Give a folder that is gone afterwards, also if this process is killed."""
    return tempfile.TemporaryDirectory(dir=_own_folder(), ignore_cleanup_errors=True)


@functools.cache
def _own_folder() -> str:
    """Return a folder that a process of its own removes when this one ends, however it does."""
    if os.path.basename(tempfile.gettempdir()).startswith(_PREFIX):
        return tempfile.gettempdir()  # a guardian removes it
    import atexit
    import subprocess

    folder = tempfile.mkdtemp(prefix=_PREFIX)
    remove = "import shutil, sys; sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1], True)"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", remove, folder],
        stdin=subprocess.PIPE,  # closed when this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(process.communicate)
    return folder


def work_in(folder: str) -> None:
    """Make `folder` the working directory and the place of temporary files; caches stay where they were."""
    with contextlib.suppress(Exception):  # the user has no name
        import getpass

        # torch's own default, which lies in the folder for temporary files
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.chdir(folder)


def _end_like(status: int | None) -> None:
    if status is not None and os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has written its own
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status))


def _close_others(used: Collection[int]) -> None:
    """Close what this process inherited: a pipe that it holds open would look as if its writer lived."""
    listed = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(listed):
        if int(name) not in used:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _list_children() -> dict[int, list[int]]:
    """Return parent -> its children, for every process that this one may see; empty without /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    return children


def _list_below(pid: int) -> list[int]:
    children, found = _list_children(), [pid]
    for process in found:
        found += children.get(process, ())
    return found[1:]


if __name__ == "__main__":
    main()
