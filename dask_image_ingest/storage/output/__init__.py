"""Output folders, local or remote, and the lock that keeps out a second writer."""
