"""What reaches the programs inside machines: checks, connections, sessions with commands."""
