import errno
import io
import os
import sys
from pathlib import Path

import fsspec
import pytest

from agentrl.errors import ConfigError, StoreError
from agentrl.remote_io import RemotePath, check_store, upload_folder
from tests.fakes.stores import download, memory_store


def fill(folder: RemotePath, **files: str) -> RemotePath:
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return folder


def test_folder_lists_its_files_and_folders_and_an_absent_one_is_empty():
    run = memory_store()
    assert (run.is_dir(), run.file_sizes(), run.folders()) == (False, {}, [])
    fill(run, started="now")
    fill(run / "a", one="1")
    assert run.file_sizes() == {"started": 3}
    assert run.folders() == [run / "a"]
    assert (run.is_dir(), (run / "started").is_file(), (run / "a").is_file()) == (True, True, False)
    assert (run / "a").parent == run


@pytest.mark.parametrize("size", [0, 5, 3 * 2**20 + 1])
def test_file_is_read_as_it_was_written(size: int):
    content, file = os.urandom(size), memory_store() / "file"
    with file.create() as stream:
        for start in range(0, size, 2**20):
            stream.write(content[start : start + 2**20])
    assert file.read_bytes() == content
    with file.open() as stream:
        assert stream.read() == content
        assert stream.seek(size // 2) == size // 2
        assert stream.read(7) == content[size // 2 :][:7]
        assert stream.seek(0, io.SEEK_END) == size


def test_two_readers_of_one_file_do_not_disturb_each_other():
    file = memory_store() / "file"
    file.write_bytes(b"0123456789")
    with file.open() as one, file.open() as other:
        one.seek(4)
        assert (other.read(2), one.read(2), other.read(1)) == (b"01", b"45", b"2")


def test_missing_file_is_an_error_of_its_own():
    file = memory_store() / "none"
    for read in (file.read_bytes, file.open):
        with pytest.raises(FileNotFoundError, match="none") as caught:
            read()
        assert caught.value.errno == errno.ENOENT


def test_error_of_a_store_names_what_was_done_and_where(monkeypatch: pytest.MonkeyPatch):
    class NoCredentialsError(Exception):
        """An error of a package: not an `OSError`."""

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentialsError("no\ncredentials")

    file = memory_store() / "file"
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", refuse)
    with pytest.raises(StoreError) as caught:
        file.write_bytes(b"1")
    assert caught.value.details["reason"] == "NoCredentialsError: no credentials"
    assert caught.value.args[0].startswith(f"cannot write {file}: NoCredentialsError")
    with pytest.raises(ConfigError, match=r"cannot write to memory://.*no credentials") as refused:
        check_store(file.parent.url, key="trainer.default_remote_dir")
    assert refused.value.details["key"] == "trainer.default_remote_dir"


def test_store_that_takes_files_is_left_as_it_was():
    run = memory_store()
    check_store(run.url, key="trainer.default_remote_dir")
    assert run.file_sizes() == {}


@pytest.mark.parametrize(
    ("url", "reason"),
    [("nostore://a/b", "Protocol not known: nostore"), ("gs://bucket/run", "install gcsfs")],
)
def test_store_that_cannot_be_used_is_refused_by_its_key(
    url: str, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=f"cannot write to {url}: .*{reason}"):
        check_store(url, key="trainer.default_remote_dir")


def test_marker_is_removed_first_and_moved_last(monkeypatch: pytest.MonkeyPatch):
    memory = fsspec.get_filesystem_class("memory")
    events: list[str] = []
    for name in ("rm_file", "copy", "rm"):
        function = getattr(memory, name)

        def call(fs: object, path: str, *rest: object, _of=function, _name=name, **more: object):
            events.append(f"{_name} {path.rpartition('/')[2]}")
            return _of(fs, path, *rest, **more)

        monkeypatch.setattr(memory, name, call)
    run = memory_store()
    fill(run / "step", marker="m", a="1", z="2")
    events.clear()
    (run / "step").move_folder(run / "old", "marker")
    copies = [event for event in events if event.startswith("copy")]
    assert copies == ["copy a", "copy z", "copy marker"]
    assert events[3] == "rm_file marker"
    assert (run / "old").file_sizes() == {"a": 1, "z": 1, "marker": 1}
    assert not (run / "step").is_dir()


def test_uploaded_folder_replaces_the_earlier_one(tmp_path: Path):
    (tmp_path / "new/deep").mkdir(parents=True)
    for name in ("about.json", "weights", "deep/more"):
        (tmp_path / "new" / name).write_text(name)
    target = fill(memory_store() / "trained", stale="x", weights="old")
    upload_folder(tmp_path / "new", target, marker="about.json")
    copy = download(target, tmp_path / "copy")
    files = {p.relative_to(copy).as_posix(): p.read_text() for p in copy.rglob("*") if p.is_file()}
    assert files == {name: name for name in ("about.json", "weights", "deep/more")}


def test_interrupted_upload_has_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "about.json").write_text("{}")
    (tmp_path / "weights").write_text("new")
    target = fill(memory_store() / "trained", weights="old", **{"about.json": "{}"})

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("the line was cut")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refuse)
    with pytest.raises(StoreError, match="the line was cut"):
        upload_folder(tmp_path, target, marker="about.json")
    assert "about.json" not in target.file_sizes()
