"""Methods of truncating side by side at equal processor time."""
