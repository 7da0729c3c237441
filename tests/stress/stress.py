"""Hostile input and injected faults against the real command line; prints tried and failed for each class.

``python tests/stress/stress.py -o reports/stress.md`` is `make stress`. `test_stress.py` runs a short form. A
trial fails if moedoctor shows a traceback, ends with a code that it must not have, takes
too long, prints what a terminal may act on, lets a planted secret through, or leaves a process or folder.
Damaged scenarios and checkpoints, children that die and pipes for files have tests in `make test`.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
if __name__ in ("__main__", "__mp_main__"):  # pytest has set its own path
    sys.path[:0] = [str(ROOT), str(TESTS)]

from hostile import (  # noqa: E402
    OF_KEYS,
    OF_NAMES,
    echoes_too_much,
)
from hostile import TEXTS as HOSTILE  # noqa: E402
from hostile import problem as acted_on  # noqa: E402

MOST_SECONDS = 10.0
FORMATS = ("table", "json", "markdown")


@dataclass
class Tally:
    """The trials of one class."""

    tried: int = 0
    seconds: float = 0.0
    codes: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def record(self, code: int, problem: str | None, what: str) -> None:
        """Count one trial."""
        self.tried += 1
        self.codes[code] += 1
        if problem is not None:
            self.failures.append(f"{what}: {problem}"[:400])


def call(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str, float]:
    """Run the command line in this process; return its code, stdout, stderr and seconds."""
    from moedoctor.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", newline="") for _ in range(2))
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    started = time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    finally:
        sys.stdin = before
    took = time.monotonic() - started
    out.flush()
    err.flush()
    printed = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))  # type: ignore[attr-defined]
    return code, *printed, took


def problem(
    code: int, out: str, err: str, took: float, codes: tuple[int, ...] = (0, 1, 2), skipped: str = ""
) -> str | None:
    """Return what is wrong with the end of a command, or None. The stream `skipped` may hold commands."""
    if "Traceback" in err:
        return "traceback: " + err.strip().splitlines()[-1]
    if code not in codes:
        return f"exit code {code}: {err[-200:]!r}"
    for name, text in (("stdout", out), ("stderr", err)):
        if name != skipped and (wrong := acted_on(text)):
            return f"{name} holds {wrong}"
    if code == 2 and len(err) > 1500:
        return f"an error of {len(err)} characters: {err[:80]!r}"
    if took > MOST_SECONDS:
        return f"took {took:.1f} s"
    return None


def tell(tally: Tally, what: str, *arguments: str, **options: Any) -> None:
    """Run one command and count it; an exception that leaves `main` is a failure."""
    codes = options.pop("codes", (0, 1, 2))
    # The format `github` is made of commands; tests/reporters/test_github.py reads them.
    skipped = "stdout" if "github" in arguments else ""
    try:
        ended = call(*arguments, **options)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tally.record(-1, f"{type(error).__name__}: {error}", what)
        return
    wrong = problem(*ended, codes, skipped)
    if wrong is None and any(echoes_too_much(ended[2], argument) for argument in arguments):
        wrong = f"echoes more than 200 characters of an argument: {ended[2][:100]!r}"
    tally.record(ended[0], wrong, what)


def mutated(pick: random.Random, data: bytes) -> bytes:
    """Return `data` with one to four damages."""
    changed = bytearray(data)
    for _ in range(pick.randint(1, 4)):
        at = pick.randrange(len(changed) + 1)
        kind = pick.randrange(6)
        if kind == 0 and changed:
            changed[at % len(changed)] = pick.randrange(256)
        elif kind == 1:
            del changed[at : at + pick.choice((1, 4, 40, 400))]
        elif kind == 2:
            changed[at:at] = pick.choice(HOSTILE).encode("utf-8", "surrogatepass")
        elif kind == 3:
            part = changed[at : at + pick.choice((8, 80, 800))]
            changed[at:at] = part * pick.choice((1, 2, 50))
        elif kind == 4:
            changed[at:] = b""
        else:
            numbers = list(re.finditer(rb"\d+", bytes(changed)))
            if numbers:
                match = pick.choice(numbers)
                new = pick.choice(
                    (b"-1", b"0", b"1e999", b"9" * 400, b"18446744073709551616", b"NaN", b"1.5")
                )
                changed[match.start() : match.end()] = new
    return bytes(changed)


def mutated_json(pick: random.Random, data: Any) -> Any:
    """Return JSON data with one value replaced, removed or renamed, anywhere in it."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, item in items:
            places.append((value, key))
            walk(item)

    data = json.loads(json.dumps(data))
    walk(data)
    for _ in range(pick.randint(1, 3)):
        holder, key = pick.choice(places)
        with contextlib.suppress(KeyError, IndexError):  # removed by the damage before
            if pick.random() < 0.2:
                del holder[key]
            elif pick.random() < 0.2 and isinstance(holder, dict):
                holder[pick.choice(HOSTILE)] = holder.pop(key)
            else:
                others = (None, True, -1, 10**30, 1.5, [], {}, [[[]]], {"a": None})
                holder[key] = pick.choice((*HOSTILE, *others))
    return data


