"""Executables on disk, for this user only: reading one is to run what it holds, so that only what this user wrote is read.

They lie in a folder that nobody else may enter. Folder and file are opened without following links, and their owner and
rights are looked at before every read, on what was opened: what another user owns, or others may write to, is not read.

A file holds the sum of its key and of what is kept, then that. It is named by the key; under another program's
name the sum is wrong. It appears whole or not at all; what a killed writer left is swept after a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_BYTES = 512 << 20  # of all kept programs; the oldest go first
ORPHAN_S = 24 * 3600.0  # a temporary file of this age has no writer any more
_CHECKSUM = 32  # bytes
_TEMPORARY = ".writing-"
_OWN_NAME = re.compile(rf"[0-9a-f]{{64}}|{re.escape(_TEMPORARY)}.*")
_OPEN = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK
_log = logging.getLogger(__name__)
_told: set[str] = set()
_swept: set[Path] = set()


def read_program(folder: Path, key: str) -> bytes | None:
    """What was kept under a key; None where there is nothing, where it is damaged or another's, or may be anybody's."""
    with _opened_folder(folder) as at:
        if at is None:
            return None
        if folder not in _swept:
            _swept.add(folder)
            _sweep(at)
        try:
            fd = os.open(key, _OPEN, dir_fd=at)
        except FileNotFoundError:
            return None
        except OSError as e:
            _tell(folder, f"{key[:12]} is not read: {e.strerror}")
            return None
        with os.fdopen(fd, "rb") as file:
            if reason := _not_own(os.fstat(fd), stat.S_ISREG):
                _tell(folder, f"{key[:12]} is not read: {reason}")
                return None
            try:
                data = file.read(MAX_BYTES + 1)
            except OSError:
                return None
    kept = data[_CHECKSUM:]
    return kept if data[:_CHECKSUM] == _sum(key, kept) else None


def write_program(folder: Path, key: str, kept: bytes) -> None:
    """Keeps a program; where it cannot be written (a full disk, a folder that is not this user's) nothing is left behind."""
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    with _opened_folder(folder) as at:
        if at is None:
            return
        temporary = _TEMPORARY + secrets.token_hex(8)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at)
            with os.fdopen(fd, "wb") as file:
                file.write(_sum(key, kept) + kept)
            os.replace(temporary, key, src_dir_fd=at, dst_dir_fd=at)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=at)
        _sweep(at)


def drop_program(folder: Path, key: str) -> None:
    """Removes a program that does not run."""
    with _opened_folder(folder) as at, contextlib.suppress(OSError):
        if at is not None:
            os.unlink(key, dir_fd=at)


def _sum(key: str, kept: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + kept).digest()


@contextlib.contextmanager
def _opened_folder(folder: Path) -> Iterator[int | None]:
    """A descriptor of the folder, where there is one and it is this user's alone; else None."""
    try:
        fd = os.open(folder, _OPEN | os.O_DIRECTORY)
    except FileNotFoundError:
        yield None
        return
    except OSError as e:  # a link, or no folder
        _tell(folder, "a link" if folder.is_symlink() else e.strerror or str(e))
        yield None
        return
    try:
        found = os.fstat(fd)
        if reason := _not_own(found, stat.S_ISDIR):
            _tell(folder, reason)
            yield None
        else:
            if stat.S_IMODE(found.st_mode) != 0o700:  # older versions left it to the umask: others may read, not write
                with contextlib.suppress(OSError):
                    os.fchmod(fd, 0o700)
            yield fd
    finally:
        os.close(fd)


def _not_own(found: os.stat_result, is_kind: Callable[[int], bool]) -> str:
    """Why something that was opened is not read; "" where it may be."""
    if not is_kind(found.st_mode):
        return "of another kind"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _tell(folder: Path, reason: str) -> None:
    """One line, once."""
    line = f"soapjax: programs kept in {folder} are not used, and compiled anew: {reason}; remove it or chmod -R go= it"
    if line not in _told:
        _told.add(line)
        _log.warning(line)


def _sweep(at: int) -> None:
    """Removes what killed writers left, and the oldest programs beyond the limit; other files in the folder are somebody else's."""
    total, now, found = 0, time.time(), []
    for name in os.listdir(at):
        with contextlib.suppress(OSError):  # another process sweeps too
            of = os.stat(name, dir_fd=at, follow_symlinks=False)
            if stat.S_ISREG(of.st_mode) and _OWN_NAME.fullmatch(name):
                found.append((of.st_mtime, of.st_size, name))
    for modified, size, name in sorted(found, reverse=True):
        total += size
        is_orphan = name.startswith(_TEMPORARY) and now - modified > ORPHAN_S
        if is_orphan or total > MAX_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=at)
