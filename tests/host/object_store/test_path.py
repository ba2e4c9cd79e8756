"""Paths of objects against boto3, on moto's S3 server; errors that say what would work."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import boto3
import pytest

from megafp8.host.object_store import ObjectPath, ObjectStoreError, as_path, path
from megafp8.host.shipped import install_command
from tests.object_server import BUCKET, ObjectServer


def test_what_is_written_is_what_others_read(s3: ObjectServer) -> None:
    folder = s3.folder()
    (folder / "a" / "one").write_bytes(b"123456")
    with (folder / "a" / "two").open("wb") as stream:
        stream.write(b"x" * 100)
    client = boto3.client("s3")
    prefix = str(folder).removeprefix(f"s3://{BUCKET}/")
    listed = {x["Key"]: x["Size"] for x in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]}
    assert listed == {f"{prefix}/a/one": 6, f"{prefix}/a/two": 100}
    one = folder / "a" / "one"
    assert (one.is_file(), one.is_dir(), folder.is_dir(), folder.is_file()) == (True, False, True, False)
    assert one.read_range(2, 4) == b"34"
    assert one.version().size == one.stat().st_size == 6
    assert [x.name for x in folder.iterdir()] == ["a"]
    assert folder.sizes() == {"a/one": 6, "a/two": 100}
    assert (folder / "*" / "t*").glob() == [folder / "a" / "two"]
    before = one.version()
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/a/one", Body=b"654321")
    assert one.version() != before, "of the same size, but of another ETag"
    one.copy_to(folder / "b")
    assert (folder / "b").read_bytes() == b"654321"
    one.unlink()
    one.unlink()
    assert not one.exists()
    with pytest.raises(FileNotFoundError, match=str(one)):
        one.read_bytes()


def test_local_paths_and_other_protocols() -> None:
    assert str(as_path("file:///a/b")) == "/a/b"
    assert str(as_path("a/b")) == "a/b"
    assert as_path("~/a") == Path.home() / "a"
    assert as_path(Path("~/a")) == Path("~/a"), "a path is used as it is"
    memory = ObjectPath("memory://x/y")
    memory.write_bytes(b"1")
    assert as_path(str(memory)) == memory
    assert memory.version().size == 1


def test_errors_say_what_would_work(s3: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectStoreError, match="nosuch://a/b cannot be used: fsspec knows no protocol nosuch://"):
        ObjectPath("nosuch://a/b").read_bytes()
    monkeypatch.setattr(path, "_filesystems", {})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        patch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
        with pytest.raises(ObjectStoreError, match=r"needs the package s3fs, .*; pip install .*\[s3\]'"):
            s3.folder().exists()
        assert path.url_problem("s3://bucket/name") == (
            "s3:// needs the package s3fs, which is not installed", install_command("s3")
        )  # fmt: skip
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        with pytest.raises(ObjectStoreError, match="credentials with access to it are needed, in AWS_ACCESS_KEY_ID"):
            s3.folder().exists()


def test_transient_errors_are_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(path, "DELAYS", (0.01, 0.01))
    found, failures = ObjectPath("memory://z"), [ConnectionError("one"), TimeoutError("two")]
    found.write_bytes(b"1")
    fs = path.filesystem("memory://z")
    read = fs.cat_file

    def cat_file(*arguments: object, **options: object) -> bytes:
        if failures:
            raise failures.pop(0)
        return read(*arguments, **options)

    monkeypatch.setattr(fs, "cat_file", cat_file)
    assert found._call(lambda fs, name: fs.cat_file(name), path.DELAYS) == b"1"
    assert [record.getMessage() for record in caplog.records] == [
        "memory://z: ConnectionError: one; next attempt in 0.01 s",
        "memory://z: TimeoutError: two; next attempt in 0.01 s",
    ]
    failures[:] = [ConnectionError("again")] * 3
    with pytest.raises(ObjectStoreError, match="memory://z cannot be used: ConnectionError: again") as raised:
        found._call(lambda fs, name: fs.cat_file(name), path.DELAYS)
    assert raised.value.is_transient
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.is_transient) == (str(raised.value), True)
