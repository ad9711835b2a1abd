"""How the catalog is read: SQL, subscriptions to queries, hints of changed rows, members and health."""
