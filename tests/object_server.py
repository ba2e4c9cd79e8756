"""An S3 server in this process, moto's, with a bucket."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

from megafp8.host.object_store import ObjectPath

BUCKET = "bucket"


class ObjectServer:
    """The server; this process and its children use it by the environment variables that boto3 reads."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        os.environ.update(self.environment)
        self._numbers = itertools.count()
        from megafp8.host.object_store.path import filesystem

        filesystem("s3://").mkdir(BUCKET)

    def close(self) -> None:
        self._server.stop()
        for name in self.environment:
            os.environ.pop(name, None)

    def folder(self) -> ObjectPath:
        """A prefix without objects."""
        return ObjectPath(f"s3://{BUCKET}/{next(self._numbers)}")

    def upload(self, prefix: Path | str) -> str:
        """Copy the files of a data set; returns its URL."""
        prefix, target = Path(prefix), self.folder()
        for file in sorted(prefix.parent.glob(f"{prefix.name}.*")):
            (target / file.name).write_bytes(file.read_bytes())
        return str(target / prefix.name)
