"""The members of all rows at once are those that are selected row by row."""

import pyarrow as pa
import pytest
from tars import random_tar, tar

from dask_image_ingest.export.files import Options
from dask_image_ingest.export.member_selection import as_table, select_members, select_vectorized
from dask_image_ingest.export.members import Members
from dask_image_ingest.tar import index_tar


def options(**members) -> Options:
    made = Members(**members)
    return Options("{shard}.tar", None, None, None, made, True, True, False, False, False)


def locations(rows) -> pa.RecordBatch:
    types = {"key": pa.string(), "offset": pa.int64(), "nbytes": pa.int64()}
    arrays = [
        pa.array([row[place] for row in rows], type_) for place, type_ in enumerate(types.values())
    ]
    return pa.RecordBatch.from_arrays(arrays, list(types))


@pytest.mark.slow
@pytest.mark.rounds(3, nightly=100)
def test_random_rows_get_the_same_members_together_as_one_by_one(rng):
    together = 0
    for _ in range(100):
        plain = rng.random() < 0.7
        names = [
            f"{key}.{kind}" for key in range(rng.randrange(6)) for kind in ("jpg", "txt", "a.b")
        ]
        rng.shuffle(names)
        names = names[: rng.randrange(20)]
        shard = tar({name: b"x" * rng.randrange(3) for name in names}) if plain else None
        index = index_tar(shard or random_tar(rng.randrange(10**9)))
        places = [
            (sample.key, *span) for sample in index.samples for span in sample.members.values()
        ]
        wanted = rng.choices(places, k=rng.randrange(9)) if places else []
        if wanted and rng.random() < 0.2:  # one that is not there, or of another key
            key, offset, size = wanted[0]
            wanted[0] = rng.choice(
                [(key, offset + 1, size), (key, offset, size + 1), ("z", offset, size)]
            )
        if wanted and rng.random() < 0.2:  # of unknown size, or place
            key, offset, size = wanted[0]
            wanted[0] = rng.choice([(key, offset, None), (key, None, size)])
        for chosen in options(), options(copied=frozenset({"jpg", "a.b"})):
            rows, renamed = select_members(index, locations(wanted), chosen)
            found = select_vectorized(index, locations(wanted), chosen)
            if found is not None:
                together += 1
                table, expected = found[0], as_table(rows)
                table.validate(full=True)
                assert table.schema == expected.schema
                assert table.to_pylist() == expected.to_pylist()
                assert found[1] == renamed
    assert together > 20
