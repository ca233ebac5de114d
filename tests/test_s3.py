"""The store in a bucket: what only a service over the network can do, and how it says no."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
import pytest

from checkpoints import store as store_module
from checkpoints.corpora import current_snapshot_id
from checkpoints.store import Store
from contracts.errors import CheckpointError, ConfigurationError, MissingArtifactError
from tests.s3 import s3_bucket, s3_environment


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as uri:
        yield uri


@pytest.fixture
def store(bucket, tmp_path):
    return Store(f"{bucket}/{tmp_path.name}")


def every_call(store: Store):
    return [
        lambda: store.read("a/b"), lambda: store.read_if_there("a/b"), lambda: store.write("a/b", b"x"),
        lambda: store.create("a/b", b"x"), lambda: store.delete("a/b"), lambda: store.files("a"),
        lambda: store.folders("a"),
    ]  # fmt: skip


@contextmanager
def service(*answers: tuple[int, bytes]) -> Iterator[list[str]]:
    """A service that gives these answers in turn, and the last one for ever; notes what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.command)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers[min(len(asked), len(answers)) - 1]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", "Mon, 01 Jun 2026 10:00:00 GMT")
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - the names that http.server asks for

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with s3_environment(f"http://127.0.0.1:{server.server_port}"):
            yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refusal(code: str) -> bytes:
    return f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>No.</Message></Error>'.encode()


def test_prefixes_of_one_bucket_are_stores_apart(bucket):
    one, other = Store(f"{bucket}/nightly"), Store(f"{bucket}/nightly-2/deep")
    one.write("runs/a", b"one")
    other.write("runs/a", b"other")
    assert one.read("runs/a") == b"one"
    assert (one.files("runs"), other.files("runs")) == (["runs/a"], ["runs/a"])
    whole = Store(bucket)
    assert whole.read("nightly-2/deep/runs/a") == b"other"
    assert whole.files("nightly") == ["nightly/runs/a"]
    assert Store(f"{bucket}/nightly/").read("runs/a") == b"one"


def test_a_store_in_a_bucket_has_no_root(store):
    assert store.root is None


@pytest.mark.parametrize("size", [0, 999, 1000, 1001, 2000, 3500])
def test_a_large_object_is_read_in_parts(store, size, monkeypatch):
    monkeypatch.setattr(store_module, "_LONGEST_ANSWER", 1000)
    data = bytes(number % 251 for number in range(size))
    store.write("a/b", data)
    assert store.read("a/b") == data


def test_an_object_replaced_between_its_parts_is_not_put_together_of_two(store, monkeypatch):
    monkeypatch.setattr(store_module, "_LONGEST_ANSWER", 1000)
    store.write("a/b", b"a" * 2500)
    get, asked = obstore.get, []

    def get_and_replace(*args, **more):
        asked.append(more)
        if len(asked) == 3:  # the size, the first part, and now the second
            store.write("a/b", b"b" * 2500)
        return get(*args, **more)

    monkeypatch.setattr(obstore, "get", get_and_replace)
    with pytest.raises(CheckpointError, match="could not do what was asked: got a/b"):
        store.read("a/b")
    assert store.read("a/b") == b"b" * 2500


def test_an_object_larger_than_a_part_of_an_upload_comes_back_whole(store):
    data = bytes(range(256)) * (12 * 4096)  # 12 MiB; obstore uploads 5 MiB at a time
    store.write("a/large", data)
    store.create("a/created", data)
    assert store.read("a/large") == store.read("a/created") == data
    with pytest.raises(CheckpointError, match="already has the file"):
        store.create("a/created", data)
    store.write("a/large", b"small")
    assert store.read("a/large") == b"small"


def test_a_bucket_that_is_not_there_is_no_missing_file(bucket):
    store = Store(bucket.replace("bucket-", "other-"))
    for call in every_call(store):
        with pytest.raises(CheckpointError, match=r"could not do what was asked: got a.*\(NoSuchBucket\)") as caught:
            call()
        assert not isinstance(caught.value, MissingArtifactError)
    with pytest.raises(CheckpointError, match="NoSuchBucket"):
        current_snapshot_id(store)  # and not: nothing was ingested yet


def test_a_service_that_refuses_is_an_error_at_once_with_its_own_word(tmp_path):
    with service((403, refusal("AccessDenied"))) as asked:
        for number, call in enumerate(every_call(Store("s3://bucket/p")), start=1):
            with pytest.raises(
                CheckpointError, match=r"could not do what was asked: got a.*\(AccessDenied\)"
            ) as caught:
                call()
            assert len(asked) == number
            assert not isinstance(caught.value, MissingArtifactError)
            assert "test-secret" not in str(caught.value)
            assert "\n" not in str(caught.value)


def test_a_service_that_is_busy_for_a_moment_is_asked_again():
    with service((503, refusal("SlowDown")), (503, refusal("SlowDown")), (200, b"data")) as asked:
        assert Store("s3://bucket/p").read("a/b") == b"data"
        assert asked == ["GET"] * 3


def test_a_service_that_is_down_is_an_error_in_reasonable_time():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        with s3_environment(f"http://127.0.0.1:{closed.getsockname()[1]}"):
            started = time.monotonic()
            with pytest.raises(CheckpointError, match="Check that the store can be reached") as caught:
                Store("s3://bucket/p").read("a/b")
            assert time.monotonic() - started < 30
            assert not isinstance(caught.value, MissingArtifactError)


def test_a_service_that_is_silent_is_given_up(monkeypatch):
    # Its 30 s for a request and 30 s for all tries, shortened.
    monkeypatch.setitem(store_module._RETRIES, "retry_timeout", timedelta(seconds=0.5))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(20)
        with s3_environment(f"http://127.0.0.1:{silent.getsockname()[1]}"):
            monkeypatch.setenv("AWS_TIMEOUT", "250ms")
            store = Store("s3://bucket/p")
            for call in every_call(store):
                started = time.monotonic()
                with pytest.raises(CheckpointError, match="could not do what was asked"):
                    call()
                assert time.monotonic() - started < 5


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/prefix", "s3://secret@bucket"])
def test_credentials_in_a_uri_are_refused_and_not_shown(uri):
    with pytest.raises(ConfigurationError, match=r"holds credentials: got s3://\.\.\.@bucket") as caught:
        Store(uri)
    assert "secret@" not in str(caught.value)
    assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://bucket/p?aws_secret_access_key=secret", "s3://bucket/p#secret"])
def test_what_follows_bucket_and_prefix_is_refused_and_not_shown(uri):
    with pytest.raises(ConfigurationError, match="has more than a bucket and a prefix") as caught:
        Store(uri)
    assert "secret=" not in str(caught.value)
    assert "#secret" not in str(caught.value)


def test_an_environment_that_cannot_be_read_is_named(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ALLOW_HTTP", "perhaps")
    with pytest.raises(ConfigurationError, match='failed to parse "perhaps" as boolean'):
        Store(f"{bucket}/p")


@pytest.mark.parametrize("uri", ["s3://", "s3:///prefix", "s3://bucket/a//b"])
def test_a_uri_without_a_bucket_or_with_an_empty_part_is_refused(uri, bucket):
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Store(uri)
