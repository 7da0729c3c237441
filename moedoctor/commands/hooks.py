"""The hooks of pre-commit: ``python -m moedoctor.commands.hooks lint|preflight|scenario FILE...``.

`lint` looks at the folder of each file and takes ``--fail-on`` and ``--ignore`` before the files; `preflight`
asks about each file of headers and takes its own options, then ``--`` and flags of the server; `scenario`
reads each file without running it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moedoctor.text import print_message

_HEADERS = ".headers.zip"
"""The end of the names of files that `moedoctor preflight headers FOLDER` writes."""


def check_scenarios(files: Sequence[str]) -> int:
    """Return 2 if a file is not a scenario, with a line for each on stderr; else 0."""
    from moedoctor.catalogue import PluginError
    from moedoctor.scenario.file import ScenarioError
    from moedoctor.scenario.targets import TargetError, load_targets

    code = 0
    for file in files:
        try:
            load_targets([str(Path(file))] if Path(file).parent != Path() else [f"./{file}"])
        except (PluginError, ScenarioError, TargetError) as error:
            print_message(str(error))
            code = 2
    return code


def lint_folders(words: Sequence[str]) -> int:
    """Lint the folder of each file that has safetensors files; return the worst exit code.

    A folder without them is named on stderr: nothing was looked at there.
    """
    from moedoctor.commands.lint import lint
    from moedoctor.commands.options import InputError
    from moedoctor.diagnose.ignores import FAIL_ON

    parser = argparse.ArgumentParser("moedoctor-lint", allow_abbrev=False)
    parser.add_argument("--fail-on", choices=FAIL_ON, default="warning")
    parser.add_argument("--ignore", action="append", metavar="ID=REASON")
    parser.add_argument("files", nargs="*")
    given = parser.parse_args(words)
    code = 0
    for folder in dict.fromkeys(Path(file).parent for file in given.files):
        if any(folder.glob("*.safetensors")):
            try:
                code = max(code, lint(folder, fail_on=given.fail_on, ignore=given.ignore))
            except InputError as error:
                print_message(str(error))
                code = 2
        else:
            print_message(f"{folder}: not looked at: it has no safetensors files")
    return code


def ask_headers(words: Sequence[str]) -> int:
    """Ask if a server would start with each file of headers among the words; return the worst exit code."""
    files = [word for word in words if word.endswith(_HEADERS)]
    given = [word for word in words if word not in files]
    split = given.index("--") if "--" in given else len(given)
    options, flags = given[:split], given[split + 1 :]
    program = [sys.executable, "-m", "moedoctor", "preflight", *options, "--", "vllm", "serve"]
    return max((subprocess.run([*program, file, *flags]).returncode for file in files), default=0)


def main(arguments: Sequence[str]) -> int:
    """Run the hook that the first argument names on the files behind it."""
    hooks = {"lint": lint_folders, "preflight": ask_headers, "scenario": check_scenarios}
    if not arguments or arguments[0] not in hooks:
        print_message(f"usage: python -m moedoctor.commands.hooks {'|'.join(hooks)} FILE...")
        return 2
    return hooks[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
