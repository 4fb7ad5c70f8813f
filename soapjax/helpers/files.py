"""Reading and writing files so that bad input never loses anything.

Writes are atomic: a file without a name where the file system has such (Linux' O_TMPFILE), else a temporary one beside the target,
flushed, then put in the target's place. They go *through* symbolic links, whose target is replaced, and *into* devices, pipes and
descriptors (/dev/stdout), which stay what they are. Reads are bounded in size, must be UTF-8, and report what is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from soapjax.errors import Problem, SoapjaxError

OWN_FOLDER = Path(__file__).resolve().parents[1]  # of the package
MAX_TEXT_BYTES = 64 * 2**20
READER_S = 10.0  # how long a named pipe may wait for somebody who reads it
ORPHAN_S = 24 * 3600.0
_TEMPORARY = ".soapjax-"  # and 16 hexadecimal digits, and ".tmp"


def cached(name: str) -> Path:
    """The user's folder of that name: in `$SOAPJAX_CACHE`, or in ~/.cache/soapjax (`$XDG_CACHE_HOME` for ~/.cache)."""
    if own := os.environ.get("SOAPJAX_CACHE"):
        return Path(own) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soapjax" / name


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Replaces what `path` leads to by `text` in one step; readers see the old file or the new one, never half.

    A device or pipe is written into. Temporary files beside the target that killed writers left a day ago or longer are removed.

    Raises: SoapjaxError where the folder is missing or not writable; the old file stays.
    """
    try:
        if into := special_file(path):
            _write_into(into, text)
        else:
            _replace(os.path.realpath(path), text)
    except OSError as e:
        raise SoapjaxError(
            Problem(os.fspath(path), e.strerror or str(e), "a writable place", "choose another output path, or free space there")
        ) from None


def special_file(path: str | os.PathLike[str]) -> str | None:
    """What to open where `path` leads to something that is written into: a device, a pipe, or a descriptor of this process."""
    path = os.fspath(path)
    for _ in range(40):  # as many links as Linux follows
        if os.path.realpath(os.path.dirname(path)).startswith("/proc/"):
            return path
        if not os.path.islink(path):
            break
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else path


def _write_into(path: str, text: str) -> None:
    begin = time.monotonic()
    while True:
        try:  # not blocking: a pipe that nobody reads would hang
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            break
        except OSError as e:
            if e.errno != errno.ENXIO:
                raise
            if time.monotonic() - begin > READER_S:
                raise OSError(e.errno, f"a pipe or device that nobody reads for {READER_S:.0f} s") from None
            time.sleep(0.05)
    os.set_blocking(fd, True)
    with os.fdopen(fd, "wb") as f:
        f.write(text.encode())


def _replace(target: str, text: str) -> None:
    folder = os.path.dirname(target)
    sweep_orphans(folder)
    temporary = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}.tmp")
    try:
        fd = _nameless(folder)
        if has_name := fd < 0:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb") as f:
            f.write(text.encode())
            with contextlib.suppress(OSError):  # a file keeps the rights that it has
                os.fchmod(f.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            f.flush()
            os.fsync(f.fileno())
            if not has_name:
                _give_name(f.fileno(), temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _nameless(folder: str) -> int:
    """A file that no folder lists, so that not even a killed process leaves it behind; -1 where there is no such thing."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666) if os.path.isdir("/proc/self/fd") else -1
    except (OSError, AttributeError):
        return -1


def _give_name(fd: int, path: str) -> None:
    """Raises: FileExistsError where there is such a file."""
    # Only beside a folder's descriptor does os.link follow the symbolic link to the open file.
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", os.path.basename(path), dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def sweep_orphans(folder: str | os.PathLike[str]) -> None:
    """Removes the temporary files of writers that were killed a day ago or longer; a younger one may be under way."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        name = entry.name
        if name.startswith(_TEMPORARY) and name.endswith(".tmp") and len(name) == len(_TEMPORARY) + 20:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and time.time() - entry.stat().st_mtime > ORPHAN_S:
                    os.unlink(entry.path)


def write_new_text(path: str | os.PathLike[str], text: str, *, is_same: Callable[[], bool]) -> None:
    """Adds a file that is named by its contents; one that is there already stays if `is_same()`, else it is replaced.

    Raises: SoapjaxError where the folder is missing or not writable.
    """
    if not (os.path.lexists(path) and is_same()):
        write_text_atomic(path, text)


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a UTF-8 file of at most `max_bytes`.

    Raises: SoapjaxError where the file is missing, too large, not a plain file or not UTF-8.
    """
    data = read_bytes(path, max_bytes=max_bytes)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise SoapjaxError(
            Problem(f"{path}: byte {e.start}", "bytes that are not UTF-8", "UTF-8 text", "save the file as UTF-8, or make it anew")
        ) from None


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """What is in a plain file of at most `max_bytes`; a larger one is not read.

    Raises: SoapjaxError where the file is missing, too large or not a plain file.
    """
    place = os.fspath(path)
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode):
            remedy = "save what it gives in a file first"
            raise SoapjaxError(Problem(place, "a folder" if stat.S_ISDIR(mode) else "a device or pipe", "a plain file", remedy))
        with open(path, "rb") as f:
            if (size := os.fstat(f.fileno()).st_size) > max_bytes:
                raise SoapjaxError(too_large(place, f"{size} bytes", max_bytes))
            data = f.read(max_bytes + 1)  # it may have grown, and /proc says 0
        if len(data) > max_bytes:
            raise SoapjaxError(too_large(place, f"more than {max_bytes} bytes", max_bytes))
        return data
    except (FileNotFoundError, NotADirectoryError):
        raise SoapjaxError(Problem(place, "nothing there", "a file", "check the path")) from None
    except ValueError as e:
        if isinstance(e, SoapjaxError):
            raise
        raise SoapjaxError(Problem(repr(place), str(e), "a path", "check the path")) from None  # a zero byte in it
    except OSError as e:
        raise SoapjaxError(Problem(place, e.strerror or str(e), "a readable file", "check the path and its rights")) from None


def too_large(place: str, size: str, max_bytes: int) -> Problem:
    return Problem(place, size, f"at most {max_bytes} bytes", "this is not a file that soapjax wrote; larger ones are not read")
