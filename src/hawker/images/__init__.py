"""Images: fetched from registries, other workers, tars and directories; checked, kept by content, unpacked, let go."""
