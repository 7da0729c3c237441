"""Measures speed and numbers; one file for each thing that is measured."""
