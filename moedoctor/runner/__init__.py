"""Plans the cases of a scenario, runs each in a child process, and adds up the verdicts."""
