"""Serves the API: declared calls become routes, with checks of input, errors in the API's form, and documentation."""
