"""Workers that can't run tasks of this package are told apart before they get one."""

import platform
import shutil
import time
import warnings

import dask
import pytest
from dask import delayed
from hand_started import HandStarted, packages_without

import dask_image_ingest as dii
from dask_image_ingest.cluster.environment import environment

pytestmark = pytest.mark.slow

REPOSITORY = str(dii.__path__[0]).rpartition("/")[0]


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


@pytest.fixture(scope="module")
def no_dali(tmp_path_factory) -> str:
    folder = packages_without(tmp_path_factory.mktemp("no_dali") / "site", "nvidia")
    return f"{REPOSITORY}:{folder}"


@pytest.fixture
def cluster(tmp_path):
    with HandStarted(tmp_path / "cluster") as started, dask.config.set(scheduler=None):
        yield started


def read(shards):
    return dii.read_webdataset_images(shards, columns=["__key__"], backend="pandas")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("bare", "no dask-image-ingest"),
        ("older", rf"dask-image-ingest 0\.0\.9 \(here {dii.__version__}\)"),
        ("no_dali", "no DALI"),
    ],
)
def test_workers_that_lack_something_are_an_error_that_names_them(
    lacks, said, request, cluster, shards
):
    if lacks == "no_dali" and environment()["dali"] is None:
        pytest.skip("this process has no DALI either")
    cluster.worker(PYTHONPATH=request.getfixturevalue(lacks))
    with cluster.client(1) as client:
        (address,) = client.scheduler_info()["workers"]
        ddf, start = read(shards), time.monotonic()
        said = f"1 worker has {said}: {platform.node()} \\({address}\\)"
        for compute in (ddf.compute, ddf.persist, lambda: client.compute(ddf), ddf.__len__):
            with pytest.raises(dii.ClusterError, match=said):
                compute()
        assert time.monotonic() - start < 20
        # What does not need this package is computed.
        assert delayed(sum)([1, 2]).compute() == 3
        assert ddf.__key__.count().compute(scheduler="synchronous") == 24
        assert list(client.scheduler_info()["workers"]) == [address]


def test_a_scheduler_that_lacks_the_package_is_an_error(tmp_path, bare, shards):
    with HandStarted(tmp_path, PYTHONPATH=bare) as cluster, dask.config.set(scheduler=None):
        cluster.worker(PYTHONPATH=f"{REPOSITORY}:{bare}")
        with (
            cluster.client(1),
            pytest.raises(dii.ClusterError, match=f"The scheduler, on {platform.node()}, has no"),
        ):
            read(shards).compute()


def test_workers_that_lack_the_package_stay_out_where_others_have_it(cluster, bare, shards):
    cluster.worker()
    cluster.worker("--host", "127.0.0.2", PYTHONPATH=bare)
    with cluster.client(2) as client:
        with pytest.warns(UserWarning, match=r"1 worker has no dask-image-ingest: .*127\.0\.0\.2"):
            assert len(read(shards).compute()) == 24
        with warnings.catch_warnings(action="error"):  # once is enough
            assert len(read(shards[:2]).compute()) == 16
        assert len(client.scheduler_info()["workers"]) == 2
        assert "Failed to deserialize" not in cluster.log()


def test_a_client_asks_its_workers_once(cluster, shards):
    cluster.worker()
    with cluster.client(1):
        for count in (1, 2, 3):
            assert len(read(shards[:count]).compute()) == 8 * count
    # By the worker and the scheduler.
    assert cluster.log().count("'environment'") == 2
