"""Whether a Ray cluster answers, asked in a process of its own.

Where nothing or something else answers, Ray tries for a minute, writes lines of its own to stderr and ends
the process. ``python -m moedoctor.fleet.probe ADDRESS`` bears that, and prints whether a driver can work.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_SECONDS = 10


def start(address: str) -> subprocess.Popen[str]:
    """Start to ask the head at `address`, ``auto`` or ``HOST:PORT``."""
    command = [sys.executable, "-m", __name__, address]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def problem(process: subprocess.Popen[str]) -> str | None:
    """Return why the driver cannot work, or None. Ends the process."""
    try:
        answer, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"something listens there, but gave no answer of Ray within {_SECONDS} s"
    finally:
        process.kill()
        process.wait()
    lines = answer.strip().splitlines()
    if lines and lines[-1] == "a Ray cluster":
        return None
    return lines[-1] if lines else "what listens there is not the head of a Ray cluster"


def main(arguments: Sequence[str]) -> int:
    """Print ``a Ray cluster``, or why a driver on this machine cannot work with it."""
    import ray
    import ray._private.services

    raylet: Any = ray._raylet
    services: Any = ray._private.services
    try:
        address = services.canonicalize_bootstrap_address(arguments[0])
        nodes = raylet.GcsClient(address=address).get_all_node_info(timeout=_SECONDS)
        here = {str(node) for node in services.find_node_ids()}
        if here.isdisjoint(node.hex() for node in nodes):
            print(
                "no node of that cluster runs on this machine, which Ray needs; run this on a node, "
                f"or `ray start --address {address}` here first"
            )
            return 1
    except (AttributeError, ImportError, TypeError):
        pass  # another release of Ray, whose own words must do
    except Exception as error:
        print(" ".join(str(error).split()) or type(error).__name__)
        return 1
    print("a Ray cluster")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
