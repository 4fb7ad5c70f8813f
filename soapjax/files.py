"""Reading and writing files so that bad input never loses anything.

Writes are atomic: a temporary file beside the target, flushed, then renamed.
Reads are bounded in size, must be UTF-8, and report what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from soapjax.errors import Problem, SoapjaxError

MAX_TEXT_BYTES = 64 * 2**20


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Replaces `path` by `text` in one step; readers see the old file or the new one, never half.

    Raises: SoapjaxError where the folder is missing or not writable; the old file stays.
    """
    target = Path(path)
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(dir=target.parent or ".", prefix=f".{target.name}.", suffix=".tmp")
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except OSError as e:
        raise SoapjaxError(
            Problem(str(target), e.strerror or str(e), "a writable place", "choose another output path, or free space there")
        ) from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def write_new_text(path: str | os.PathLike[str], text: str, *, is_same: Callable[[], bool]) -> None:
    """Adds a file that is named by its contents; one that is there already stays if `is_same()`, else it is replaced.

    Where the file system can (Linux' O_TMPFILE), the file has no name until it is complete: not even a killed process
    leaves anything behind. Elsewhere as `write_text_atomic`, whose errors it raises.
    """
    target = Path(path)
    fd = -1
    try:
        with contextlib.suppress(OSError, AttributeError):
            fd = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
        if fd < 0:
            write_text_atomic(path, text)
            return
        with os.fdopen(fd, "wb") as f:
            f.write(text.encode())
            f.flush()
            os.fsync(f.fileno())
            # Only beside a folder's descriptor does os.link follow the symbolic link to the open file.
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.link(f"/proc/self/fd/{f.fileno()}", target.name, dst_dir_fd=folder, follow_symlinks=True)
            except FileExistsError:
                if not is_same():
                    write_text_atomic(path, text)
            finally:
                os.close(folder)
    except OSError as e:
        raise SoapjaxError(
            Problem(str(target), e.strerror or str(e), "a writable place", "choose another place, or free space there")
        ) from None


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a UTF-8 file of at most `max_bytes`.

    Raises: SoapjaxError where the file is missing, too large, not a plain file or not UTF-8.
    """
    target = Path(path)
    try:
        if not target.is_file():
            kind = "a folder" if target.is_dir() else "nothing there"
            raise SoapjaxError(Problem(str(target), kind, "a file", "check the path"))
        size = target.stat().st_size
        if size > max_bytes:
            raise SoapjaxError(
                Problem(str(target), f"{size} bytes", f"at most {max_bytes} bytes", "this is not a file that soapjax wrote")
            )
        return target.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise SoapjaxError(
            Problem(
                f"{target}: byte {e.start}", "bytes that are not UTF-8", "UTF-8 text", "save the file as UTF-8, or make it anew"
            )
        ) from None
    except OSError as e:
        raise SoapjaxError(Problem(str(target), e.strerror or str(e), "a readable file", "check the path and its rights")) from None
