"""Seeds of random tests; shards of real photographs and an S3 server, made once for all."""

import collections
import contextlib
import gc
import os
import random
from pathlib import Path

import dask
import pytest

# What somebody's machine has configured is not for the tests, nor for processes that they start.
for _name in [*os.environ]:
    if _name.startswith(("DASK_", "AWS_", "AZURE_STORAGE_", "GOOGLE_", "FSSPEC_", "STORAGE_")):
        del os.environ[_name]
dask.config.refresh(paths=[])
os.environ |= {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(["127.0.0.1", "localhost", os.environ.get(_name, "")]).rstrip(",")

# Whatever its endpoint, gcsfs asks Google for the type of each bucket, for up to 30 s a call where
# there is no way out. It reads this when it is imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

pytest.register_assert_rewrite("contract", "processes")

pytest_plugins = ["output_folders"]

CASES = 4  # of a test with parameters that `make test` runs; the others are marked `more`


def pytest_addoption(parser):
    parser.addoption(
        "--nightly", action="store_true", help="all rounds of random tests, with fresh seeds"
    )
    parser.addoption(
        "--seed", type=int, help="first seed of random tests (0; with --nightly a fresh one)"
    )


def pytest_configure(config):
    option = config.option
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        option.seed = config.workerinput["seed"]
    elif option.seed is None:
        option.seed = random.SystemRandom().randrange(10**6) if option.nightly else 0
    with contextlib.suppress(ImportError):  # a GPU machine may lack it
        from hypothesis import core, settings

        settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
        settings.register_profile("seeded", database=None, deadline=None)
        settings.load_profile("seeded" if option.seed else "fixed")
        core.global_force_seed = option.seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give a process of pytest-xdist the seed of this one: all must collect the same tests."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config):
    return f"random tests: --seed {config.option.seed}{' --nightly' * config.option.nightly}"


def pytest_generate_tests(metafunc):
    """A test that takes a ``seed`` runs with one, or with as many as its mark ``rounds`` says."""
    if "seed" not in metafunc.fixturenames:
        return
    option, rounds = metafunc.config.option, 1
    if mark := metafunc.definition.get_closest_marker("rounds"):
        rounds = mark.kwargs["nightly"] if option.nightly else mark.args[0]
    metafunc.parametrize("seed", range(option.seed, option.seed + rounds))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Tell how a test that failed is run again with what it drew."""
    report = yield
    if report.failed:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        seed = params.get("seed", item.config.option.seed)
        again = f"make test PYTEST_ARGS=\"--seed {seed} '{item.nodeid}'\""
        report.sections.append(("Run again", again))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The slow tests come first, or a core waits at the end for one of a minute on another."""
    mark_further_cases(items)
    if not config.option.nightly:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def mark_further_cases(items):
    """Mark as ``more`` all but four of the cases of a test, which are from all of its list."""
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for listed in cases.values():
        first = {number * len(listed) // CASES for number in range(CASES)}
        for number, item in enumerate(listed):
            if len(listed) > CASES and number not in first:
                item.add_marker(pytest.mark.more)


@pytest.fixture(autouse=True)
def seeded(request):
    """Whatever a test draws without a seed of its own is the same each time."""
    random.seed(request.config.option.seed)


@pytest.fixture
def rng(seed) -> random.Random:
    """Random numbers that the seed of the test gives."""
    return random.Random(seed)


def pytest_collection_finish():
    """Modules and tests stay: to look at them in each collection took an eighth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What other modules have left behind stays as well: a collection looks at a module's own."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def photos():
    """24 photographs with captions, labels and JSON, in JPEG, PNG and WebP."""
    # Here, since they come out of packages that a GPU machine may not have.
    from photo_shards import make_photos

    return make_photos(24)


@pytest.fixture(scope="session")
def shards(photos, tmp_path_factory) -> list[Path]:
    """The photographs in 3 shards of 8."""
    from photo_shards import write_photo_shards

    return write_photo_shards(photos, tmp_path_factory.mktemp("shards"), per_shard=8)


@pytest.fixture(scope="session")
def s3_server():
    """The URL of a real S3 server."""
    pytest.importorskip("moto.server", reason="an S3 server needs moto[server] and s3fs")
    pytest.importorskip("s3fs", reason="an S3 server needs moto[server] and s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture(scope="session", autouse=True)
def forked():
    """Fork workers of clusters, and programs, from a process that has imported what they need.

    A fork is there in 0.1 s, a new Python in 3. Tests with ``spawned`` start workers as users do.
    """
    from forked_python import IMPORTED, MEASURED

    if MEASURED:
        return
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    from distributed.utils import get_mp_context

    # After dask, which sets a list of its own in the first call.
    get_mp_context().set_forkserver_preload(IMPORTED)


@pytest.fixture(scope="session", autouse=True)
def patient():
    """Wait for workers as long as a busy machine needs.

    Dask gives up a worker that is not back 15 seconds after its death.
    """
    from processes import SECONDS

    with dask.config.set({"distributed.deploy.lost-worker-timeout": f"{SECONDS}s"}):
        yield


@pytest.fixture(scope="session")
def cluster(forked):
    """Two worker processes for all tests that need no others: none may end them or change them."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as started:
        yield started


@pytest.fixture
def client(cluster, synchronous):
    """A client of that cluster, which computes what a test computes."""
    from distributed import Client

    with Client(cluster) as connected:
        yield connected


@pytest.fixture
def spawned():
    """Workers that are started as users' are, with what the environment says by then."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}):
        yield


@pytest.fixture(autouse=True)
def synchronous():
    """Tests run tasks in their own thread, unless they or their module have a client."""
    if dask.config.get("scheduler", None) is None:
        with dask.config.set(scheduler="synchronous"):
            yield
    else:
        yield
