"""The debugger on ranks of other hosts: post-mortems, breakpoints, and what becomes of both when a host goes; an
interrupt that does not reach a host. One cluster for all; its tests run in their order, the last one cuts one off."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_helpers import SECONDS, await_true, cluster_over
from person import Person

from speedlab.cluster import Cluster, RankError, RankResults
from speedlab.cluster.debug.connection import DebugServer
from speedlab.cluster.debug.post_mortem import debug
from speedlab.cluster.files.processes import TOKEN
from tests.benchmarks.lab import Lab

MEETS = """
import os, torch, torch.distributed as dist, speedlab.comm
speedlab.comm.join()
total = torch.full((1,), float(os.environ["RANK"]) + 1)
if os.environ["RANK"] == "1":
    breakpoint()
dist.all_reduce(total)
total.item()
"""
STOPS = """
inside = os.environ["SPEEDLAB_HOST"]
breakpoint()
inside
"""


@pytest.fixture(scope="module")
def cluster(settings: Path, lab: Lab) -> Iterator[Cluster]:
    with cluster_over(lab, settings, "bugs", "host-a:1", "host-b:1") as made:
        yield made


def in_front_of(cluster: Cluster, code: str, person: Person) -> RankResults:
    """The cell's results, once it is done, with a person who is asked."""
    with DebugServer(cluster.directory, "cell", ask=person) as door:
        results = cluster.execute(code, door="cell")
        deadline = time.monotonic() + SECONDS
        while not results.wait(0.02):
            door.serve()
            assert time.monotonic() < deadline
        door.finish()
    return results


def agent_of(lab: Lab, number: int, token: str) -> int:
    """The process of a host's agent."""
    found = [each for each in lab.hosts[number].processes() if "speedlab.cluster.agents.process" in each.cmdline()]
    return next(each.pid for each in found if each.environ().get(TOKEN) == token)


@pytest.mark.timeout(240)
def test_the_debugger_works_on_ranks_of_other_hosts(
    cluster: Cluster, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match="KeyError"):
        cluster.execute("value = {'a': 3}\nvalue['b']", ranks=[1]).result(SECONDS)
    person = Person("p value['a'] + 4", "p 'x' * 3_000_000", "q")
    debug(cluster, 1, person)
    said = capsys.readouterr().out
    assert said.startswith("rank 1: KeyError: 'b'\n")
    assert "\n7\n" in said
    assert "x" * 3_000_000 in said
    assert person.prompts == ["rank 1 (Pdb) "] * 3
    debug(cluster, 1, Person(KeyboardInterrupt))  # It is kept, and an interrupt ends the session alone.

    # One rank stops, and the other one waits for it in a collective.
    assert in_front_of(cluster, MEETS, Person("p total.item() * 10", "c")).result() == ["3.0", "3.0"]
    assert "20.0\n" in capsys.readouterr().out
    person = Person("p inside", "c", "p inside", "c")
    assert in_front_of(cluster, STOPS, person).result() == ["'host-a'", "'host-b'"]
    assert [prompt[:6] for prompt in person.prompts] in (
        ["rank 0"] * 2 + ["rank 1"] * 2,
        ["rank 1"] * 2 + ["rank 0"] * 2,
    )
    assert {"'host-a'", "'host-b'"} <= set(capsys.readouterr().out.splitlines())

    # An agent that ends ends the session on both sides; its engine lives, and another agent comes.
    kill = Person(lambda: os.kill(agent_of(lab, 1, cluster.token), signal.SIGKILL))
    failures = in_front_of(cluster, MEETS, kill).failures
    assert failures[1].kind == "BdbQuit"
    assert "the rank is out of reach, which ends its session" in capsys.readouterr().out
    await_true(lambda: [status.state for status in cluster.status()] == ["idle", "idle"], "both are free", SECONDS)
    assert in_front_of(cluster, MEETS, Person("c")).result() == ["3.0", "3.0"]


@pytest.mark.timeout(240)
def test_an_interrupt_waits_for_no_agent_and_reaches_its_ranks_when_one_is_back(cluster: Cluster, lab: Lab) -> None:
    reported: list[tuple[list[int], str, str]] = []
    cluster.output.subscribe(lambda *said: reported.append(said))
    await_true(lambda: cluster.status()[1].rss_bytes > 0, "the agent is back that was killed before", SECONDS)
    results = cluster.execute("import time\ntime.sleep(300)")
    await_true(lambda: [status.state for status in cluster.status()] == ["busy", "busy"], "both sleep", SECONDS)
    os.kill(agent_of(lab, 1, cluster.token), signal.SIGSTOP)
    began = time.monotonic()
    assert cluster.interrupt() == [0]
    assert time.monotonic() - began < 10  # 5, with other tests beside it.
    assert results.unfinished == [1]
    await_true(
        lambda: any("rank 1 does not hear the interrupt" in text for _, _, text in reported), "it is named", SECONDS
    )
    assert results.wait(SECONDS), "another agent comes, and sends it"
    assert {failure.kind for failure in results.failures.values()} == {"KeyboardInterrupt"}
    assert in_front_of(cluster, MEETS, Person("c")).result() == ["3.0", "3.0"]


@pytest.mark.timeout(240)
def test_a_host_that_is_cut_off_ends_the_prompt_and_is_named(
    cluster: Cluster, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = in_front_of(cluster, MEETS, Person(lab.hosts[1].cut)).failures
    assert "host-b does not answer: it is down or cut off" in failures[1].message
    assert "the rank is out of reach, which ends its session" in capsys.readouterr().out
