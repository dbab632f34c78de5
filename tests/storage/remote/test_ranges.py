"""Which requests are made for which ranges, against sets of bytes."""

import itertools
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_image_ingest.storage.fetch import merge, split
from dask_image_ingest.storage.remote_reader import PAGE, CachedRange, PageCache

RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=20).map(
    lambda pairs: [(start, start + size) for start, size in pairs]
)


def bytes_of(ranges) -> set[int]:
    return {byte for start, stop in ranges for byte in range(start, stop)}


@settings(deadline=None)
@given(RANGES, st.integers(0, 30))
def test_merged_ranges_have_all_bytes_and_only_small_gaps_besides(ranges, gap):
    merged = merge(ranges, gap)
    wanted = bytes_of(ranges)
    assert wanted <= bytes_of(merged)
    assert all(after[0] - before[1] > gap for before, after in itertools.pairwise(merged))
    for start, stop in merged:
        assert {start, stop - 1} <= wanted
        longest = run = 0
        for byte in range(start, stop):
            run = 0 if byte in wanted else run + 1
            longest = max(longest, run)
        assert longest <= gap


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 30))
def test_a_range_is_cut_into_pieces_that_follow_one_another(start, size, largest):
    pieces = split(start, start + size, largest)
    assert [byte for piece in pieces for byte in range(*piece)] == list(range(start, start + size))
    assert all(0 < stop - first <= largest for first, stop in pieces)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(RANGES, st.integers(0, 12))
def test_no_cached_page_is_requested_and_capacity_is_kept(ranges, capacity):
    """A page cache requests no page twice, and evicts the least recently used."""
    cache = PageCache(capacity * PAGE)
    cached: dict[int, CachedRange] = {}
    for start, stop in ranges:
        if start >= stop:
            continue
        missing = cache.missing(start * PAGE, stop * PAGE)
        requested = {page // PAGE for part in missing for page in range(*part, PAGE)}
        assert requested == {page for page in range(start, stop) if page not in cached}
        for part in missing:
            cache.add(CachedRange(*part, Future()))
        assert cache.unused_bytes == sum(last - first for first, last in missing)
        used = list({cache.at(page * PAGE): None for page in range(start, stop)})
        cache.use(used)
        assert cache.unused_bytes == 0
        cached = {page: part for page in range(400) if (part := cache.at(page * PAGE)) is not None}
        assert all(cached.get(page) is not None for page in range(start, stop))
        distinct = {id(part): part for part in cached.values()}.values()
        size = sum(part.stop - part.start for part in distinct)
        assert size <= capacity * PAGE or len(distinct) <= len(used)
