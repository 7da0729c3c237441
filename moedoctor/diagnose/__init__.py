"""Diagnosis without a run: triage of logs and reports. Nothing here imports torch."""
