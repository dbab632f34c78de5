"""Stored images that are rewritten before export: as baseline JPEG, or encoded anew."""
