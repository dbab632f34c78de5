"""The search by tables beside a comparison of all with all."""

import numpy as np
import pytest
from hashes import brute, clusters, flipped, random_hashes

from dask_image_ingest.curate import near_hashes, table_plan
from dask_image_ingest.curate.near_hashes import first_equal, nearest, nearest_kept


def test_up_to_15_bits_it_finds_what_all_with_all_finds(random):
    for distance in [0, 3, 15]:
        hashes = clusters(random, 150, 9, max(distance, 1))[:, None]
        of, apart = nearest_kept(hashes, distance)
        expected, bits = brute(hashes, distance)
        assert of.tolist() == expected.tolist()
        assert apart.tolist() == bits.tolist()
        assert (of >= 0).sum() > 20


@pytest.fixture
def tables(monkeypatch):
    """Few rows are searched by tables too, as if it were costly to compare all with all."""
    monkeypatch.setattr(table_plan, "_ALL", 1e9)


@pytest.mark.parametrize(
    "distance", [24, *(pytest.param(d, marks=pytest.mark.more) for d in (8, 31, 64))]
)
def test_tables_find_what_all_with_all_finds(random, tables, distance):
    hashes = clusters(random, 100, 6, distance)[:, None]
    assert table_plan.plan_pairs(hashes[:, 0], distance).tables > 1
    for found, expected in zip(
        nearest_kept(hashes, distance), brute(hashes, distance), strict=True
    ):
        assert found.tolist() == expected.tolist()


def test_blocks_and_memory_change_nothing(random, tables, monkeypatch):
    hashes = clusters(random, 60, 9, 24)[:, None]
    expected = nearest_kept(hashes, 24)
    for block, edges, memory in [(64, 1, 20_000), (300, 1 << 20, 1 << 20)]:
        monkeypatch.setattr(near_hashes, "_BLOCK", block)
        monkeypatch.setattr(near_hashes, "_EDGES", edges)
        for found, one in zip(nearest_kept(hashes, 24, memory=memory), expected, strict=True):
            assert found.tolist() == one.tolist()
        of, bits = nearest(hashes[:200], hashes[200:, 0], 24, memory)
        apart = np.bitwise_count(hashes[:200] ^ hashes[200:, 0]).sum(axis=2)
        assert of.tolist() == np.where(apart.min(1) <= 24, apart.argmin(1), -1).tolist()
        assert bits[of >= 0].tolist() == apart.min(1)[of >= 0].tolist()


@pytest.mark.parametrize("kind", ["word", "cloud"])
@pytest.mark.parametrize("crowd", [8, pytest.param(100, marks=pytest.mark.more)])
def test_hashes_that_are_alike_give_what_all_with_all_gives(
    random, tables, kind, crowd, monkeypatch
):
    monkeypatch.setattr(table_plan, "_CROWD", crowd)
    if kind == "word":
        hashes = clusters(random, 60, 9, 15)
        hashes[:, 2] = 77
    else:
        center = random_hashes(random, 1).view(np.uint8)
        bits = np.unpackbits(center) ^ (random.random((600, 256)) < 0.05)
        hashes = np.packbits(bits, axis=1).view(np.uint64)
    of, apart = nearest_kept(hashes[:, None], 15)
    expected, bits = brute(hashes[:, None], 15)
    assert of.tolist() == expected.tolist()
    assert apart.tolist() == bits.tolist()
    assert 20 < (of >= 0).sum() < len(hashes) - 20


def test_variants_count_as_the_row_itself(random):
    first = random_hashes(random, 300)
    mirrored = random_hashes(random, 300)
    later = flipped(random, mirrored[:100], 9)
    hashes = np.stack(
        [np.concatenate([first, later]), np.concatenate([mirrored, first[:100]])], axis=1
    )
    of, apart = nearest_kept(hashes, 15)
    assert of.tolist() == [-1] * 300 + list(range(100))
    assert apart[300:].max() == 0  # mirrored, they are the same
    assert (nearest_kept(hashes[:, :1], 15)[0] == -1).all()
    assert of.tolist() == brute(hashes, 15)[0].tolist()


