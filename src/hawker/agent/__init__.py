"""The agent: one process on a host, a member of the catalog with the roles its configuration enables."""
