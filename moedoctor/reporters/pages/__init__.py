"""What each command has to say, as blocks of `moedoctor.reporters.page`; one file a command."""
