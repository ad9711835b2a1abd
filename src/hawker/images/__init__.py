"""Images: this package fetches them from registries, other workers, tars and directories, checks and unpacks them,
keeps them by their content, and removes them."""