def reports(pick: random.Random, folder: Path, tally: Tally) -> Iterator[None]:
    """Damaged stored reports through `show`, `compare` and `triage`."""
    files = [file for file in (ROOT / "reports").rglob("*.json") if file.stat().st_size < 400_000]
    stored = {file: json.loads(file.read_text()) for file in sorted(files)}
    path = folder / "report.json"
    while True:
        file = pick.choice(list(stored))
        if pick.random() < 0.7:
            path.write_text(json.dumps(mutated_json(pick, stored[file])))
        else:
            path.write_bytes(mutated(pick, file.read_bytes()))
        command = pick.choice(("show", "show", "compare", "triage"))
        more = [str(file)] if command == "compare" else []
        format = pick.choice((*FORMATS, "github", "junit") if command == "show" else FORMATS)
        tell(tally, f"{command} {file.name} -f {format}", command, str(path), *more, "-f", format)
        yield


def binaries(pick: random.Random, folder: Path, tally: Tally) -> Iterator[None]:
    """Damaged cubins, fat binaries, archives, build files and logs through `audit` and `triage`.

    Some are below a folder, beside what is not a file, and some are runs of a text of up to 1 MB.
    """
    import zipfile

    from cuda_fakes import fake_cubin

    wheel = folder / "whole.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_C.so", fake_cubin(90) + fake_cubin(120))
        archive.writestr("vllm/__init__.py", "")
    flags = b"-gencode=arch=compute_120f,code=sm_120f "
    whole = {
        "binary.cubin": fake_cubin(120),
        "binary.so": fake_cubin(90) * 3,
        "binary.whl": wheel.read_bytes(),
        "build.ninja": flags * 4,
        "binary.ptx": b".version 9.0\n.target sm_120f\n",
    }
    below = folder / "folder" / "sub"
    below.mkdir(parents=True)
    for suffix in (".cubin", ".so", ".whl"):
        os.mkfifo(below / f"pipe{suffix}")
        (below / f"link{suffix}").symlink_to(f"pipe{suffix}")
        (below / f"loop{suffix}").symlink_to(f"loop{suffix}")
        (below / f"folder{suffix}").mkdir()
    while True:
        suffix = pick.choice(list(whole))
        path = pick.choice((folder, below)) / suffix
        data = mutated(pick, whole[suffix])
        if pick.random() < 0.1:
            piece = data[: pick.choice((5, 22, 40, 60))] or b"-"
            data = piece * (pick.choice((10_000, 1_000_000)) // len(piece))
        path.write_bytes(data)
        named = str(path.parent if path.parent == below else path)
        command = pick.choice((["audit", named], ["audit", named], ["triage", str(path)]))
        tell(tally, f"{command[0]} {suffix}", *command, "-f", pick.choice(FORMATS))
        yield


ARGUMENTS = (
    "{}", "--{}", "run {} --device cuda:99", "run MD001 --device cuda:99 --only {}",
    "run MD001 --device cuda:99 --only tokens={}", "run MD001 --device cuda:99 --subject {}",
    "run MD001 --device {}x", "run MD001 --device cuda:99 --timeout {}",
    "run MD001 --device cuda:99 -j {}", "run MD001 --device cuda:99 --tolerance {}",
    "run MD001 --device cuda:99 --tolerance x={}", "run MD001 --device cuda:99 --baseline {}",
    "run MD001 --device cuda:99 --vllm-kernels {}",
    "run MD001 --device cuda:99 --vllm-kernels 0.19.1={}",
    "run MD001 --device cuda:99 --flashinfer 0.6.13={}", "run MD001 --device cuda:99 -f {}",
    "run MD001 --device cuda:99 -o /no/such/{}", "explain {}", "lint {}", "lint {} --fix {}", "audit {}",
    "audit {} --sm {}", "audit NAMED --sm {}", "plan --model {}",
    "plan --model qwen3-30b-a3b --gpu-memory {}", "plan --model qwen3-30b-a3b --scheme {}",
    "plan --model qwen3-30b-a3b --backend {} --gpu-memory 80",
    "plan --model qwen3-30b-a3b --expert-cache {}", "backends --no-ask --release {}",
    "backends --no-ask --sm {}", "backends --no-ask --sm 9.0 --backend {}",
    "backends --no-ask --sm 9.0 --activation {}", "backends --no-ask --sm 9.0 -- vllm serve {}",
    "backends --no-ask --sm 9.0 -- vllm serve x --moe-backend {}",
    "backends --no-ask --sm 9.0 -- VLLM_X={} vllm serve x", "bench --cache --trace {}",
    "bench --cache --trace zipf:rows=16,{}", "bench --cache --trace zipf:rows={}",
    "bench --cache --trace zipf:rows=16 --capacity {}", "bench --cache --trace zipf:rows=16 --policy {}",
    "bench --cache --trace zipf:rows=16 --scope {}", "bench --device cuda:99 --backend {}",
    "bench --device cuda:99 --backend OURS --model {}",
    "bench --device cuda:99 --backend OURS --routing {}",
    "bench --device cuda:99 --backend OURS --routing zipf:{}",
    "bench --device cuda:99 --backend OURS --trace {}",
    "bench --device cuda:99 --backend OURS --tokens {}", "show {}", "compare {} {}", "triage {}",
    "triage NAMED", "lint NAMED", "audit NAMED", "show NAMED", "run NAMED --device cuda:99",
    "plan --model NAMED", "VARIABLES",
)  # fmt: skip
"""Command lines; {} is a hostile text, NAMED a file or folder of that name, VARIABLES a setting."""


def arguments(pick: random.Random, folder: Path, tally: Tally) -> Iterator[None]:
    """Hostile arguments, names of files and folders, and settings, in every command."""
    import checkpoints_of_tests as made

    checkpoint, before = made.modelopt().write(folder / "whole"), Path.cwd()
    os.chdir(folder)  # an empty argument names the working directory
    try:
        while True:
            _hostile_command(pick, folder, checkpoint, tally)
            yield
    finally:
        os.chdir(before)


def _hostile_command(pick: random.Random, folder: Path, checkpoint: Path, tally: Tally) -> None:
    import shutil

    text, line, format = pick.choice(HOSTILE), pick.choice(ARGUMENTS), pick.choice(FORMATS)
    printable = text.replace("\0", "").encode("utf-8", "replace").decode()
    named, settings = folder / "named" / (printable.replace("/", "_")[:60] or "x"), {}
    given = [part.replace("{}", text).replace("NAMED", str(named)) for part in line.split(" ")]
    if line == "VARIABLES":
        settings = {
            pick.choice(("VLLM_MOE_X", "VLLM_USE_FLASHINFER_MOE_FP4", "TORCH_CUDA_ARCH_LIST")): printable
        }
        given = pick.choice((["check"], ["backends", "--no-ask", "--sm", "9.0"]))
    if "-f" not in given and not line.startswith(("{}", "--{}")) and pick.random() < 0.7:
        given[1:1] = ["-f", format]
    if "NAMED" in line:
        named.parent.mkdir()
        if line.startswith(("lint", "plan")):
            shutil.copytree(checkpoint, named)
        else:
            named.write_text("RuntimeError: b_scales is not on GPU\n")
    with mock.patch.dict(os.environ, settings):
        tell(tally, f"{line} {text[:30]!r} -f {format}", *given)
    shutil.rmtree(folder / "named", ignore_errors=True)


def secrets(pick: random.Random, folder: Path, tally: Tally) -> Iterator[None]:
    """Secrets in logs for `triage` and in what children raise, in every format; none may be shown."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

    def some(length: int, letters: str = letters) -> str:
        return "".join(pick.choice(letters) for _ in range(length))

    def planted() -> tuple[str, str]:
        """Return a text and the part of it that nobody may read."""
        number = ".".join(str(pick.randint(11, 250)) for _ in range(4))
        word, key = f"zq{some(10, letters[:26])}", f"aZ9{some(33)}"
        form, secret = pick.choice(
            (
                *((form, word) for form in OF_NAMES),
                *((form, key) for form in OF_KEYS),
                *((form, number) for form in ("tcp://{}:8000", "peer {} left")),
                ("AKIA{}", some(16, letters[26:])),
                (f"fe80::{some(4, '0123456789abcdef')}:{{}}:5678", "12ff:fe34"),
                ("{}:12:" + some(2, "0123456789abcdef"), "de:ad:be:ef"),
            )
        )
        return form.format(secret), secret

    lines = (
        "RuntimeError: b_scales is not on GPU; {}",
        "(EngineCore pid=12) ERROR 11-22 12:00:00 [core.py:866] {} torch.AcceleratorError: CUDA error: {}",
        "INFO 11-22 [api_server.py:1] vLLM API server version 0.33.0 {}",
    )
    log = folder / "server.log"
    while True:
        text, secret = planted()
        log.write_text("\n".join(line.replace("{}", text) for line in lines))
        format = pick.choice(FORMATS)
        code, out, err, took = call("triage", str(log), "-f", format)
        shown = f"shows {secret!r} of {text!r}" if secret in out + err else problem(code, out, err, took)
        tally.record(code, shown, f"triage -f {format}")
        code, shown = _crash_report(text, secret, pick.choice((*FORMATS, "github", "junit")))
        tally.record(code, shown, "a child's exception")
        yield


def _crash_report(text: str, secret: str, format: str) -> tuple[int, str | None]:
    """Return what a report of a child that raised `text` shows of `secret`, if it shows it."""
    from report_samples import case, report, scenario

    from moedoctor import catalogue
    from moedoctor.processes import deaths

    tail = deaths.last_lines(f"first\n{text}\n")
    crash = replace(deaths.from_exception(RuntimeError(text)), stderr_tail=tail)
    died = case("faulty", "error", evidence=crash.to_evidence(), reason=crash.message)
    whole = report(scenario("error", died, reason=crash.message))
    shown = catalogue.load_reporters()[format].render(whole, colour=False, width=None)
    return 3, f"-f {format} shows {secret!r} of {text!r}" if secret in shown else None


RUN_SCENARIO = """\
id: MD901
title: children that hang
subjects: [faulty, fixed]
matrix:
  - {faulty: [answers, exception, hang, answers_with_session, hangs_with_session, signal]}
timeout: 30
expect: {fixed: clean}
"""


def signals(pick: random.Random, folder: Path, tally: Tally) -> Iterator[None]:
    """A run that gets one to three signals at random moments; nothing of it may be left after 2 s."""
    (folder / "torch.py").write_text("float16 = None\n")  # the real one takes seconds to import
    scenario = folder / "dying.yaml"
    scenario.write_text(RUN_SCENARIO)
    temporary = folder / "tmp"
    temporary.mkdir()
    search = os.pathsep.join([str(folder), str(TESTS / "dying_plugin"), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": search, "TMPDIR": str(temporary)}
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
    while True:
        number = pick.choice((*codes, signal.SIGQUIT, signal.SIGUSR1, signal.SIGKILL))
        delay, times = pick.uniform(0.06, 2.5), pick.choice((1, 1, 2, 3))
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "moedoctor", "run", str(scenario), "-f", "json"],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environ, start_new_session=True,
                preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in codes],  # type: ignore[arg-type, return-value]
            )  # fmt: skip
            time.sleep(delay)
            for _ in range(times):
                process.send_signal(number)
                time.sleep(pick.uniform(0, 0.05))
            try:
                code = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        printed = (folder / "err").read_text(errors="replace")
        wrong = None
        if code == -number and not printed and number in codes:
            pass  # it came before Python ran anything of ours
        elif code not in (codes.get(number, -number), 0, 1, 3):
            wrong = f"exit code {code}: {printed[-200:]!r}"
        elif "Traceback" in printed and "site.py" not in printed:
            wrong = f"traceback: {printed[-200:]!r}"
        deadline = time.monotonic() + 2
        while (left := [*_mine(str(temporary)), *temporary.iterdir()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            wrong = f"left after 2 s: {left[:3]}"
        tally.record(code, wrong, f"{times} x {number.name} after {delay:.2f} s")
        yield


def _mine(mark: str) -> list[str]:
    """Return the commands of the processes with `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def _device(folder: Path, name: str, minor: int, kind: int = stat.S_IFCHR) -> Path:
    """Return a device that is ours to lose; without the right to make one, /dev is safe from us anyway."""
    path = folder / name
    try:
        os.mknod(path, kind | 0o666, os.makedev(1, minor))
    except PermissionError:
        return Path("/dev") / name
    return path


def _damaged_checkpoint(folder: Path) -> Path:
    """Return a checkpoint with an error that `lint --fix` corrects."""
    import checkpoints_of_tests as made

    checkpoint = made.modelopt()
    for name in [name for name in checkpoint.tensors if name.endswith(("k_scale", "v_scale"))]:
        del checkpoint.tensors[name]
    return checkpoint.write(folder)


def environments(pick: random.Random, folder: Path, tally: Tally) -> Iterator[None]:
    """Odd places to run in and to write to, each with a subprocess of its own."""
    log = folder / "server.log"
    log.write_text("RuntimeError: b_scales is not on GPU é中🙂\n")
    fifo, gone, loop = folder / "fifo", folder / "gone", folder / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    link, target = folder / "link", folder / "target.md"
    target.write_text("old")
    link.symlink_to(target)
    null, full = _device(folder, "null", 3), _device(folder, "full", 7)
    disk = _device(folder, "ram0", 0, stat.S_IFBLK)
    me = f"{sys.executable} -m moedoctor"
    places = {"device": null, "full device": full, "disk": disk, "fifo": fifo, "symlink loop": loop}
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(folder / "socket"))  # a name of at most 107 bytes
    places |= {
        "socket": folder / "socket",
        "long name": folder / ("n" * 300),
        "pseudo folder": Path("/proc/x"),
    }
    ascii, latin, json_tool = (
        "PYTHONIOENCODING=ascii",
        "PYTHONIOENCODING=latin-1",
        f"{sys.executable} -m json.tool",
    )
    reports = ROOT / "reports" / "nvidia-h200"
    stored, bench = reports / "offload_bytes.json", reports / "moe_backends.json"
    checkpoint = _damaged_checkpoint(folder / "checkpoint")
    scenario = folder / "dying.yaml"
    scenario.write_text(
        "id: MD901\nname: dying\ntitle: t\ntiers: [model]\nparameters: {symptom_fixed: true}\n"
    )
    run = f"PYTHONPATH={os.pathsep.join([str(TESTS / 'dying_plugin'), str(ROOT)])} {me} run {scenario}"
    commands: dict[str, tuple[str, tuple[int, ...]]] = {
        "ascii stdout": (f"PYTHONIOENCODING=ascii {me} triage {log}", (0, 1)),
        "latin-1 locale": (f"LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=latin-1 {me} explain MD003", (0,)),
        "stdout full": (f"{me} list > /dev/full", (3,)),
        "stdout closed": (f"{me} list >&-", (3,)),
        "stderr closed": (f"{me} triage {log} 2>&-", (0, 1)),
        "both closed": (f"{me} list >&- 2>&-", (3,)),
        "stdin closed": (f"{me} triage - <&-", (2,)),
        "reader goes away": (f"{me} explain MD001 | head -1; exit ${{PIPESTATUS[0]}}", (0,)),
        "reader of a finding goes away": (f"{run} | true; exit ${{PIPESTATUS[0]}}", (1,)),
        "stderr full": (f"{me} triage {log} 2>/dev/full", (0, 1)),
        "error, stderr closed": (f"{me} frob 2>&-", (2,)),
        "error, stderr full": (f"{me} frob 2>/dev/full", (2,)),
        "help, stdout closed": (f"{me} --help >&-", (3,)),
        "help, stdout full": (f"{me} run --help >/dev/full", (3,)),
        "version, stdout full": (f"{me} --version >/dev/full", (3,)),
        "ascii help": (f"{ascii} {me} bench --help", (0,)),
        "ascii list": (f"{ascii} {me} list | LC_ALL=C grep -P '[^ -~]'", (1,)),
        "ascii explain": (f"{ascii} {me} explain MD003 -f markdown", (0,)),
        "ascii error": (f"{ascii} {me} explain é中🙂", (2,)),
        "latin-1 error": (f"{latin} {me} show é中🙂", (2,)),
        "ascii json": (f"set -o pipefail; {ascii} {me} show {stored} -f json | {json_tool} >/dev/null", (0,)),
        "ascii progress bar": (f"{ascii} TERM=xterm script -qec '{run}' /dev/null </dev/null", (1,)),
        **{
            f"{command.split()[0]} to {name}": (f"timeout 20 {me} {command} {place}", (2,))
            for name, place in places.items()
            for command in (
                f"triage {log} -o", f"lint {checkpoint} --fix", "bench --backend REFERENCE --plot"
            )
        },
        **{
            f"step summary to {name}": (f"GITHUB_STEP_SUMMARY={place} {run} -f github", (3,))
            for name, place in list(places.items())[:5]
        },
        "step summary in no folder": (
            f"GITHUB_STEP_SUMMARY=/no/x {run} -f github | grep ^::error; exit ${{PIPESTATUS[0]}}", (3,)
        ),
        "--fix dangling": (f"ln -s none to_fix; {me} lint {checkpoint} --fix to_fix", (2,)),
        "-o folder": (f"{me} triage {log} -o {folder}", (2,)),
        "-o dangling symlink": (
            f"ln -s to.md to; {me} triage {log} -o to && test -L to -a -s to.md", (0,)
        ),
        "-o /dev/stdout": (f"{me} show {stored} -f json -o /dev/stdout | {json_tool} >/dev/null", (0,)),
        "-o /dev/fd": (f"{me} show {stored} -f json -o /dev/fd/9 9>&1 >&2 | {json_tool} >/dev/null", (0,)),
        "-o closed /dev/fd": (f"{me} triage {log} -o /dev/fd/9 9>&-", (2,)),
        "-o /dev/fd, reader goes away": (f"{me} triage {log} -o >(true)", (0, 1)),
        "-o full /dev/fd": (
            f"{me} show {stored} -f json -o /dev/fd/9 9>/dev/full | {json_tool} >/dev/null; "
            'test "${PIPESTATUS[*]}" = "3 0"', (0,)
        ),
        "no space at the start": (f"ulimit -f 0; {me} triage {log} -o new", (2,)),
        "no space at the end": (
            f"ulimit -f 4; {me} show {stored} -f json -o new | {json_tool} >/dev/null; "
            'test "${PIPESTATUS[*]}" = "3 0"', (0,)
        ),
        "no space for a picture": (
            f"{me} show {bench} -f markdown -o p.md && rm p.md && "
            f"for x in p_*.svg; do rm $x && mkdir $x; done; {me} show {bench} -f markdown -o p.md; "
            "test $? = 3 -a -s p.md",
            (0,),
        ),
        "mode is kept": (
            f"touch old; chmod 640 old; {me} triage {log} -o old; "
            f"stat -c %a old | grep 640",
            (0,),
        ),
        "-o symlink": (f"{me} triage {log} -f markdown -o {link} && test -L {link}; test -L {link}", (0, 1)),
        "fifo as stdin": (f"timeout 20 {me} triage - < <(cat {log})", (0, 1)),
        "process substitution": (f"timeout 20 {me} triage <(cat {log})", (2,)),
        "no working directory": (
            f"mkdir -p {gone} && cd {gone} && rmdir {gone} && PYTHONPATH={ROOT} {me} triage {log}", (0, 1)
        ),
        "no temporary folder": (f"TMPDIR=/nowhere TEMP=/nowhere TMP=/nowhere {me} check", (0, 1, 2)),
        "umask": (
            f"umask 077; {me} triage {log} -o {folder}/private; stat -c %a {folder}/private | grep 600", (0,)
        ),
    }  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    nodes = {place: os.lstat(place).st_mode for place in list(places.values())[:6]}
    while True:
        for name, (command, codes) in commands.items():
            try:
                done = subprocess.run(
                    ["bash", "-c", command],
                    capture_output=True,
                    env=environ,
                    timeout=60,
                    cwd=folder,
                    check=False,
                )
                err = done.stderr.decode("utf-8", "backslashreplace")
                wrong = None
                if "Traceback" in err or "Exception ignored" in err:
                    wrong = "traceback: " + err.strip()[-200:]
                elif codes in ((2,), (3,)) and err.count("\n") > 1:
                    wrong = f"more than one line: {err[-400:]!r}"
                elif left := [file for file in os.listdir(folder) if file.startswith(".moedoctor.")]:
                    wrong = f"left: {left}"
                elif changed := [place for place, mode in nodes.items() if os.lstat(place).st_mode != mode]:
                    wrong = f"changed: {changed}"
                if wrong is None and done.returncode not in codes:
                    wrong = f"exit code {done.returncode}, expected {codes}: {err.strip()[-200:]!r}"
                tally.record(done.returncode, wrong, name)
            except subprocess.TimeoutExpired:
                tally.record(-1, "took more than 60 s", name)
            yield


Trials = Callable[[random.Random, Path, Tally], Iterator[None]]
CLASSES: dict[str, tuple[Trials, int]] = {
    "damaged reports": (reports, 1000),
    "damaged binaries": (binaries, 500),
    "hostile arguments": (arguments, 1000),
    "planted secrets": (secrets, 2000),
    "signals at random moments": (signals, 100),
    "odd environments": (environments, 69),
}
"""Name -> (trials, how many the full form tries). Secrets: 200 for each format, in logs and in exceptions."""


def run_class(name: str, seed: int, share: float = 1.0) -> Tally:
    """Run one class, or a share of it, from a seed."""
    trials, number = CLASSES[name]
    tally = Tally()
    started = time.monotonic()
    path = [*sys.path, str(TESTS / "dying_plugin")]
    with tempfile.TemporaryDirectory(prefix="stress-") as folder, mock.patch.object(sys, "path", path):
        steps = trials(random.Random(f"{seed} {name}"), Path(folder), tally)
        while tally.tried < number * share:
            next(steps)
        steps.close()
    tally.seconds = time.monotonic() - started
    return tally


def report(seed: int, tallies: dict[str, Tally]) -> str:
    """Return the table of all classes as Markdown, with each failure."""
    import moedoctor

    lines = [
        "# Stress",
        "",
        f"`make stress` with seed {seed}, moedoctor {moedoctor.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores. A trial fails as `tests/stress/stress.py` says at its top.",
        "",
        "| class | tried | failed | exit codes | seconds |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for name, tally in tallies.items():
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(tally.codes.items()))
        lines.append(f"| {name} | {tally.tried} | {len(tally.failures)} | {codes} | {tally.seconds:.0f} |")
    total = sum(len(tally.failures) for tally in tallies.values())
    lines += ["", f"Failed: {total} of {sum(tally.tried for tally in tallies.values())}."]
    for name, tally in tallies.items():
        lines += [f"- {name}: {failure!r}" for failure in tally.failures[:20]]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all classes, or those that are named, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("classes", nargs="*", metavar="CLASS", help=f"default: all of {', '.join(CLASSES)}")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--share", type=float, default=1.0, help="the share of each class to try")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    tallies: dict[str, Tally] = {}
    names = options.classes or list(CLASSES)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as processes:
        started = [processes.submit(run_class, name, seed, options.share) for name in names]
        for name, future in zip(names, started, strict=True):
            tally = tallies[name] = future.result()
            sums = f"tried {tally.tried}, failed {len(tally.failures)}, {tally.seconds:.0f} s"
            print(f"{name}: {sums}", file=sys.stderr)
    text = report(seed, tallies)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    print(text, end="")
    return 1 if any(tally.failures for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
