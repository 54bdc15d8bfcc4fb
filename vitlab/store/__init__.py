"""Trial folders, locks, results and caches on disk."""
