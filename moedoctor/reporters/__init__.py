"""Reporters: a report in, text out; one file a format, found by the entry points `moedoctor.reporters`."""