def test_no_row_goes_for_one_that_goes_itself_however_dense_they_lie(random):
    # 1,500 frames of one scene: each is near to those around it, none to those far away.
    steps = [random_hashes(random, 1)]
    for _ in range(1499):
        steps.append(flipped(random, steps[-1], 1))
    hashes = np.concatenate(steps)[:, None]
    of, apart = nearest_kept(hashes, 15)
    gone = np.flatnonzero(of >= 0)
    assert (of[of[gone]] == -1).all()
    bits = np.bitwise_count(hashes[gone, 0] ^ hashes[of[gone], 0]).sum(axis=1)
    assert bits.tolist() == apart[gone].tolist()
    assert bits.max() <= 15
    assert of.tolist() == brute(hashes, 15)[0].tolist()


def test_a_hundred_thousand_equal_hashes_leave_one(random):
    hashes = np.repeat(random_hashes(random, 1), 100_000, axis=0)
    assert nearest_kept(hashes[:, None], 24)[0].tolist() == [-1] + [0] * 99_999


@pytest.mark.slow
@pytest.mark.parametrize("distance", [8, pytest.param(24, marks=pytest.mark.nightly), 31])
def test_planted_pairs_among_200_000_random_hashes_are_found(random, distance):
    # 99.9 % at the distance: of 10,000 pairs, 99.7 % is six standard deviations less.
    hashes = random_hashes(random, 200_000)
    hashes[190_000:] = flipped(random, hashes[:10_000], distance)
    of, apart = nearest_kept(hashes[:, None], distance)
    found = of[190_000:] == np.arange(10_000)
    assert found.mean() >= 0.997
    assert (apart[190_000:][found] == distance).all()
    assert (of[:190_000] == -1).all()


def test_the_nearest_of_others_is_that_of_all_with_all(random):
    others = clusters(random, 100, 5, 15)
    hashes = np.concatenate([flipped(random, others[:200], 5), random_hashes(random, 300)])
    of, apart = nearest(hashes[:, None], others, 15)
    bits = np.bitwise_count(hashes[:, None] ^ others).sum(axis=2)
    expected = np.where(bits.min(axis=1) <= 15, bits.argmin(axis=1), -1)
    assert of.tolist() == expected.tolist()
    assert apart[:200].tolist() == bits.min(axis=1)[:200].tolist()
    assert (nearest(hashes[:, None], others[:0], 15)[0] == -1).all()


def test_rows_that_need_an_equal_one_are_near_no_other(random, tables):
    hashes = clusters(random, 60, 6, 12)
    hashes = hashes[random.integers(0, len(hashes), 500)][:, None]
    is_exact = np.zeros(500, bool)
    is_exact[::3] = True
    hashes[is_exact] ^= np.uint64(0x5555_5555_5555_5555)  # no row of one kind equals one of another
    searched = np.flatnonzero(~is_exact)
    of, bits = brute(hashes[searched], 12)
    expected = np.full(500, -1)
    expected[searched] = np.where(of < 0, -1, searched[of])
    texts = [row.tobytes() for row in hashes]
    for row in np.flatnonzero(is_exact):
        first = texts.index(texts[row])
        expected[row] = first if first < row else -1
    for overwrite in (False, True):
        found, apart = nearest_kept(hashes, 12, is_exact=is_exact, overwrite_hashes=overwrite)
        assert found.tolist() == expected.tolist()
        assert apart[searched].tolist() == bits.tolist()
        assert not apart[is_exact].any()
    assert (expected[is_exact] >= 0).sum() > 20


def test_equal_hashes_point_to_the_first_of_them(random):
    hashes = random_hashes(random, 50)[random.integers(0, 50, 400)][:, :2].copy()
    values = [tuple(row) for row in hashes.tolist()]
    expected = [values.index(value) for value in values]
    found = first_equal(hashes)
    assert [row if of < 0 else of for row, of in enumerate(found.tolist())] == expected
    assert first_equal(hashes[:0]).tolist() == []
    assert nearest_kept(hashes[:0].reshape(0, 1, 4), 24)[0].tolist() == []
