"""Serving the API: endpoints as data become routes, checks of input, errors in the API's form, and an OpenAPI page."""
