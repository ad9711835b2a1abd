"""Decides which app a request is for, and which machine takes it, here or in another region."""
