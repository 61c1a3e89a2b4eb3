"""Whose a network namespace is, and what netlab keeps under /run.

A namespace belongs to a lab if its file has the lab's prefix and its loopback carries the lab's
stamp, ``netlab INSTANCE HASH``. The first one made carries the final mark as well, behind the
stamp: ``up EPOCH COUNT``. The files under /run/netlab are conveniences: everything that is decided
here is decided by what the kernel holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from netlab.errors import Busy, KernelError, MissingFeature
from netlab.kernel import namespaces, processes, rtnetlink
from netlab.kernel.rtnetlink import Socket

RUN = Path("/run/netlab")

_COMMAND_MAX = 200
NOT_ROOT = "network namespaces need root: run the same command with sudo"


@dataclass(frozen=True, slots=True)
class Instance:
    """A lab as the kernel holds it; *netns*: the lab's own names, sorted.

    *state* ``incomplete``: `apply` did not get to its end, or a namespace is gone since.
    """

    name: str
    plan_hash: str
    state: Literal["up", "incomplete"]
    netns: tuple[str, ...]
    up_since: datetime | None


@dataclass(frozen=True, slots=True)
class _Stamp:
    instance: str
    plan_hash: str
    up_since: datetime | None = None
    count: int = 0

    @classmethod
    def parse(cls, alias: str) -> _Stamp | None:
        parts = alias.split(" ")
        if len(parts) not in {3, 6} or parts[0] != namespaces.PREFIX:
            return None
        if len(parts) == 3:
            return cls(parts[1], parts[2])
        if parts[3] != "up" or not parts[4].isdecimal() or not parts[5].isdecimal():
            return None
        since = datetime.fromtimestamp(int(parts[4]), tz=UTC)
        return cls(parts[1], parts[2], since, int(parts[5]))


@dataclass(frozen=True, slots=True)
class _Found:
    """A lab's file. *inode*: of the namespace mounted on it; None: nothing is mounted."""

    netns: str
    file: Path
    inode: int | None
    stamp: _Stamp | None


def stamp(instance: str, plan_hash: str) -> str:
    """What loopback's alias says in every namespace of the lab."""
    return f"{namespaces.PREFIX} {instance} {plan_hash}"


def final_mark(instance: str, plan_hash: str, now: datetime, count: int) -> str:
    """What the first namespace's says when the lab is complete: since when, how many they are."""
    return f"{stamp(instance, plan_hash)} up {int(now.timestamp())} {count}"


def instances() -> tuple[Instance, ...]:
    """All labs of this machine, by name, from the kernel alone."""
    found: dict[str, list[_Found]] = {}
    for instance, item in _scan():
        found.setdefault(instance, []).append(item)
    return tuple(_instance(name, items) for name, items in sorted(found.items()))


def _instance(name: str, items: list[_Found]) -> Instance:
    stamps = [item.stamp for item in items if item.stamp]
    final = next((one for one in stamps if one.up_since), None)
    up = final is not None and final.count == len(items)
    return Instance(
        name=name,
        plan_hash=final.plan_hash if final else stamps[0].plan_hash if stamps else "",
        state="up" if up else "incomplete",
        netns=tuple(sorted(item.netns for item in items if item.stamp)),
        up_since=final.up_since if final else None,
    )


def inodes(instance: str) -> dict[str, int]:
    """The instance's namespaces: the lab's name of it -> inode."""
    return {item.netns: item.inode for _, item in _scan(instance) if item.inode}


def teardown(instance: str) -> bool:
    """End the instance's programs and remove its namespaces; False where there was nothing.

    Only namespaces with the instance's prefix and stamp, and files with the prefix on which
    nothing is mounted. The kernel dismantles what was in them by and by.

    Raises:
        KernelError: a program cannot be killed.
    """
    namespaces.check_instance(instance)
    found = [item for _, item in _scan(instance)]
    processes.end_all(instance, {item.inode for item in found if item.inode})
    for item in found:
        namespaces.remove(item.file)
    return clear(instance) or bool(found)


