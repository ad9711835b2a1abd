"""The kind *machine*: containers, microVMs and processes of the host."""
