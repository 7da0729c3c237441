"""Keeps names, addresses, paths and secrets of people and machines out of everything that gets published.

`Redactor.mask` masks a text. `Redactor.record` masks every text in a record; it is called where a report is
made, so that all formats profit. `Redactor.mask_setting` masks the value of an environment variable.

A text is searched twice. The first search finds what has a name (``password=``, ``Authorization:``), the
second what has a shape (an address, a token, a URL, a home folder). No part of a pattern can match the same
characters in two ways, and whatever repeats starts at the boundary of a word: time is linear in the text.
"""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

HIDDEN = "***"
_MAX_LENGTH = 300
_FOLDER = re.compile(r"(?<![\w.~/…])/(?:[^\s/=:,;'\"]+/)+(?=[^\s/=:,;'\"])")
_Value = TypeVar("_Value")

# The patterns read the text in lower case: that is several times faster than to ignore case.

# What has a name: the value behind it is hidden. Each part starts with a letter, for speed.
_KEY = "|".join(
    f"(?<={kind}.key)|(?<={kind}key)"
    for kind in ("api", "access", "auth", "private", "account", "shared", "signing", "encryption", "master",
                 "license", "storage", "ssh")
)  # fmt: skip
_TOKEN = "|".join(
    f"(?<={kind}.token)|(?<={kind}token)"
    for kind in ("hf", "hub", "huggingface", "api", "auth", "access", "bearer", "refresh", "id", "session",
                 "security", "private", "client", "bot", "user", "jwt", "oauth", "csrf", "github", "gh",
                 "gitlab", "git", "npm", "pypi", "wandb", "slack", "aws", "ngc", "openai", "anthropic")
)  # fmt: skip
_SECRET_NAME = rf"""(?:
    pass(?:word|wd|phrase|code)s? | pwd(?<![a-z]pwd) | secret[a-z_-]{{0,24}} | credentials? | authorization
  | key(?:{_KEY})s? | token(?:{_TOKEN}) | x-amz-(?:signature|credential)
)\d{{0,2}}"""
_HOST_NAME = r"""(?:
    host(?:name)?(?<![a-z]host)(?==) | hostname
  | (?:master|node|server|head|peer)[-_]?(?:addr(?:ess)?|ip|host) | nccl_comm_id
)"""
_SCHEME = r"""(?:["'\\]{0,4}(?:bearer|basic|token|negotiate|ntlm|apikey)[ \t]{1,4})?"""
# A value may be quoted, also in quoted JSON. Without its closing quote it goes to the end of the line.
_VALUE = r"""(?:
    \\+"[^"\n]*" | \\+'[^'\n]*'
  | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' | ["'][^\n]* | \[[^\]\n]*\] | [^\s]+
)"""
_NO_VALUE = r"""(?!["'\\]{0,4}(?:none|null|nil|true|false|unset|undefined|not|required|missing|for|is|was|must
    |wrong|invalid|incorrect|empty|expired)(?![^\s,;:.)\]}"'\\]))"""
_NAMED = re.compile(
    rf"""(?P<private_key>begin[a-z ]{{0,40}}private\ key-----)[^-]*
  | (?P<cookie>cookies?["'\\]{{0,4}}[ \t]{{0,4}}[=:][ \t]{{0,4}})(?:"[^"\n]*"|'[^'\n]*'|[^\n]+)
  | (?P<name>
        (?:{_SECRET_NAME}|{_HOST_NAME})["'\\]{{0,4}}\]?[ \t]{{0,4}}(?:[=:][=>]?|=>|is\b)[ \t]{{0,4}}{_SCHEME}
      | --(?:[a-z0-9]{{1,20}}[-_]){{0,3}}{_SECRET_NAME}(?:["']?,?[ \t]{{1,4}}|["'],)
      | (?:passphrase|secret[-_]key)[ \t]{{1,4}}
      | token(?<![a-z_-]token)["'\\]{{0,4}}(?:=|:[ \t]{{0,4}}(?=["'\\]{{0,4}}[^\s\d]{{0,40}}\d))
          (?!["']?[\d.,]+[a-z%]{{0,3}}(?![\w.]))(?!["']?<)
      | (?:bearer(?<![\w-]bearer)|basic(?<![\w-]basic))[ \t]{{1,4}}
          (?=[^\s\d=]{{0,200}}[\d=]|[^\s]{{20}})(?=[^\s]{{8}})
    )(?P<value>{_NO_VALUE}{_VALUE})""",
    re.VERBOSE,
)
_CLOSERS = "\"'\\)]}>,;.:"
_OF_USER = re.compile(r"(?P<name>(?:USER(?:NAME)?|LOGNAME|COMPUTERNAME|HOSTNAME)=)(?P<value>[^\s\"',;]+)")

