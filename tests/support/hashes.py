"""Random hashes of 256 bits, near and far, and a comparison of all with all."""

import numpy as np


def random_hashes(random, count):
    return random.integers(0, 2**64, (count, 4), dtype=np.uint64)


def flipped(random, hashes, bits):
    """Hashes that differ from these in so many random bits each."""
    raw = np.unpackbits(hashes.view(np.uint8), axis=1)
    for row, count in zip(raw, np.broadcast_to(bits, len(raw)), strict=True):
        row[random.choice(256, int(count), replace=False)] ^= 1
    return np.packbits(raw, axis=1).view(np.uint64)


def clusters(random, count, size, bits):
    """Groups of hashes that are near to each other, some only by way of a third, in any order."""
    hashes = random_hashes(random, count)
    every = [hashes]
    for _ in range(size):
        hashes = flipped(random, hashes, random.integers(0, bits + 1, len(hashes)))
        every.append(hashes)
    together = np.concatenate(every)
    return together[random.permutation(len(together))]


def brute(hashes, distance, is_same=False):
    """Greedy, all with all: which rows stay, and for each other the nearest of them.

    ``is_same``, bool (n, n), are pairs that are near at any distance.
    """
    kept = []
    apart = np.bitwise_count(hashes[:, None, :] ^ hashes[None, :, :1]).sum(axis=3).min(axis=2)
    near = (apart <= distance) | is_same
    for row in range(len(hashes)):
        if not near[row, kept].any():
            kept.append(row)
    apart = np.where(near, apart, 999)
    of = np.array(kept)[apart[:, kept].argmin(axis=1)]
    bits = apart[:, kept].min(axis=1)
    of[kept], bits[kept] = -1, 0
    return of, bits
