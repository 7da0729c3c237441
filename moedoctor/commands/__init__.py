"""What each command does, one file a command; `moedoctor.cli` only parses and prints."""
