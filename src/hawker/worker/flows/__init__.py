"""Durable flows: the steps that a machine's changes are made of, and what runs them to their end."""
