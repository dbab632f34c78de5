"""Counts the images that are handed to the decoders, wherever in the package that is."""

from collections import Counter

import pytest

from dask_image_ingest.dataset import late_decode, moved_rows, partition


@pytest.fixture
def work(monkeypatch):
    """``work["decoded"]`` images were decoded since the test began."""
    counts = Counter()

    def counting(decode):
        def counted(headers, *args, **kwargs):
            counts["decoded"] += len(headers)
            return decode(headers, *args, **kwargs)

        return counted

    for module in (partition, late_decode, moved_rows):
        monkeypatch.setattr(module, "decode", counting(module.decode))
    return counts
