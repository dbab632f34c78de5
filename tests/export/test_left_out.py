"""``_left_out.parquet`` names the rows that the shards lack, whichever run wrote it."""

from __future__ import annotations

import pandas as pd
import pytest
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.storage.output.store import LocalStore


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "in.tar").write_bytes(tar({f"{key}.jpg": b"image" for key in "abcd"}))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    return frame.drop(columns=["image", "error"]).compute()


def repeated(rows, count):
    """The same samples, and rows that will be left out."""
    return pd.concat([rows, rows[:count]], ignore_index=True)


def export(frame, tmp_path, **options):
    out = tmp_path / "out"
    dii.to_webdataset(frame, f"{out}/{{shard}}.tar", row_errors="drop", **options)
    file = out / "_left_out.parquet"
    return pd.read_parquet(file)["__key__"].tolist() if file.exists() else None


class Stopped(Exception):
    pass


def test_it_is_there_after_a_run_that_stopped_before_it(rows, tmp_path, monkeypatch):
    put = LocalStore.put

    def putting(self, name, *content):
        if name == "_left_out.parquet":
            raise Stopped
        put(self, name, *content)

    with monkeypatch.context() as context:
        context.setattr(LocalStore, "put", putting)
        with pytest.raises(Stopped):
            export(repeated(rows, 2), tmp_path)
    assert export(repeated(rows, 2), tmp_path, resume=True) == ["a", "b"]
