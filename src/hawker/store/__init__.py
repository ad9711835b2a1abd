"""SQLite, and only here: the append-only log, the tables written with it, group commit."""