_NOBODYS = (
    r"model|checkpoint|dataset|cache|hf|hub|huggingface|vllm|flashinfer|moedoctor|run|report|log|build|tmp"
)
"""Folders of a disk that are named after nobody."""

# What has a shape. Names of groups are the names of the rules.
_NAME = r"(?:[^\W_]|['.@+$_-](?=[^\W_]))[^\s\\/:\"'<>|,;()*?\[\]{}=]{0,63}"
_SHAPED = re.compile(
    rf"""(?<![a-z0-9])(?=[\w:.+-])(?:
    (?P<url>[a-z][a-z0-9+.-]{{1,20}}://(?!/)[^\s"'<>\\^`|]+)
  | (?P<uuid>(?:gpu|mig)-)[0-9a-f]{{4,}}[0-9a-f/-]*
  | (?P<mac>[0-9a-f]{{2}}(?P<colon>[:-])[0-9a-f]{{2}}(?:(?P=colon)[0-9a-f]{{2}}){{4,18}}(?![a-z0-9])
      | (?=[\d.]{{0,14}}[a-f])[0-9a-f]{{4}}\.[0-9a-f]{{4}}\.[0-9a-f]{{4}}(?!\w|\.\w))
  | (?P<ipv6>(?<!::)(?!(?:[0-9a-f]{{1,4}}:){{8}}\w)(?:[0-9a-f]{{0,4}}:){{2,7}}
      (?:\d{{1,3}}(?:\.\d{{1,3}}){{3}}|[0-9a-f]{{0,4}})(?:%\w{{1,16}})?(?!\w|:\w|\())
  | (?P<ipv4>(?<!\d\.)(?<!so\.)\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?!\w|\.\w))
  | (?P<aws_host>ip(?:-\d{{1,3}}){{4}}(?!\w))
  | (?P<token>(?:gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|pypi-|nvapi-|gocspx-|ya29\.)[a-z0-9_-]{{12,}}
      | npm_[a-z0-9]{{24,}} | aiza[a-z0-9_-]{{20,}} | eyj[a-z0-9_-]{{8,}}(?:\.[a-z0-9_-]+){{0,4}})
  | (?P<mixed_token>hf_[a-z0-9]{{12,}} | [sr]k[_-][a-z0-9_-]{{16,}})
  | (?P<upper_token>(?:a[ksb]ia|acca)[a-z0-9]{{12,}})
  | (?P<digest>(?<!_)(?=[0-9]*[a-f])[0-9a-f]{{32,}}(?!\w))
  | (?P<random>(?<!_)[a-z0-9]{{24,}}(?!\w))
  | (?P<mail>(?<![\w.+-])[\w.+-]+@(?:[\w-]+\.)+[a-z]{{2,24}}(?![\w@(\[]))
  | (?P<prompt>(?<![\w.+-])[\w.+-]+@[a-z][\w.-]*(?=:[~/\\]))
  | (?P<wildcard>(?<=\*\.)(?:[a-z0-9-]+\.)+(?:local|internal|lan|corp|intranet|localdomain
      |com|net|org|edu|gov|io|ai|cloud|dev)(?![\w(]|\.\w))
  | (?P<internal>(?<![\w.-])(?:[a-z0-9-]+\.)+(?:local|internal|lan|corp|intranet|localdomain)(?![\w(]))
  )
  | (?P<home>[\\/]{{1,4}}(?:home|users|documents[ ]and[ ]settings)[\\/]{{1,4}})
      {_NAME}(?:(?:[ ]{_NAME}){{1,3}}(?=[\\/])|(?P<rest>(?:[ ]{_NAME}){{1,3}})(?=["':)]|$))?
  | (?P<disk>(?<![\w.~…-])/(?:mnt/)?(?:data|scratch|lustre|gpfs|nfs|fsx)\d{{0,2}}/)
      (?!(?:{_NOBODYS})s?/){_NAME}(?=/)
  | (?P<root>/root(?<![\w.~-]/root)\b)""",
    re.VERBOSE | re.MULTILINE,
)