def clear(instance: str) -> bool:
    """Remove what `store` keeps; False where there was nothing."""
    directory = RUN / instance
    if directory.is_symlink() or not directory.is_dir():
        return False
    shutil.rmtree(directory)
    return True


def _scan(wanted: str | None = None) -> Iterator[tuple[str, _Found]]:
    """(instance, file) of what is a lab's by `namespaces.files` and its stamp."""
    for instance, netns, file in namespaces.files():
        if wanted is not None and instance != wanted:
            continue
        try:
            descriptor = namespaces.open_file(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENOTTY and _is_leftover(file):
                yield instance, _Found(netns, file, None, None)
            continue
        try:
            read = _read_stamp(descriptor)
            if read is not None and read.instance == instance:
                yield instance, _Found(netns, file, os.fstat(descriptor).st_ino, read)
        finally:
            os.close(descriptor)


def _is_leftover(file: Path) -> bool:
    """The empty file that a crash between creating and mounting leaves."""
    with suppress(FileNotFoundError):
        status = file.lstat()
        return stat.S_ISREG(status.st_mode) and not status.st_size
    return False


def _read_stamp(descriptor: int) -> _Stamp | None:
    try:
        with namespaces.entered(descriptor):
            socket = Socket()
    except PermissionError:
        raise MissingFeature(NOT_ROOT) from None
    with socket:
        mask = rtnetlink.u32(rtnetlink.IFLA_EXT_MASK, rtnetlink.SKIP_STATS)
        message = socket.get("link", rtnetlink.fields("link", 0, 0, 1, 0, 0), mask)
    alias = dict(rtnetlink.attributes("link", message)).get(rtnetlink.IFLA_IFALIAS, b"")
    return _Stamp.parse(alias.rstrip(b"\0").decode(errors="replace"))


def store(instance: str, files: Mapping[str, bytes]) -> Path:
    """Make the instance's directory under /run, with *files* in it; only root can read it.

    Raises:
        OSError: it is there already.
    """
    directory = _own_directory() / instance
    directory.mkdir(mode=0o700)
    for name, content in files.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(directory / _plain(name), flags, 0o600), "wb") as file:
            file.write(content)
    return directory


def stored(instance: str, file: str) -> bytes | None:
    """What `apply` was given as *file*; None where it is gone."""
    namespaces.check_instance(instance)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(RUN / instance / _plain(file), flags)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        return opened.read()


@contextmanager
def lock(instance: str) -> Iterator[None]:
    """Keep other commands off the instance for the time of the block.

    Raises:
        Busy: another command has it; the message names its process.
    """
    namespaces.check_instance(instance)
    file = _own_directory() / f"{instance}.lock"
    descriptor = _locked(instance, file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(instance: str, file: Path) -> int:
    """A descriptor with the lock on *file*, which is the one that others meet at that path."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(file, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), file.stat()):
                    return descriptor
        except BlockingIOError:
            holder = _holder(os.fstat(descriptor))
            os.close(descriptor)
            raise Busy(f"{instance}: another command is at work on it{holder}") from None
        os.close(descriptor)


def _holder(status: os.stat_result) -> str:
    """Who holds the lock, from /proc/locks: ``: process 4711 (cni-netlab up x)``."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "FLOCK" in words and device in words and "->" not in words:
            pid = int(words[words.index(device) - 1])
            command = " ".join(" ".join(processes.arguments(pid)).split())
            return f": process {pid} ({command[:_COMMAND_MAX] or 'gone'})"
    return ""


def _plain(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise KernelError(f"{name!r} is no name for a stored file")
    return name


def _own_directory() -> Path:
    """/run/netlab, root's own.

    Raises:
        MissingFeature: not root.
        KernelError: something else is there.
    """
    if os.geteuid() != 0:
        raise MissingFeature(NOT_ROOT)
    with suppress(FileExistsError):
        RUN.mkdir(mode=0o700, parents=True)
    status = RUN.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise KernelError(f"{RUN} is not a directory of this user's own")
    return RUN
