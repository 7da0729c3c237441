"""Imported by the fork server, so that no child has to: the modules of all plug-ins. Nothing is built."""

import contextlib
from importlib.metadata import entry_points

from moedoctor.catalogue import FAULTS, SUBJECTS

for _entry in (*entry_points(group=FAULTS), *entry_points(group=SUBJECTS)):
    # A plug-in that does not load is reported by name when it is used.
    with contextlib.suppress(Exception):
        _entry.load()