_VERSION_BEFORE = re.compile(
    r"""(?:(?:(?<![a-z])(?:v|ver|version|release|cuda|cudart|nccl|nvshmem|nvcc|nvrtc|nvjitlink|ptxas|tensorrt
      |trt(?:llm)?|triton|cutlass|driver|toolkit|numpy|kernel|build|wheel|package|runtime|compiler|gcc|glibc
      |cmake|ninja|wsl2?|flashinfer|moedoctor)|(?:cu|cuda_?)(?:blas|dnn|fft|rand|solver|sparse)(?:lt)?
      |torch\w*|(?<![a-z])nvidia[\w-]*|_version|[-_]cu1\d)s?["')]*[ \t]*[-_:=<>~!]{0,2}[ \t]*["'(]?
      |[=<>~!]=[ \t]?)$""",
    re.VERBOSE,
)
_VERSION_AFTER = re.compile(
    r"\+|[-_](?:microsoft|generic|py\d|cp\d|cu\d|none|linux|manylinux|rc|dev|post)|\.(?:post|dev|whl|tar|so)"
)
_DIGEST_BEFORE = re.compile(
    r"(?:sha_?\d*|md5|commit|checkout|revision|rev|digest|checksum|blob|tree)\W{0,6}$"
)
_NO_MAIL = re.compile(
    r"git@|.*\.(?:weight|bias|data|grad|transpose|view|shape|dtype|mT|py|so|whl|json|yaml|safetensors)$"
    r"|.*@[\d.]*\w*$",
    re.IGNORECASE,
)
_PUBLIC_HOST = re.compile(
    r"(?:git@)?(?:[\w-]{1,63}\.)+[a-z]{2,24}\.?(?::\d{1,5})?(?![\w:@%-])", re.IGNORECASE
)
_INTERNAL = re.compile(
    r"\.(?:local|internal|lan|corp|intranet|localdomain|home|private|svc)(?![\w.])", re.IGNORECASE
)
_LOCALHOST = re.compile(r"localhost(?::\d{1,5})?(?![\w:@.-])")
_PUBLIC_SCHEMES = ("http", "https", "ftp", "git", "git+https", "git+http", "git+ssh", "ssh", "oci", "docker")
_URL_SECRET = re.compile(
    r"([?&;#][^=&#?;\s]{0,40}(?:key|token|sig|signature|secret|pass|pwd|auth|code|credential|session)"
    r"[^=&#?;\s]{0,20}=)[^&#\s]+|(hooks\.slack\.com/services/|discord\.com/api/webhooks/)\S+",
    re.IGNORECASE,
)
_IN_URL = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_(?=[a-z]{0,29}[A-Z0-9])|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|nvapi-"
    r"|A[KS]IA|AIza|npm_|sk-|eyJ)[-_.A-Za-z0-9]{12,}"
    r"|(?P<mail>(?<![\w.+-])[\w.+-]+@(?:[\w-]+\.)+[A-Za-z]{2,24}(?![\w@(\[]))"
)
_SETTING_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PWD|PASSPHRASE|CREDENTIALS?|AUTH|COOKIES?"
    r"|HOST|HOSTID|HOSTNAME|ADDR|IP)(?:_|$)|^NCCL_COMM_ID$",
    re.IGNORECASE,
)
_NOBODY = frozenset({"root", "user", "ubuntu", "runner", "nobody", "app", "vllm", "localhost"})
_LOWER = {ord(upper): upper.lower() for upper in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
_PLAIN_KEY = re.compile(r"[a-z][a-z_]{0,40}")
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_OWN_FILE = re.compile(re.escape(os.path.dirname(_PACKAGE) + os.sep) + rf"(?={os.path.basename(_PACKAGE)}\b)")
"""The folder of the package, in front of moedoctor's own files."""


@dataclass(frozen=True)
class Redactor:
    """This user's home folder and name and this machine's name, to hide beside what looks private."""

    home: str = ""
    user: str = ""
    host: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], host: str) -> Redactor:
        """Return the redactor for a process with this environment on the machine called `host`."""
        home = environ.get("HOME", "") or environ.get("USERPROFILE", "")
        user = environ.get("USER", "") or environ.get("LOGNAME", "") or environ.get("USERNAME", "")
        return cls(home=home.rstrip("/\\"), user=user or os.path.basename(home), host=host)

    @classmethod
    def from_this_process(cls) -> Redactor:
        return cls.from_environment(os.environ, platform.node())

    def mask(self, text: str) -> str:
        """Return `text` without home folders, names of users and machines, addresses and secrets.

        Public URLs, versions and moedoctor's own files, named from its package on, stay readable.
        Undecodable bytes (lone surrogates) become ``?``, so that the result can be written as UTF-8.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        text = _OWN_FILE.sub("", text)
        if len(self.home) > 1:
            text = re.sub(re.escape(self.home) + r"(?![\w.-])", "~", text)
        text = _replace(_NAMED, _mask_named, text)
        text = _OF_USER.sub(rf"\g<name>{HIDDEN}", text) if "=" in text else text
        text = _replace(_SHAPED, _mask_shaped, text)
        for word in (self.user, self.host, self.host.partition(".")[0]):
            if _identifies(word):
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", HIDDEN, text)
        return text

    def record(self, value: _Value) -> _Value:
        """Return `value` with every text in it masked: in records, mappings and lists, also in keys.

        A text is read together with its key, so that a password or a version is known by its name.
        """
        return cast(_Value, self._mask(value, ""))

    def _mask(self, value: Any, key: str) -> Any:
        if isinstance(value, enum.Enum):
            return value
        if isinstance(value, str):
            start = f"{key}: " if key else ""
            shown = self.mask(start + value)
            return shown[len(start) :] if shown.startswith(start) else self.mask(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            members = {member.name: getattr(value, member.name) for member in dataclasses.fields(value)}
            changed = {name: self._mask(member, "") for name, member in members.items()}
            return dataclasses.replace(value, **changed)
        if isinstance(value, Mapping):
            return {self._mask_key(name): self._mask(item, str(name)) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._mask(item, key) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _mask_key(self, key: Any) -> Any:
        return key if not isinstance(key, str) or _PLAIN_KEY.fullmatch(key) else self.mask(key)

    def mask_setting(self, name: str, value: str) -> str:
        """Return the value of the variable `name` as a report may show it, at most 300 characters."""
        if value and _SETTING_NAME.search(name):
            return HIDDEN
        shown = self.mask(value)
        return shown if len(shown) <= _MAX_LENGTH else shown[:_MAX_LENGTH] + "…"


def strip_folders(text: str) -> str:
    """Return `text` with the last part alone of each absolute path, behind ``…/``."""
    return _FOLDER.sub("…/", text)


def _identifies(word: str) -> bool:
    """Return True if a user or host name identifies anybody; a bare number would hide real values."""
    return len(word) > 2 and not word.isdigit() and word.lower() not in _NOBODY


def _replace(pattern: re.Pattern[str], mask: Callable[[re.Match[str], str], str], text: str) -> str:
    """Return `text` with the matches of a pattern in lower case replaced by what `mask` makes of them."""
    lowered = text.lower() if text.isascii() else text.translate(_LOWER)
    pieces, end = [], 0
    for match in pattern.finditer(lowered):
        pieces += [text[end : match.start()], mask(match, text)]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _mask_named(match: re.Match[str], text: str) -> str:
    if kind := "private_key" if match["private_key"] else "cookie" if match["cookie"] else "":
        return text[slice(*match.span(kind))] + HIDDEN
    name, value = text[slice(*match.span("name"))], match["value"]
    if value[0] in "\"'[\\" and value[-1] in "\"']" and len(value) > 1:
        opening = len(value) - len(value.lstrip("\\"))
        return name + value[: opening + 1] + HIDDEN + value[-1 - opening :]
    return name + HIDDEN + value[len(value.rstrip(_CLOSERS)) :]


def _mask_shaped(match: re.Match[str], text: str) -> str:
    kind, found = match.lastgroup or "", text[match.start() : match.end()]
    if kind == "url":
        return ",".join(map(_mask_url, re.split(r",(?=[A-Za-z]{2,10}://)", found)))
    if kind in ("home", "rest"):
        start, end = match.span("home")
        folder = text[start:end] + HIDDEN if "\\" in text[start:end] else "~"
        rest = match["rest"] and text[slice(*match.span("rest"))]
        quoted = text[match.end() : match.end() + 1] in ("'", '"')
        is_name = not rest or quoted or all(word[0].isupper() for word in rest.split())
        return folder if is_name else folder + _replace(_SHAPED, _mask_shaped, rest)
    if kind == "disk":
        return text[slice(*match.span(kind))] + HIDDEN
    if kind == "root":
        return "~"
    if kind == "uuid":
        return found[:4] + HIDDEN
    return found if _is_innocent(kind, found, match) else HIDDEN


def _is_innocent(kind: str, found: str, match: re.Match[str]) -> bool:
    """Return whether what has the shape of something private is something else."""
    if kind in ("ipv4", "digest"):
        before = match.string[max(0, match.start() - 30) : match.start()]
        if kind == "digest":
            return _DIGEST_BEFORE.search(before) is not None
        return _is_version(found, before, match.string[match.end() : match.end() + 12])
    if kind == "ipv6":
        return not _is_ipv6(found)
    if kind == "random":
        mixed = re.search("[A-Z]", found) and re.search("[a-z]", found) and re.search(r"\d", found)
        return not mixed or _has_words(found)
    if kind == "mixed_token":
        return len(found) < 21 and not re.search(r"[A-Z\d]", found[3:])
    if kind == "upper_token":
        return not found.isupper()
    if kind == "internal":
        return not re.search(r"[\d-]", found)  # threading.local
    return kind == "mail" and _NO_MAIL.match(found) is not None


def _mask_url(url: str) -> str:
    """Return a public URL without credentials as it is, with the values of secrets in its query hidden."""
    scheme, _, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if not re.search(r"\w", host):
        return url  # "https://…" in a sentence
    public = scheme.lower() in _PUBLIC_SCHEMES and (
        _LOCALHOST.match(host) or (_PUBLIC_HOST.match(host) and not _INTERNAL.search(host))
    )
    if not public or ("@" in host and not host.startswith("git@")):
        return f"{scheme}://{HIDDEN}"
    rest = _URL_SECRET.sub(lambda match: f"{match[1] or match[2]}{HIDDEN}", rest[len(host) :])
    rest = _IN_URL.sub(lambda match: match[0] if match["mail"] and _NO_MAIL.match(match[0]) else HIDDEN, rest)
    return f"{scheme}://{host}{rest}"


def _is_version(found: str, before: str, after: str) -> bool:
    """Return whether four numbers with dots are a version and not an address."""
    parts = found.split(".")
    if any(int(part) > 255 or (len(part) > 1 and part[0] == "0") for part in parts):
        return True  # no address has such a part
    if parts[0] == "0":
        return True  # 0.0.0.0/8 are no machines
    return bool(_VERSION_BEFORE.search(before) or _VERSION_AFTER.match(after))


def _is_ipv6(found: str) -> bool:
    """Return whether it is an address of a machine, and neither a time, a slice nor a C++ name."""
    try:
        ipaddress.IPv6Address(found)
    except ValueError:
        return False
    groups = [group for group in found.partition("%")[0].split(":") if group]
    longest = max(map(len, groups), default=0)
    return longest > 2 and (len(groups) > 2 or len(groups[0]) == 4)


def _has_words(found: str) -> bool:
    """Return True for a name made of words that can be spoken, or a class: B12xFp8BlockScaledMMKernel."""
    if re.search(r"(?:Kernel|Method|Block|Builder|ForCausalLM)$", found):
        return True
    words = [word.lower() for word in re.findall("[A-Z]?[a-z]{3,}|[A-Z]{4,6}", found)]
    spoken = [
        word
        for word in words
        if len(set(word)) > 2
        and 4 * len(re.findall("[aeiou]", word)) >= len(word)
        and not re.search("[^aeiouy]{4}", word)
    ]
    return 2 * sum(map(len, spoken)) >= len(found)
