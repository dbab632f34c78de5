"""Loaders of frames on a GPU: what is refused, and what is decoded together."""

import pytest
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest.decode.dali import BATCH_SIZE, DaliDecoder

ROWS = 9


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    members = {}
    for n in range(ROWS):
        members |= {f"{n:03}.jpg": encode(photograph(30, 40, n)), f"{n:03}.cls": str(n).encode()}
    return write_shard(tmp_path_factory.mktemp("shards") / "shard.tar", members)


@pytest.fixture
def ddf(shard):
    return dii.read_webdataset_images(shard, backend="cudf", size=(8, 8))


def test_workers_of_a_dataloader_are_refused(ddf):
    pytest.importorskip("torch")
    with pytest.raises(dii.ArgumentError, match=r"backend='pandas'.*iter_batches"):
        ddf.images.dataloader(2, num_workers=1)
    assert sum(len(batch["image"]) for batch in ddf.images.dataloader(2)) == ROWS


def test_workers_of_a_users_own_dataloader_are_refused(ddf):
    data = pytest.importorskip("torch.utils.data")
    batches = dii.mix_batches([ddf, ddf], 2, format="torch")
    with pytest.raises(dii.ArgumentError, match=r"backend='pandas'.*iter_batches"):
        next(iter(data.DataLoader(batches, batch_size=None, num_workers=1)))


def test_a_gpu_gets_several_batches_at_once(tmp_path, monkeypatch):
    """So that it decodes one of them while the host prepares the next."""
    image, rows = encode(photograph(16, 16, 0)), 2400
    path = write_shard(tmp_path / "many.tar", {f"{n:05}.jpg": image for n in range(rows)})
    sizes, run = [], DaliDecoder.run

    def run_and_count(decoder, batches):
        batches = list(batches)
        sizes.append(list(map(len, batches)))
        return run(decoder, batches)

    monkeypatch.setattr(DaliDecoder, "run", run_and_count)
    ddf = dii.read_webdataset_images(path, backend="cudf", size=(8, 8))
    steps = list(ddf.images.iter_batches(64, columns=["__key__"], shuffle=0, prefetch=0))
    assert len({key for batch in steps for key in batch["__key__"]}) == rows
    assert [BATCH_SIZE] * 4 in sizes
