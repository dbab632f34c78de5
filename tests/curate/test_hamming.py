"""The search by bands beside a comparison of all with all."""

import sys

import numpy as np
import pytest
from hashes import brute, clusters, flipped, random_hashes

from dask_image_ingest.curate.hamming import first_equal, nearest, nearest_kept


@pytest.mark.parametrize("distance", [0, 3, 15])
def test_up_to_15_bits_it_finds_what_all_with_all_finds(random, distance):
    hashes = clusters(random, 150, 9, max(distance, 1))[:, None]
    of, apart = nearest_kept(hashes, distance)
    expected, bits = brute(hashes, distance)
    assert of.tolist() == expected.tolist()
    assert apart.tolist() == bits.tolist()
    assert (of >= 0).sum() > 20


@pytest.mark.nightly
def test_blocks_change_nothing(random, monkeypatch):
    hashes = clusters(random, 60, 9, 15)[:, None]
    expected = nearest_kept(hashes, 15)
    for block, candidates in [(1, 1), (7, 64), (100, 10)]:
        monkeypatch.setattr(sys.modules[nearest_kept.__module__], "_BLOCK", block)
        monkeypatch.setattr(sys.modules[nearest_kept.__module__], "_CANDIDATES", candidates)
        for found, one in zip(nearest_kept(hashes, 15), expected, strict=True):
            assert found.tolist() == one.tolist()


@pytest.mark.parametrize("kind", ["band", "cloud"])
def test_crowded_hashes_give_what_all_with_all_gives(random, kind, monkeypatch):
    if kind == "band":
        hashes = clusters(random, 60, 9, 15)
        hashes.view(np.uint16)[:, 3] = 77
    else:
        center = random_hashes(random, 1).view(np.uint8)
        bits = np.unpackbits(center) ^ (random.random((600, 256)) < 0.05)
        hashes = np.packbits(bits, axis=1).view(np.uint64)
    module = sys.modules[nearest_kept.__module__]
    for block, queries, rows in [(4096, 32, 4096), (100, 7, 50)]:
        monkeypatch.setattr(module, "_BLOCK", block)
        monkeypatch.setattr(module, "_QUERIES", queries)
        monkeypatch.setattr(module, "_ROWS", rows)
        of, apart = nearest_kept(hashes[:, None], 15)
        expected, bits = brute(hashes[:, None], 15)
        assert of.tolist() == expected.tolist()
        assert apart.tolist() == bits.tolist()
    assert 20 < (of >= 0).sum() < len(hashes) - 20


@pytest.mark.nightly
def test_a_crowd_is_compared_once_and_not_band_by_band(random, monkeypatch):
    module = sys.modules[nearest_kept.__module__]
    looked_at = []

    def counted(queries, words, distance, _brute_force=module._brute_force):
        looked_at.append(len(queries) * words.shape[1])
        return _brute_force(queries, words, distance)

    monkeypatch.setattr(module, "_brute_force", counted)
    count = 9000
    nearest_kept(random_hashes(random, count)[:, None], 15)
    assert sum(looked_at) == 0
    hashes = random_hashes(random, count)
    hashes.view(np.uint16)[:, :9] = 77  # nine bands of each pair are equal
    nearest_kept(hashes[:, None], 15)
    assert sum(looked_at) <= count**2


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


def test_no_row_goes_for_one_that_goes_itself_however_dense_they_lie(random, monkeypatch):
    # 1,500 frames of one scene: each is near to those around it, none to those far away.
    steps = [random_hashes(random, 1)]
    for _ in range(1499):
        steps.append(flipped(random, steps[-1], 1))
    hashes = np.concatenate(steps)[:, None]
    monkeypatch.setattr(sys.modules[nearest_kept.__module__], "_BLOCK", 256)
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
@pytest.mark.parametrize(
    ("bits", "share"), [pytest.param(15, 1.0, marks=pytest.mark.nightly), (24, 0.985)]
)
def test_planted_pairs_among_200_000_random_hashes_are_found(random, bits, share):
    # 99.1 % at 24 bits: of 10,000 pairs, 98.5 % is six standard deviations less.
    hashes = random_hashes(random, 200_000)
    hashes[190_000:] = flipped(random, hashes[:10_000], bits)
    of, apart = nearest_kept(hashes[:, None], bits)
    found = of[190_000:] == np.arange(10_000)
    assert found.mean() >= share
    assert (apart[190_000:][found] == bits).all()
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


def test_equal_hashes_point_to_the_first_of_them(random):
    hashes = random_hashes(random, 50)[random.integers(0, 50, 400)][:, :2].copy()
    values = [tuple(row) for row in hashes.tolist()]
    expected = [values.index(value) for value in values]
    found = first_equal(hashes)
    assert [row if of < 0 else of for row, of in enumerate(found.tolist())] == expected
    assert first_equal(hashes[:0]).tolist() == []
    assert nearest_kept(hashes[:0].reshape(0, 1, 4), 24)[0].tolist() == []
