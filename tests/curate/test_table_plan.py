"""The plans of tables: their recall, and how their work grows."""

from math import comb

import numpy as np
from hashes import flipped, random_hashes

from dask_image_ingest.curate.table_plan import TablePlan, missed, plan_pairs


def test_the_recall_is_that_of_its_formula(random):
    for bits, count, distance in [(16, 8, 24), (10, 30, 31), (20, 9, 12)]:
        plan = TablePlan(bits, count, 1024)
        hashes = random_hashes(random, 5000)
        others = flipped(random, hashes, distance)
        found = np.zeros(len(hashes), bool)
        for table in range(count):
            word, mask, _ = plan.key(table)
            assert int(mask).bit_count() == bits
            found |= hashes[:, word] & mask == others[:, word] & mask
        expected = 1 - missed(bits, count, distance)
        deviation = np.sqrt(expected * (1 - expected) / len(hashes))
        assert abs(found.mean() - expected) < 5 * deviation
        simple = 1 - (1 - comb(256 - distance, bits) / comb(256, bits)) ** count
        assert expected > simple - 0.02  # shared errors of a word cost a little, disjoint bits gain


def test_candidates_of_a_row_grow_no_faster_than_the_logarithm_of_rows(random):
    for distance in [24, 31]:

        class Rows(np.ndarray):
            """A few random hashes that say to be many."""

            count = 0

            def __len__(self):
                return self.count

            def __getitem__(self, rows):
                return self.view(np.ndarray)[np.asarray(rows) % 1000]

        hashes = random_hashes(random, 1000).view(Rows)
        work = {}
        for count in (10**6, 10**7, 10**8):
            hashes.count = count
            plan = plan_pairs(hashes, distance)
            work[count] = plan.tables * (1 + count / 2**plan.bits)
        assert work[10**8] < 4 * work[10**6]
