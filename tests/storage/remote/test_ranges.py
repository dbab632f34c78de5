"""Which requests are made for which ranges, against sets of bytes."""

import itertools
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_image_ingest.storage.remote.fetch import merge, split
from dask_image_ingest.storage.remote.page_cache import PAGE, CachedRange, PageCache

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
def test_no_page_is_asked_for_while_it_is_here_and_no_more_is_kept(ranges, kept):
    """Ranges of pages, of which those used longest ago are let go of."""
    extents = PageCache(kept * PAGE)
    here: dict[int, CachedRange] = {}
    for start, stop in ranges:
        if start >= stop:
            continue
        missing = extents.missing(start * PAGE, stop * PAGE)
        asked = {page // PAGE for part in missing for page in range(*part, PAGE)}
        assert asked == {page for page in range(start, stop) if page not in here}
        for part in missing:
            extents.add(CachedRange(*part, Future()))
        assert extents.unused == sum(last - first for first, last in missing)
        used = list({extents.at(page * PAGE): None for page in range(start, stop)})
        extents.use(used)
        assert extents.unused == 0
        here = {page: e for page in range(400) if (e := extents.at(page * PAGE)) is not None}
        assert all(here.get(page) is not None for page in range(start, stop))
        there = {id(extent): extent for extent in here.values()}.values()
        size = sum(extent.stop - extent.start for extent in there)
        assert size <= kept * PAGE or len(there) <= len(used)
