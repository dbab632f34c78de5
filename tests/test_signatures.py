"""Public calls agree: options are named, and one name has one order and one default."""

from __future__ import annotations

import inspect

import pandas as pd
import pytest

import dask_image_ingest as dii

IMAGES = pd.DataFrame.images

# What each call is about; all else is an option.
SUBJECTS = {
    dii.read_webdataset_images: ["paths", "columns", "filters"],  # as dask's read_parquet
    dii.read_images: ["paths"],
    dii.read_parquet_images: ["paths", "column"],
    dii.decode_images: ["frame"],
    dii.checkpoint: ["frame", "path"],
    dii.to_webdataset: ["frame", "path"],
    dii.to_parquet_images: ["frame", "path"],
    dii.write_index: ["paths"],
    dii.mix: ["frames", "batch_size", "weights"],
    dii.gallery: ["frame", "path", "n"],
    dii.start_cluster: ["n_workers"],
    dii.prepare: ["client", "paths"],
    dii.progress: ["file"],
    dii.versions: [],
    IMAGES.stack: ["shape"],
    IMAGES.vectors: ["column"],
    IMAGES.arrays: [],
    IMAGES.channel_stats: [],
    IMAGES.map_batches: ["fn", "outputs"],
    IMAGES.iter_batches: ["batch_size"],
    IMAGES.torch_dataset: ["batch_size"],
    IMAGES.dataloader: ["batch_size"],
    IMAGES.show: ["n"],
    IMAGES.encode: ["format"],
    IMAGES.thumbnails: ["size"],
}


def parameters(call):
    found = list(inspect.signature(call).parameters.values())
    return [each for each in found if each.name != "self"]


def public():
    functions = {getattr(dii, name) for name in dii.__all__}
    methods = {getattr(IMAGES, name) for name in dir(IMAGES) if not name.startswith("_")}
    return {each for each in functions | methods if inspect.isfunction(each)}


def test_every_public_call_is_listed_here():
    assert public() == set(SUBJECTS)


@pytest.mark.parametrize("call", SUBJECTS, ids=lambda call: call.__qualname__)
def test_options_are_named(call):
    positional = [each.name for each in parameters(call) if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == SUBJECTS[call]


def test_loaders_have_the_same_options_in_the_same_order():
    batches = parameters(IMAGES.iter_batches)
    shared = [each for each in batches if each.name not in ("format", "start", "shard")]
    assert parameters(IMAGES.torch_dataset) == shared
    assert parameters(IMAGES.dataloader)[:-1] == shared  # and those of torch's DataLoader
