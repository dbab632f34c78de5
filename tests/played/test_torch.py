"""Each flow of the training guide that gives tensors: on a GPU as with pandas."""

import gc

import dask
import numpy as np
import pytest
from contract import on_host
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii

torch = pytest.importorskip("torch")

ROWS = 10


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("shards"), []
    for shard in range(2):
        members = {}
        for n in range(ROWS * shard, ROWS * (shard + 1)):
            lists = b'{"boxes": [%s]}' % b", ".join([b"[1, 2, 3, %d]" % n] * (n % 3))
            image = encode(photograph(20 + n, 30, n), "png")
            members |= {f"{n:03}.png": image, f"{n:03}.json": lists}
            members |= {f"{n:03}.cls": str(n % 4).encode(), f"{n:03}.txt": f"photo {n}".encode()}
        members[f"{ROWS * (shard + 1) - 1:03}.png"] = b"no picture"
        paths.append(write_shard(folder / f"{shard}.tar", members))
    return paths


class Flows:
    """Frames of one backend, and their batches."""

    def __init__(self, backend, shards):
        self.backend, self.shards = backend, shards

    def read(self, **options):
        return dii.read_webdataset_images(self.shards, backend=self.backend, **options)

    def batches(self, ddf, *args, **options):
        return listed(ddf.images.iter_batches(4, *args, format="torch", **options))

    def loader(self, size=4, **options):
        return self.read(size=16).images.dataloader(size, columns=["cls"], **options)


def listed(batches):
    return [dict(batch) for batch in batches]


def trained(flows):
    """The guide's first loop: the model that comes out of it, and where it is."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16 * 16 * 3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(2):
        batches = flows.read(size=16, resize="crop").images.iter_batches(
            4, format="torch", columns=["cls"], shuffle=0, epoch=epoch, normalize=(0.5, 0.5)
        )
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch["image"].flatten(1)), batch["cls"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [model.weight.detach(), [*batches.position]]


def two_epochs(flows):
    loader = flows.loader(shuffle=0)
    found = []
    for epoch in range(2):
        loader.dataset.set_epoch(epoch)
        found += listed(loader)
    return [len(loader), found, loader.dataset.position_after(2)]


def gone_on(flows):
    options = {"format": "torch", "shuffle": 7, "columns": ["__key__"]}
    ddf = flows.read(size=16)
    batches = ddf.images.iter_batches(4, **options)
    seen = [next(batches), next(batches)]
    return [seen, listed(ddf.images.iter_batches(4, **options, start=batches.position))]


def mixed(flows):
    ddf = flows.read(size=16)[["__key__", "image", "cls"]]
    frames = [ddf[ddf.cls > 1], ddf[ddf.cls <= 1]]
    batches = dii.mix_batches(frames, 4, weights=[3, 1], shuffle=0, format="torch")
    return listed(torch.utils.data.DataLoader(batches, batch_size=None))


def collated(rows):
    images = torch.stack([torch.as_tensor(row["image"]) for row in rows])
    return images, torch.as_tensor([row["cls"] for row in rows])


def mapped(images):
    tensors = torch.stack([torch.as_tensor(on_host(each)) for each in images]).float()
    return {"mean": tensors.mean((1, 2, 3)), "latent": tensors.mean((1, 2))}


MAPPED = {"mean": "float32", "latent": "list<float32>"}
BOXES = {"boxes": "list<list<float32>>"}

FLOWS = {
    "training": trained,
    "normalized": lambda f: f.batches(f.read(size=16), normalize=(0.5, 0.5)),
    "as decoded": lambda f: f.batches(f.read(size=16)),
    "of differing sizes": lambda f: f.batches(f.read()),
    "lists": lambda f: f.batches(f.read(size=16, json_fields=BOXES), columns=["json.boxes", "txt"]),
    "steps": lambda f: f.batches(f.read(size=16), columns=["cls"], shuffle=1, steps=3),
    "balanced": lambda f: f.batches(
        f.read(size=16), columns=["cls"], shuffle=0, balance="cls", steps=6
    ),
    "weighted": lambda f: f.batches(
        f.read(size=16), columns=["cls"], shuffle=0, weights="cls", steps=2
    ),
    "full steps": lambda f: f.batches(f.read(size=16), shuffle=0, drop_last=True),
    "of a rank": lambda f: f.batches(f.read(size=16), shuffle=0, shard=(1, 2)),
    "buckets": lambda f: f.batches(f.read(), shuffle=0, buckets=[(16, 24), (20, 20)]),
    "random crops": lambda f: f.batches(
        f.read(size=16, augment="random_resized_crop"), shuffle=0, epoch=1
    ),
    "persisted": lambda f: f.batches(f.read(size=16, errors="drop").persist(), columns=["cls"]),
    "decoded later": lambda f: f.batches(
        dii.decode_images(f.read(decode=False), size=16), columns=["__key__"]
    ),
    "dataloader": two_epochs,
    "dataloader of functions": lambda f: [*f.loader(collate_fn=collated, shuffle=0)],
    "function": lambda f: [
        *f.read(size=16).images.iter_batches(4, columns=["cls"], collate_fn=collated)
    ],
    "resumed": gone_on,
    "mix": mixed,
    "latents": lambda f: f.batches(
        f.read(size=16).images.map_batches(mapped, MAPPED, keep_image=True),
        columns=["mean", "latent"],
    ),
    "mapped": lambda f: [
        np.stack(column.to_arrow().to_pylist())
        if f.backend == "cudf"
        else np.stack(column.to_list())
        for column in (
            f.read(size=16, errors="drop").images.map_batches(mapped, MAPPED).compute()[name]
            for name in MAPPED
        )
    ],
}


@pytest.mark.parametrize("name", FLOWS)
def test_tensors_of_a_gpu_are_those_of_pandas(shards, name):
    with dask.config.set(scheduler="synchronous"):
        got, want = (FLOWS[name](Flows(backend, shards)) for backend in ("cudf", "pandas"))
    assert_alike(got, want)


def assert_alike(got, want):
    """The same, but for rounding: resizes differ by up to a level in the mean."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        levels = want.is_floating_point() and want.numel() and want.abs().max() > 10
        near = 1 if levels or want.dtype == torch.uint8 else 0.01
        apart = (got.double() - want.double()).abs()
        assert not apart.numel() or apart.mean() < near
    elif isinstance(want, np.ndarray):
        assert_alike(torch.as_tensor(got), torch.as_tensor(want))
    elif isinstance(want, dict):
        assert [*got] == [*want]
        assert_alike([*got.values()], [*want.values()])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_alike(one, other)
    else:
        assert got == want


def test_a_tensor_keeps_its_memory_when_all_else_is_gone(shards):
    frame = Flows("cudf", shards).read(errors="drop").compute(scheduler="synchronous")
    want = [image.get() for image in frame.images.arrays()]
    tensors = [
        each for batch in frame.images.iter_batches(4, format="torch") for each in batch["image"]
    ]
    first = frame.images.arrays()[0].data.ptr
    del frame
    gc.collect()
    assert tensors[0].data_ptr() == first
    for tensor, image in zip(tensors, want, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), image)
