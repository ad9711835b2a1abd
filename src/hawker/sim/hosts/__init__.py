"""Simulated hosts: power, clock and disk, the agent on one, and the programs that its worker runs."""
