"""Folders that are written to, local or remote, and the lock of their one writer."""
