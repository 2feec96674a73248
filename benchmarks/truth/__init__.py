"""Is the answer right? `diagnose` against brute force."""
