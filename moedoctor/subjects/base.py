"""The interface of a kind of subject, under the path that other projects import it from."""

from moedoctor.environment import no_gpu
from moedoctor.interfaces import Sources, SubjectProvider
from moedoctor.results import UnavailableError

__all__ = ["Sources", "SubjectProvider", "UnavailableError", "no_gpu"]
