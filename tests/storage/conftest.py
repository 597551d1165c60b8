"""An S3 of this machine, and folders that stand for machines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.s3 import S3, serving


@pytest.fixture(scope="session")
def server() -> Iterator[S3]:
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with serving() as found:
        yield found


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """The server; this process stands for a machine that has never seen it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("TRAINKIT_STORAGE_LEASE", "3")
    monkeypatch.setenv("TRAINKIT_STORAGE_DIR", str(tmp_path / "machine"))
    server.requests()
    yield server
    server.fault()
