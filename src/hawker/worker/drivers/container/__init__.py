"""Runs machines as containers, by an OCI runtime: crun or runc."""
