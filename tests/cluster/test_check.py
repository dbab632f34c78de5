"""Workers with another version are named before the first task, or refuse their tasks."""

import platform
import shutil

import dask
import pytest
from dask import delayed
from hand_started import HandStarted, packages_without
from processes import SECONDS

import dask_image_ingest as dii

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> str:
    """A path with all packages but this one."""
    return packages_without(tmp_path_factory.mktemp("bare") / "site")


@pytest.fixture(scope="module")
def older(bare, tmp_path_factory) -> str:
    """A path with another version of this package."""
    folder = tmp_path_factory.mktemp("older")
    shutil.copytree(dii.__path__[0], folder / "dask_image_ingest")
    module = folder / "dask_image_ingest" / "__init__.py"
    module.write_text(module.read_text().replace(dii.__version__, "0.0.9"))
    return f"{folder}:{bare}"


@pytest.fixture
def cluster(tmp_path):
    with HandStarted(tmp_path / "cluster") as started, dask.config.set(scheduler=None):
        yield started


def read(shards):
    return dii.read_webdataset_images(
        shards, columns=["__key__"], backend="pandas", partition_size=None
    )


def test_workers_with_another_version_are_named_before_the_first_task(
    cluster, bare, older, shards, tmp_path
):
    for number, path in enumerate(("", bare, older)):
        cluster.worker("--no-nanny", "--host", f"127.0.0.{number + 1}", PYTHONPATH=path)
    with cluster.client(3) as client:
        fit, lacking, other = sorted(client.nthreads())
        ddf = read(shards)
        for ask in (
            ddf.compute,
            ddf.persist,
            ddf.__len__,
            lambda: client.compute(ddf),
            lambda: dii.write_index(shards, folder=tmp_path),
            lambda: dii.prepare_cluster(client),
        ):
            with pytest.raises(RuntimeError, match="2 of 3 workers have not") as raised:
                ask()
            said = str(raised.value)
            assert f"{lacking}: " in said
            assert "No module named" in said
            assert f"{platform.node()} ({other}): 0.0.9" in said
            assert fit not in said
        assert not client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.tasks])
        # What does not need this package is computed.
        assert client.submit(sum, [1, 2], workers=[lacking]).result(SECONDS) == 3
        client.retire_workers([lacking, other])
        assert len(ddf.compute()) == 24


def test_a_worker_that_comes_later_with_another_version_refuses_its_tasks(
    cluster, older, shards, tmp_path
):
    references = dii.read_webdataset_images(shards, decode=False, backend="pandas")
    references = references.compute(scheduler="synchronous")
    with cluster.client(0) as client:
        ddf = read(shards)
        waiting = client.compute(ddf)  # no worker is there to be asked
        cluster.worker(PYTHONPATH=older)
        decoded = dii.decode_images(dask.dataframe.from_pandas(references, npartitions=1))
        said = rf"{dii.__version__} has come to a process that has 0\.0\.9.* on {platform.node()}"
        for ask in (
            lambda: waiting.result(SECONDS),
            ddf.compute,
            decoded.compute,
            lambda: dii.write_index(shards, folder=tmp_path / "indexes"),
        ):
            with pytest.raises(RuntimeError, match=said):
                ask()
        assert delayed(sum)([1, 2]).compute() == 3


def test_a_worker_that_leaves_while_it_is_asked_is_no_error(cluster, shards, monkeypatch):
    asked = []

    def overtaken(*args, **options):
        asked.append(run(*args, **options))
        return asked[-1] | {"tcp://127.0.0.1:1": OSError("it has closed")}

    cluster.worker("--no-nanny")
    with cluster.client(1) as client:
        run = client.run
        monkeypatch.setattr(client, "run", overtaken)
        for _ in range(2):
            assert len(read(shards).compute()) == 24
    assert len(asked) == 1
