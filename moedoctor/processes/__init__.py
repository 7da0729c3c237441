"""Child processes: how they are started, limited and read, and the names of their deaths."""
