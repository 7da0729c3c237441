"""Reporters: a report in, text out; one file a format, found by the entry points `moedoctor.reporters`.

What a command has to say is built in `pages/`, from the blocks in `page.py`. The formats render these blocks.
"""
