"""The commands, one file each, and a room for `bench`: the options, what is checked, and what is called."""
