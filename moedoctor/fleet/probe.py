"""A question to an address, asked in a process of its own: does a Ray cluster answer there?

Where nothing or something else answers, Ray tries for a minute, writes lines of its own to stderr and ends
the process. A fork bears that: it costs milliseconds, and Ray has no threads before it connects.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any

_SECONDS = 5.0
_MOST_BYTES = 4096
_FINE = "a Ray cluster"


def find_problem(ray: Any, address: str, seconds: float = _SECONDS) -> str | None:
    """Return why no driver on this machine can work with the cluster at `address`, or None.

    `address` is ``auto`` or ``HOST:PORT``.
    """
    answer = _call_in_fork(lambda: _ask(ray, address, seconds), seconds)
    if answer is None:
        return f"Ray had no answer within {seconds:.0f} s; nothing, or something else, listens there"
    if not answer:
        return "what listens there is not the head of a Ray cluster"
    return None if answer == _FINE else answer


def _ask(ray: Any, address: str, seconds: float) -> str:
    """Ask the head for its nodes. A driver also needs a node of the cluster on its own machine."""
    try:
        services = ray._private.services
        _take_the_token(address)
        head = services.canonicalize_bootstrap_address(address)
        nodes = ray._raylet.GcsClient(address=head).get_all_node_info(timeout=seconds)
        here = {str(node) for node in services.find_node_ids()}
        if here.isdisjoint(node.hex() for node in nodes):
            return (
                "no node of that cluster runs on this machine, which Ray needs; run this on a node, "
                f"or `ray start --address {head}` here first"
            )
    except (AttributeError, ImportError, TypeError):
        pass  # a release of Ray that has these elsewhere: its own words must do
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return _FINE


def _take_the_token(address: str) -> None:
    """Do as `ray.init` does since 2.60, or raise for a token that is missing; older releases have none."""
    with contextlib.suppress(ImportError):
        from ray._private.authentication import authentication_token_setup as setup

        if address == "auto":
            setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        setup.ensure_token_if_auth_enabled({}, create_token_if_missing=False)


def _call_in_fork(call: Callable[[], str], seconds: float) -> str | None:
    """Return what `call` gives in a fork; "" if it ended without, None if it did not end in time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(silence, stream)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.write(write, call().encode("utf-8", "replace")[:_MOST_BYTES])
        finally:
            os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], seconds)[0]:
            return None
        return os.read(read, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
