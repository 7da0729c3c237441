"""Timing on a GPU."""
