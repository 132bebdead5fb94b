"""The stream: another process follows a writer, strangers are kept out, and nobody slows a step."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
import zmq
from telemetry_samples import eventually, make_event, make_folder, make_record

from speedlab.telemetry.feed import Feed
from speedlab.telemetry.stream import Publisher, StreamMessage, Subscriber
from speedlab.telemetry.writer import RecordWriter


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


@pytest.fixture
def connect():
    """Makes subscribers of a publisher and waits until messages reach them."""
    made = []

    def make(publisher: Publisher, directory) -> Subscriber:
        subscriber = Subscriber(directory)
        made.append(subscriber)
        subscriber.refresh()

        def arrived():
            publisher.send(StreamMessage(b"r", 99, 0, b"are you there"))
            return list(subscriber.receive())

        eventually(arrived)
        return subscriber

    yield make
    for subscriber in made:
        subscriber.close()


def receive(subscriber: Subscriber, until: Callable[[list[StreamMessage]], object]) -> list[StreamMessage]:
    """What arrives, less the greetings of `connect`, until there is what the test waits for."""
    found: list[StreamMessage] = []
    eventually(lambda: found.extend(m for m in subscriber.receive() if m.rank != 99) or until(found))
    return found


def steps(feed: Feed, rank: int = 0) -> list[int]:
    return [record.step for record in feed.records.get(rank, [])]


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from telemetry_samples import make_record, make_event
from speedlab.telemetry.writer import RecordWriter

with RecordWriter(sys.argv[1], 0, stream_hz=10) as writer:
    for request in sys.stdin:
        first, last = map(int, request.split())
        for step in range(first, last):
            writer.write(make_record(step))
        writer.event(make_event("evaluated", last))
        print("written", flush=True)
"""


@pytest.fixture
def start_writer(folder):
    processes = []

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder.path), os.path.dirname(__file__)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def ask(process: subprocess.Popen, first: int, last: int) -> None:
    process.stdin.write(f"{first} {last}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "written\n"


def test_another_process_is_followed_through_a_crash_and_a_restart(folder, start_writer):
    feed = Feed(folder)
    writer = start_writer()
    ask(writer, 1, 500)
    eventually(lambda: feed.poll() and steps(feed) == list(range(1, 500)))
    ask(writer, 500, 600)
    eventually(lambda: feed.poll() and steps(feed) == list(range(1, 600)))
    writer.kill()
    writer.wait(timeout=10)
    old_address = (folder.path / "stream" / "rank-0.json").read_text()
    writer = start_writer()
    ask(writer, 600, 700)
    eventually(lambda: feed.poll() and steps(feed) == list(range(1, 700)))
    assert (folder.path / "stream" / "rank-0.json").read_text() != old_address
    assert [event.step for event in feed.events] == [500, 600, 700]
    # A feed that joins now, as a new kernel's does, has the same history.
    late = Feed(folder.path)
    late.poll()
    assert late.records == feed.records
    feed.close()
    late.close()


def test_a_live_feed_takes_lines_from_the_stream_of_the_new_writer_too(folder):
    feed = Feed(folder)
    for start in (0, 100):
        with RecordWriter(folder, 0, stream_hz=10) as writer:
            feed.poll()

            def heard(writer=writer):
                writer.event(make_event("evaluated"))
                feed._last_message = float("-inf")
                feed.poll()
                return feed._last_message > float("-inf")

            eventually(heard)
            writer.write(make_record(start + 1))
            eventually(lambda: feed.poll() or steps(feed)[-1:] == [start + 1])  # noqa: B023 - called before the next turn
    assert steps(feed) == [1, 101]
    feed.close()


def test_the_key_file_is_private_and_holds_what_a_client_needs(folder):
    with RecordWriter(folder, 0, stream_hz=10):
        path = folder.path / "stream" / "rank-0.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        keys = json.loads(path.read_text())
    assert keys["address"].startswith("tcp://127.0.0.1:")
    assert "server_secret" not in keys


@pytest.mark.parametrize("stranger", ["without keys", "with own keys", "with another server's key"])
def test_strangers_receive_nothing(tmp_path, connect, stranger):
    publisher = Publisher(tmp_path / "stream", 0, hz=10)
    keys = json.loads((tmp_path / "stream" / "rank-0.json").read_text())
    own_public, own_secret = zmq.curve_keypair()
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    if stranger == "with own keys":
        socket.curve_serverkey = keys["server_public"].encode()
        socket.curve_publickey, socket.curve_secretkey = own_public, own_secret
    elif stranger == "with another server's key":
        socket.curve_serverkey = own_public
        socket.curve_publickey = keys["client_public"].encode()
        socket.curve_secretkey = keys["client_secret"].encode()
    monitor = socket.get_monitor_socket()
    socket.connect(keys["address"])
    failures = {
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_DISCONNECTED,
    }
    try:

        def refused():
            found = []
            while monitor.poll(0):
                found.append(int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder))
            assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in found
            return failures & set(found)

        eventually(refused)
        # A client with the right keys does receive what is sent now, the stranger does not.
        connect(publisher, tmp_path / "stream")
        with pytest.raises(zmq.Again):
            socket.recv(zmq.NOBLOCK)
    finally:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
        publisher.close()


