"""The page of each command, as blocks of `moedoctor.reporters.page`; one file a command."""
