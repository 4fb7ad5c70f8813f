"""Writing through links and into devices, reading no more than allowed, sweeping what killed writers left."""

import os
import stat
import threading
import time

import pytest

from soapjax.errors import SoapjaxError
from soapjax.helpers import files


def listed(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    link.symlink_to("there/target")
    files.write_text_atomic(link, "new")  # the target is not there yet
    before = target.stat().st_ino
    files.write_text_atomic(link, "newer")
    assert link.is_symlink() and target.read_text() == "newer" and target.stat().st_ino != before
    assert listed(tmp_path) == ["link", "there"] and listed(tmp_path / "there") == ["target"]


def test_a_file_keeps_its_rights_and_a_new_one_has_the_usual(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("x")
    old.chmod(0o600)
    umask = os.umask(0o027)
    try:
        for path in (old, new):
            files.write_text_atomic(path, "y")
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (old, new)] == [0o600, 0o640]


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
    thread.start()
    files.write_text_atomic(pipe, "text" * 100_000)
    thread.join(20)
    assert read == ["text" * 100_000] and stat.S_ISFIFO(pipe.stat().st_mode) and listed(tmp_path) == ["pipe"]


def test_a_pipe_that_nobody_reads_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "READER_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SoapjaxError, match="nobody reads"):
        files.write_text_atomic(tmp_path / "pipe", "text")


def test_a_device_and_a_descriptor_are_written_into(tmp_path):
    files.write_text_atomic("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(SoapjaxError, match="No space left"):
        files.write_text_atomic("/dev/full", "text")
    with (tmp_path / "out").open("w+") as f:
        f.write("before ")
        f.flush()
        files.write_text_atomic(f"/dev/fd/{f.fileno()}", "text")
    assert (tmp_path / "out").read_text() == "before text"


@pytest.mark.parametrize("is_nameless", [True, False])
def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch, is_nameless):
    path = tmp_path / "file"
    path.write_text("old")
    if not is_nameless:
        monkeypatch.setattr(files, "_nameless", lambda folder: -1)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(SoapjaxError, match="No space left"):
                files.write_text_atomic(path, "new")
        assert path.read_text() == "old" and listed(tmp_path) == ["file"]
    files.write_text_atomic(path, "new")
    assert path.read_text() == "new" and listed(tmp_path) == ["file"]


def test_only_old_temporary_files_of_ours_are_swept(tmp_path):
    names = [".soapjax-0123456789abcdef.tmp", ".soapjax-1123456789abcdef.tmp", ".soapjax-2.tmp", ".other.tmp", "kept"]
    for name in names:
        (tmp_path / name).write_text("x")
        if not name.startswith(".soapjax-1"):
            os.utime(tmp_path / name, (time.time() - 2 * files.ORPHAN_S,) * 2)
    files.write_text_atomic(tmp_path / "file", "text")
    assert listed(tmp_path) == sorted([*names[1:], "file"])


def test_what_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as f:
        f.truncate(2**40)
    begin = time.monotonic()
    with pytest.raises(SoapjaxError, match=r"at most 1000 bytes"):
        files.read_text(path, max_bytes=1000)
    assert time.monotonic() - begin < 1
    for special in ("/dev/zero", str(tmp_path)):
        with pytest.raises(SoapjaxError, match="a device or pipe|a folder"):
            files.read_text(special)
    with pytest.raises(SoapjaxError, match="null byte"):
        files.read_text("a\0b")