@pytest.mark.parametrize(
    "change",
    [{"address": "tcp://192.0.2.1:5555"}, {"address": 5}, {"server_public": "short"}, {"client_secret": "ü" * 40}],
)
def test_a_key_file_from_elsewhere_makes_no_connection(tmp_path, change):
    publisher = Publisher(tmp_path, 0, hz=10)
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    subscriber = Subscriber(tmp_path)
    subscriber.refresh()
    assert subscriber._connected == {}
    subscriber.close()
    publisher.close()


def test_offers_are_throttled_and_the_newest_always_arrives(tmp_path, connect):
    publisher = Publisher(tmp_path, 0, hz=20)
    subscriber = connect(publisher, tmp_path)
    start = time.monotonic()
    for number in range(5000):
        publisher.offer(StreamMessage(b"r", 0, number, b"line"))
    found = receive(subscriber, lambda found: found and found[-1].start == 4999)
    seconds = time.monotonic() - start
    assert len(found) <= seconds * 20 + 2
    assert [message.start for message in found] == sorted({message.start for message in found})
    publisher.close()


def test_an_event_comes_at_once_and_behind_the_step_it_belongs_to(tmp_path, connect):
    publisher = Publisher(tmp_path, 0, hz=0.001)  # Held-back lines would wait a quarter of an hour.
    subscriber = connect(publisher, tmp_path)
    for number in range(10):
        publisher.offer(StreamMessage(b"r", 0, number, b"line"))
    publisher.send(StreamMessage(b"e", 0, 7, b"event"))
    found = receive(subscriber, lambda found: len(found) >= 3)
    assert [(message.kind, message.start) for message in found] == [(b"r", 0), (b"r", 9), (b"e", 7)]
    publisher.close()


def test_who_draws_one_rank_hears_its_records_and_all_events(tmp_path, connect):
    publishers = [Publisher(tmp_path, rank, hz=1000) for rank in (0, 1)]
    subscriber = connect(publishers[0], tmp_path)
    connect(publishers[1], tmp_path)
    numbers = itertools.count(1)

    def heard() -> set[int]:
        """Ranks whose records come, of those that each sends before an event."""
        number, found = next(numbers), []
        for rank, publisher in enumerate(publishers):
            publisher.send(StreamMessage(b"r", rank, number, b"line"))
            publisher.send(StreamMessage(b"e", rank, number, b"event"))

        def events_came() -> bool:
            found.extend(message for message in subscriber.receive() if message.start == number)
            return [message.kind for message in found].count(b"e") == len(publishers)

        eventually(events_came)
        return {message.rank for message in found if message.kind == b"r"}

    assert heard() == {0, 1}
    subscriber.hear(0)
    eventually(lambda: heard() == {0})  # Who sends is told a moment later.
    subscriber.hear(None)
    eventually(lambda: heard() == {0, 1})
    for publisher in publishers:
        publisher.close()


def test_close_sends_what_was_held_back(tmp_path, connect):
    publisher = Publisher(tmp_path, 0, hz=0.001)
    subscriber = connect(publisher, tmp_path)
    for number in range(3):
        publisher.offer(StreamMessage(b"r", 0, number, b"line"))
    publisher.close()
    found = receive(subscriber, lambda found: len(found) >= 2)
    assert [message.start for message in found] == [0, 2]


@pytest.mark.timeout(60)
def test_a_client_that_never_reads_does_not_slow_the_writer(tmp_path, connect):
    publisher = Publisher(tmp_path, 0, hz=10)
    connect(publisher, tmp_path)
    line = b"x" * 100_000
    for number in range(2000):  # 200 MB, far more than all queues hold: whoever waits, waits for ever.
        publisher.send(StreamMessage(b"e", 0, number, line))
    publisher.close()


def test_a_newer_writer_keeps_its_address_when_the_older_one_closes(tmp_path):
    older = Publisher(tmp_path, 0, hz=10)
    newer = Publisher(tmp_path, 0, hz=10)
    address = (tmp_path / "rank-0.json").read_text()
    older.close()
    assert (tmp_path / "rank-0.json").read_text() == address
    newer.close()
    assert not (tmp_path / "rank-0.json").exists()
