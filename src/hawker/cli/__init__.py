"""The `hawker` command. Imports the rest only when a command runs."""
