"""The fixed implementations, importable without the command line."""
