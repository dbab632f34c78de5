"""Public calls agree: options are named, and one name has one order and one default."""

from __future__ import annotations

import inspect
from itertools import combinations

import pandas as pd
import pytest

import dask_image_ingest as dii
from dask_image_ingest import curate

IMAGES = pd.DataFrame.images

# What each call is about; all else is an option.
SUBJECTS = {
    dii.read_webdataset_images: ["paths", "columns", "filters"],  # as dask's read_parquet
    dii.read_images: ["paths", "columns", "filters"],
    dii.read_parquet_images: ["paths", "columns", "filters"],
    dii.decode_images: ["frame"],
    dii.from_arrow: ["table"],
    dii.checkpoint: ["frame", "path"],
    dii.to_webdataset: ["frame", "path"],
    dii.to_parquet_images: ["frame", "path"],
    dii.write_index: ["paths"],
    dii.mix_batches: ["frames", "batch_size", "weights"],
    dii.gallery: ["frame", "path", "n"],
    dii.start_cluster: ["n_workers"],
    dii.prepare_cluster: ["client", "paths"],
    dii.progress: ["file"],
    dii.versions: [],
    curate.measure_quality: ["frame"],
    curate.find_issues: ["frame"],
    curate.summarize_issues: ["frame"],
    curate.compute_fingerprints: ["frame", "kinds"],
    curate.find_duplicates: ["frame", "by", "distance"],
    curate.find_overlaps: ["train", "test", "by", "distance"],
    curate.write_hashes: ["frame", "path", "by"],
    curate.embed: ["frame", "model"],
    curate.embed_texts: ["frame", "model", "texts"],
    curate.classify: ["frame", "model", "names"],
    curate.compute_scores: ["frame", "head"],
    curate.compute_similarity: ["frame", "other"],
    curate.find_semantic_duplicates: ["frame", "threshold"],
    curate.find_nearest: ["frame", "query", "k"],
    curate.find_clusters: ["frame", "k"],
    curate.write_report: ["frame", "path"],
    curate.open_clip_model: ["name", "pretrained"],
    curate.transformers_model: ["path"],
    curate.nsfw_model: [],
    IMAGES.stack: ["shape"],
    IMAGES.vectors: ["column"],
    IMAGES.arrays: [],
    IMAGES.channel_stats: [],
    IMAGES.map_batches: ["fn", "outputs"],
    IMAGES.map_rows: ["fn", "outputs"],
    IMAGES.iter_batches: ["batch_size"],
    IMAGES.dataloader: ["batch_size"],
    IMAGES.show: ["n"],
    IMAGES.encode: ["format"],
    IMAGES.thumbnails: ["size"],
    IMAGES.tiles: ["size"],
    IMAGES.pages: [],
}


def parameters(call):
    found = list(inspect.signature(call).parameters.values())
    return [each for each in found if each.name != "self"]


def public():
    functions = {getattr(module, name) for module in (dii, curate) for name in module.__all__}
    methods = {getattr(IMAGES, name) for name in dir(IMAGES) if not name.startswith("_")}
    return {each for each in functions | methods if inspect.isfunction(each)}


def test_every_public_call_is_listed_here():
    assert public() == set(SUBJECTS)


@pytest.mark.parametrize("call", SUBJECTS, ids=lambda call: call.__qualname__)
def test_options_are_named(call):
    positional = [each.name for each in parameters(call) if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == SUBJECTS[call]


def test_options_of_two_calls_come_in_one_order():
    orders = {}
    for call in SUBJECTS:
        options = [each.name for each in parameters(call) if each.kind is each.KEYWORD_ONLY]
        for pair in combinations(options, 2):
            orders.setdefault(pair, []).append(call.__qualname__)
    assert [
        (pair, calls, orders[pair[::-1]]) for pair, calls in orders.items() if pair[::-1] in orders
    ] == []


def test_columns_of_vectors_have_one_default():
    calls = [call for call in SUBJECTS if call.__module__.startswith("dask_image_ingest.curate")]
    found = {call: inspect.signature(call).parameters.get("column") for call in calls}
    defaults = {call: each.default for call, each in found.items() if each}
    assert defaults.pop(curate.embed_texts) == "text_embedding"  # beside that of the images
    assert set(defaults.values()) == {"embedding"}


def test_loaders_have_the_same_options_in_the_same_order():
    batches = parameters(IMAGES.iter_batches)
    # The dataset has set_epoch.
    shared = [each for each in batches if each.name not in ("format", "epoch")]
    assert parameters(IMAGES.dataloader)[:-1] == shared  # and those of torch's DataLoader
