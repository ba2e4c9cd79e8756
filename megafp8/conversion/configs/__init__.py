"""Import configs of other projects: one table of keys for each format, and one engine that applies it."""
