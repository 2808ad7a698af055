"""Claims: one holder at a time, and none that death leaves behind for ever."""

import json
import multiprocessing
import os
import signal
import threading
import time

import pytest

from cpt_core.sweeps import leases
from cpt_core.sweeps.leases import Lease, holder

SECONDS = 1.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "run.lease"


def test_one_at_a_time(path):
    first, second = Lease(path, SECONDS), Lease(path, SECONDS)
    assert first.acquire()
    assert holder(path) == os.getpid()
    assert not second.acquire()
    second.release()  # not its own: nothing happens
    assert path.exists()
    first.release()
    assert not path.exists()
    assert second.acquire()
    second.release()


def test_a_living_holder_keeps_its_claim_beyond_the_time(path):
    first, second = Lease(path, SECONDS), Lease(path, SECONDS)
    assert first.acquire()
    assert not second.acquire(wait=2.5 * SECONDS)
    assert not first.lost
    first.release()


def test_waiting_ends_when_the_claim_is_free_or_when_asked(path):
    first, second = Lease(path, SECONDS), Lease(path, SECONDS)
    assert first.acquire()
    threading.Timer(0.3, first.release).start()
    assert second.acquire(wait=30)
    asked = time.monotonic()
    assert not first.acquire(wait=30, should_stop=lambda: True)
    assert time.monotonic() - asked < 5
    second.release()


def acquire_and_sleep(path, ready):
    Lease(path, 3600).acquire()
    ready.set()
    time.sleep(60)


def test_a_holder_that_was_killed_on_this_machine_loses_it_at_once(path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=acquire_and_sleep, args=(path, ready))
    process.start()
    ready.wait()
    assert not Lease(path, 3600).acquire()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    lease = Lease(path, 3600)
    assert lease.acquire()
    lease.release()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "",  # killed between making the file and writing it
        "{",
        "[]",
        json.dumps({"token": "x", "host": "another machine", "pid": 1}),
    ],
)
def test_one_elsewhere_or_unknown_loses_it_after_the_time(content, path):
    path.parent.mkdir()
    path.write_text(content)
    lease = Lease(path, SECONDS)
    assert not lease.acquire()
    began = time.monotonic()
    assert lease.acquire(wait=10 * SECONDS)
    assert time.monotonic() - began > 0.9 * SECONDS
    lease.release()


def test_a_process_number_that_was_given_to_another_is_no_holder(path):
    path.parent.mkdir()
    path.write_text(json.dumps({"token": "x", "host": leases._host(), "pid": os.getpid(), "start": "1"}))
    lease = Lease(path, 3600)
    assert lease.acquire()
    lease.release()


def test_a_holder_that_slept_through_finds_out(path):
    first = Lease(path, SECONDS)
    assert first.acquire()
    path.unlink()  # as a taker would, after the time
    second = Lease(path, SECONDS)
    assert second.acquire()
    deadline = time.monotonic() + 10 * SECONDS
    while not first.lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert first.lost
    first.release()
    assert path.exists()  # the other's
    second.release()


def compete(path, log, stop):
    while not stop.is_set():
        lease = Lease(path, 0.2)
        if lease.acquire():
            with open(log, "a") as f:
                f.write(f"{os.getpid()} in\n")
            time.sleep(0.005)
            with open(log, "a") as f:
                f.write(f"{os.getpid()} out\n")
            lease.release()


def test_a_stale_claim_is_taken_over_by_one_of_many(path, tmp_path):
    context = multiprocessing.get_context("fork")
    stop, log = context.Event(), tmp_path / "log"
    path.parent.mkdir()
    crowd = [context.Process(target=compete, args=(path, log, stop)) for _ in range(4)]
    for process in crowd:
        process.start()
    for _ in range(10):  # again and again a holder dies: its file stays, and names a dead process
        time.sleep(0.15)
        aside = path.with_name("dead")
        aside.write_text(json.dumps({"token": "x", "host": leases._host(), "pid": 2**22 + 1}))
        try:
            os.link(aside, path)
        except FileExistsError:
            continue
    stop.set()
    for process in crowd:
        process.join()
    events = [line.split() for line in log.read_text().splitlines()]
    assert len(events) > 20
    for (entered, what), (left, then) in zip(events[::2], events[1::2], strict=True):
        assert (what, then) == ("in", "out")
        assert entered == left  # nobody else came in between
