"""Keeps names, paths and secrets of a machine and its user out of reports that people publish."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

HIDDEN = "***"

_HOME = re.compile(r"/(?:home|Users)/[^/\s:'\",;]+|(?<![\w.~-])/root\b")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\",;]+", re.IGNORECASE)
_GPU_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{4,}[0-9a-f/-]*", re.IGNORECASE)
_IP_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?!\.)")
_TOKEN = re.compile(
    r"\b(?:hf_(?!quant_config\.json)|sk-|gh[oprsu]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[-_.A-Za-z0-9]{12,}"
    r"|\b[0-9a-fA-F]{32,}\b"
    r"|\b(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[a-z])(?=[A-Za-z0-9]*[A-Z])[A-Za-z0-9]{24,}\b"
)
_SECRET = (
    r"((?:api[-_]?key|token|password|passwd|secret|authorization)[\"']?(?:[=:]| bearer"
    r"|(?<=key) ) ?[\"']?)(?!\*)[^\s\"',]{3,}"
)
_MAIL = r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{1,64}"
_WINDOWS_HOME = r"([A-Za-z]:[\\/]{1,2}Users[\\/]{1,2})[^\\/\s\"']{1,64}"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH|HOST|HOSTID|HOSTNAME|ADDR|IP)(?:_|$)"
    r"|^NCCL_COMM_ID$",
    re.IGNORECASE,
)
_NOBODY = frozenset({"root", "user", "ubuntu", "runner", "nobody", "app", "vllm", "localhost"})
_MAX_LENGTH = 300
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_OWN_FILE = re.compile(re.escape(os.path.dirname(_PACKAGE) + os.sep) + rf"(?={os.path.basename(_PACKAGE)}\b)")
"""The folder of the package, in front of moedoctor's own files."""


@dataclass(frozen=True)
class Redactor:
    """What to hide: this user's home folder and name, and this machine's name."""

    home: str = ""
    user: str = ""
    host: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str], host: str) -> Redactor:
        """Return the redactor for a process with this environment on the machine called `host`."""
        home = environ.get("HOME", "") or environ.get("USERPROFILE", "")
        user = environ.get("USER", "") or environ.get("LOGNAME", "") or os.path.basename(home)
        return cls(home=home.rstrip("/\\"), user=user, host=host)

    @classmethod
    def of_this_process(cls) -> Redactor:
        """Return the redactor for this process."""
        return cls.of(os.environ, platform.node())

    def text(self, text: str) -> str:
        """Return `text` without home folders, user and host names, addresses, GPU UUIDs and likely secrets.

        moedoctor's own files are named from its package on.
        Undecodable bytes (lone surrogates) become ``?``, so that the result can be written as UTF-8.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        text = _OWN_FILE.sub("", text)
        if len(self.home) > 1:
            text = re.sub(re.escape(self.home) + r"(?![\w.-])", "~", text)
        text = _HOME.sub("~", text)
        text = _URL.sub(rf"\1://{HIDDEN}", text)
        text = _GPU_UUID.sub(rf"\1-{HIDDEN}", text)
        text = _IP_ADDRESS.sub(HIDDEN, text)
        text = _TOKEN.sub(HIDDEN, text)
        for word in (self.user, self.host, self.host.partition(".")[0]):
            if _identifies(word):
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", HIDDEN, text)
        return text

    def pasted(self, text: str) -> str:
        """Return a stranger's text, also without ``token=…``, mail addresses and home folders of Windows."""
        text = re.sub(_SECRET, rf"\1{HIDDEN}", text, flags=re.IGNORECASE)
        text = re.sub(_MAIL, HIDDEN, text)
        text = re.sub(_WINDOWS_HOME, rf"\1{HIDDEN}", text)
        return self.text(text)

    def setting(self, name: str, value: str) -> str:
        """Return the value of the variable `name` as a report may show it, at most 300 characters."""
        if value and _SECRET_NAME.search(name):
            return HIDDEN
        shown = self.text(value)
        return shown if len(shown) <= _MAX_LENGTH else shown[:_MAX_LENGTH] + "…"


def _identifies(word: str) -> bool:
    """Whether a user or host name identifies anybody; a bare number would hide real values."""
    return len(word) > 2 and not word.isdigit() and word.lower() not in _NOBODY
