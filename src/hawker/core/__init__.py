"""Decisions only: functions of (state, event, now, rng). No clock, files or sockets; the linter holds it to that."""
