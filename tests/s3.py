"""A service on this machine that answers as S3 does, for the time of a test."""

from __future__ import annotations

import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

# What could send a request elsewhere, or sign it otherwise.
FOREIGN = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL_S3",
    "AWS_BUCKET",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_TIMEOUT",
)


class OneAtATime:
    """Moto looks whether a key is there and then puts it; in S3 both are one step."""

    def __init__(self) -> None:
        self._answer = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def __call__(self, environ, start_response):
        with self._lock:
            return self._answer(environ, start_response)


class Silent(MotoRequestHandler):
    def log(self, *args, **kwargs) -> None:
        pass


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The URI of an empty bucket; meanwhile the environment says how to reach it."""
    server = make_server("127.0.0.1", 0, OneAtATime(), threaded=True, request_handler=Silent)
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    bucket = f"bucket-{uuid.uuid4().hex}"
    try:
        with s3_environment(f"http://127.0.0.1:{server.server_port}") as url:
            urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
            yield f"s3://{bucket}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3_environment(url: str) -> Iterator[str]:
    """The environment of a user of the S3 service at a URL."""
    with pytest.MonkeyPatch.context() as patch:
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield url
