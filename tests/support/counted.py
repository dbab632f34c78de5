"""Counts the images that are handed to decoders, wherever that is, and the walks over shards."""

from collections import Counter

import pytest

from dask_image_ingest.dataset.scan import rows, samples


@pytest.fixture
def work(monkeypatch):
    """``work["decoded"]`` images were decoded, ``work["walks"]`` shards walked since it began."""
    counts = Counter()

    def counting(decode):
        def counted(headers, *args, **kwargs):
            counts["decoded"] += len(headers)
            return decode(headers, *args, **kwargs)

        return counted

    monkeypatch.setattr(rows, "decode", counting(rows.decode))

    def walk(*args, _walk=samples.index_tar, **kwargs):
        counts["walks"] += 1
        return _walk(*args, **kwargs)

    monkeypatch.setattr(samples, "index_tar", walk)
    return counts
