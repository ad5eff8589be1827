"""Stores for checkpoints: in this process's memory, and a server of S3's protocol."""

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import fsspec

from agentrl.remote_io import RemotePath


def memory_store() -> RemotePath:
    """An empty folder in the memory of this process."""
    return RemotePath(f"memory://{uuid.uuid4().hex}/run")


def download(source: RemotePath, folder: Path) -> Path:
    """Copy a folder of a store to the disk."""
    fs, path = fsspec.url_to_fs(source.url)
    for name in fs.find(path):
        file = folder / name.removeprefix(path).lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(fs.cat_file(name))
    return folder


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """A server of S3 with one bucket; gives the environment of its clients, which is set here."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "2",
    }
    with patch.dict(os.environ, environment):
        s3 = fsspec.filesystem("s3", skip_instance_cache=True)
        s3.mkdir(bucket)
        fsspec.filesystem("s3").clear_instance_cache()
        try:
            yield environment
        finally:
            server.stop()
