"""Replication alone: six nodes with real databases, and a network and an operator that do their worst."""
