"""The scenario file as typed records, and the way from a name to files."""
