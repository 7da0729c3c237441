"""The interface of a kind of subject, under the path that other projects import it from."""

import re
from collections.abc import Mapping
from typing import Any

from moedoctor.environment import explain_missing_gpu
from moedoctor.interfaces import Fault, Sources, SubjectProvider
from moedoctor.results import Case, Tier, UnavailableError

__all__ = [
    "OwnSubject",
    "ReleaseSubject",
    "Sources",
    "SubjectProvider",
    "UnavailableError",
    "explain_missing_gpu",
]


class OwnSubject(SubjectProvider):
    """A subject whose implementation the fault itself gives: `Fault.faulty`, `fixed` or `installed`."""

    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        return getattr(fault, self.kind)(case)


class ReleaseSubject(SubjectProvider):
    """`KIND@X.Y.Z`, a named release. An option says where its code is; real kernels need a GPU."""

    missing: str
    """The next step without the option; ``{release}`` is X.Y.Z."""

    def owns(self, name: str) -> bool:
        return re.fullmatch(rf"{self.kind}@\d+\.\d+\.\d+[A-Za-z0-9.+-]*", name) is not None

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        if name not in sources:
            return self.missing.format(release=name.partition("@")[2])
        return explain_missing_gpu(environment)
