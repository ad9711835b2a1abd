"""Machines that serve the same public ports: their places, and the requests that wait for room at one."""
