"""One etcd for all tests of this folder; each takes a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.etcd import EtcdCluster, running_etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member, started when the first test asks for it."""
    with running_etcd(tmp_path_factory.mktemp("etcd") / "one") as cluster:
        yield cluster
