"""One command on every node or GPU of a Ray cluster, and what differs between the answers."""
