"""How near a read comes to bare DALI on a GPU: a model on paper, of which nothing was measured.

One worker reads partition after partition. Its threads scan, prepare batches and copy pixels, DALI
decodes one batch at a time, and Python's GIL lets one thread run at a time: a thread that waits for
it gets it when the other one waits, or after the switch interval. Printed for each way to share the
decoder: images per second as a share of bare DALI's.

    python benchmarks/gpu_model.py

The costs are assumptions: DALI's speed at 500 x 375 is that of its own CI on a Hopper (DALI#6445),
that at 12 MP is by arithmetic, and the host's are those of ``host_work.py`` on a quiet machine.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import _checkout  # noqa: F401


class Images(NamedTuple):
    """Images of a job, and what each costs; times in µs."""

    name: str
    decoded: float  # MB
    bare: float  # images a second of DALI alone
    scan: float  # before the first batch, with the GIL
    prepare: float  # for the decoder, with the GIL
    read: float  # out of the page cache, without


class Way(NamedTuple):
    """A way to read: threads, what they may do at once, sizes."""

    name: str
    threads: int
    whole: bool = False  # a thread holds the decoder for all of a partition, or for a batch
    partition: float = 1074  # MB
    oldest: bool = False  # DALI takes a batch of the partition that was begun first
    interval: float = 5000  # µs


JOBS = (
    Images("500 x 375", 0.5625, 21_567, 14, 16, 8),
    Images("500 x 375, indexed", 0.5625, 21_567, 3, 16, 8),
    Images("12 MP", 36, 1_000, 14, 16, 500),
)
WAYS = (
    Way("one thread", 1, whole=True),
    Way("one thread, partitions of 2 GB", 1, whole=True, partition=2000),
    Way("two threads, the decoder held for a partition", 2, whole=True),
    Way("two threads, for a batch, in turns", 2),
    Way("two threads, the older partition first", 2, oldest=True),
    Way("**the same, GIL handed on after 0.5 ms**", 2, oldest=True, interval=500),
    Way("the same, partitions of 2 GB", 2, oldest=True, interval=500, partition=2000),
    Way("the same, three threads", 3, oldest=True, interval=500),
)

BATCH, BATCH_MB = 256, 1074
COPY_MB = 1.0  # µs for a MB in the GPU's memory, at 1 TB/s
PER_BATCH = 300  # µs of Python for a batch, half of it with DALI idle
PER_PARTITION = 3000  # µs of Python: task, buffer, table, frame
SECONDS = 20


def main() -> None:
    lines = [f"| share of bare DALI (model) | {' | '.join(job.name for job in JOBS)} |"]
    lines.append("|---|" + "---:|" * len(JOBS))
    for way in WAYS:
        shares = (Worker(job, way).speed() / job.bare for job in JOBS)
        lines.append(f"| {way.name} | {' | '.join(f'{share:.2f}' for share in shares)} |")
    print("\n".join(lines))


Step = tuple[str, Any]
Thread = Generator[Step, None, None]


class Worker:
    """The events of a worker: threads that run, wait for the GIL, for a lock, or for a batch."""

    def __init__(self, job: Images, way: Way) -> None:
        self.job, self.way = job, way
        self.now, self.images = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._gil: deque[tuple[Thread, float]] = deque()  # the first has it
        self._locks: dict[str, deque[Thread]] = {"partition": deque(), "dali": deque()}
        self._queue: deque[dict[str, Any]] = deque()
        self._idle: Thread | None = None

    def speed(self) -> float:
        """Images per second."""
        self._next(self._dali())
        for _ in range(self.way.threads):
            self._next(self._partitions())
        while self.now < SECONDS * 1e6:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self.images / SECONDS

    def _partitions(self) -> Thread:
        """A thread that reads partitions."""
        job, way = self.job, self.way
        count = max(1, int(way.partition / job.decoded))
        size = max(1, min(BATCH, int(BATCH_MB / job.decoded)))
        while True:
            yield "python", count * job.scan + PER_PARTITION
            if way.whole:
                yield "acquire", "partition"
            left, sent, began = count, deque[dict[str, Any]](), self.now
            while left or sent:
                # Hand in a batch, and then wait for the one before.
                if left:
                    images = min(size, left)
                    left -= images
                    yield "elsewhere", images * job.read
                    yield "python", images * job.prepare
                    sent.append({"began": began, "images": images, "done": False, "waiting": None})
                    self._hand_in(sent[-1])
                if len(sent) == 2 or not left:
                    batch = sent.popleft()
                    yield "batch", batch
                    yield "python", PER_BATCH / 2
                    yield "elsewhere", batch["images"] * job.decoded * COPY_MB
                    self.images += batch["images"]
            if way.whole:
                yield "release", "partition"

    def _dali(self) -> Thread:
        """DALI's thread."""
        while True:
            yield "job", None
            if self.way.oldest:
                batch = min(self._queue, key=lambda batch: batch["began"])
            else:
                batch = self._queue[0]
            self._queue.remove(batch)
            yield "python", PER_BATCH / 2
            yield "elsewhere", batch["images"] / self.job.bare * 1e6
            yield "python", 0
            batch["done"] = True
            if batch["waiting"] is not None:
                self._next(batch["waiting"])

    def _hand_in(self, batch: dict[str, Any]) -> None:
        self._queue.append(batch)
        if self._idle is not None:
            idle, self._idle = self._idle, None
            self._next(idle)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), happen))

    def _next(self, thread: Thread) -> None:
        self._at(self.now, lambda: self._advance(thread))

    def _advance(self, thread: Thread) -> None:
        """Have a thread do its next step, or wait for it."""
        kind, what = next(thread)
        if kind == "python":
            self._gil.append((thread, what))
            if len(self._gil) == 1:
                self._run()
        elif kind == "elsewhere":
            self._at(self.now + what, lambda: self._advance(thread))
        elif kind == "acquire":
            self._locks[what].append(thread)
            if len(self._locks[what]) == 1:
                self._next(thread)
        elif kind == "release":
            self._locks[what].popleft()
            if self._locks[what]:
                self._next(self._locks[what][0])
            self._next(thread)
        elif kind == "batch" and not what["done"]:
            what["waiting"] = thread
        elif kind == "job" and not self._queue:
            self._idle = thread
        else:
            self._next(thread)

    def _run(self) -> None:
        """Run the thread that has the GIL until it is done, or another one may have it."""
        thread, needed = self._gil[0]
        spent = min(needed, self.way.interval)

        def pause() -> None:
            self._gil.popleft()
            if spent < needed:
                self._gil.append((thread, needed - spent))
            else:
                self._next(thread)
            if self._gil:
                self._run()

        self._at(self.now + spent, pause)


if __name__ == "__main__":
    main()
