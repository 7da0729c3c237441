"""What needs no run: triage of logs and reports. Nothing here imports torch."""
