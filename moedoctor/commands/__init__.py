"""The commands, one file each: the options, what is checked, and what is called."""
