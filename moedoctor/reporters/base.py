"""The interface of a report format, under the path that other projects import it from."""

from moedoctor.interfaces import Reporter

__all__ = ["Reporter"]
