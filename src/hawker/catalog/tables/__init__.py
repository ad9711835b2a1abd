"""The tables of the catalog in a node's own SQLite file: columns, layout on disk, and how rows come into them."""
