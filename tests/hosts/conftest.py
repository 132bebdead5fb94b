"""Hosts in namespaces of this machine (`tests.benchmarks.lab`); without root or packages these tests skip and say
so."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_helpers import Login, needs

from speedlab.cluster.launch.host_specs import Spec
from tests.benchmarks.lab import Lab, missing_for_lab
from tests.benchmarks.lab.daemons import start_sshd


@pytest.fixture(scope="session")
def hosts_are_possible() -> None:
    """Skips where there can be no hosts."""
    if missing := missing_for_lab():
        pytest.skip(missing)


@pytest.fixture(scope="module")
def lab(hosts_are_possible: None) -> Iterator[Lab]:
    """Two hosts of a module of tests."""
    with Lab(2) as made:
        yield made


@pytest.fixture(scope="module")
def settings(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The settings with which ssh reaches the hosts of `lab`; clusters are in a folder of their own."""
    needs("ssh")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="sl") as folder:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        patch.setenv("TMPDIR", folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        yield start_sshd(lab)


@pytest.fixture
def two(hosts_are_possible: None) -> Iterator[Lab]:
    """Two hosts of this test's own, which it may cut off and close."""
    with Lab(2) as lab:
        yield lab


@pytest.fixture
def ssh(two: Lab) -> Path:
    """The settings with which ssh reaches the hosts of `two`."""
    needs("ssh")
    return start_sshd(two)


@pytest.fixture
def login(two: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Spec], Login]]:
    """`login(spec)`: a controller for the hosts of `two`; ended with the test. Folders of hosts go where it looks."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with tempfile.TemporaryDirectory(prefix="sl") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        # Functions of tests are imported on the hosts.
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        made: list[Login] = []

        def make(spec: Spec) -> Login:
            made.append(Login(two, spec))
            return made[-1]

        yield make
        for each in made:
            each.close()
