"""Network namespaces by system call: made in a thread, kept by a mount, entered by a thread.

A namespace belongs to a thread, not to a process, so making and entering one needs no fork.
After `enter`, ``/proc/net`` and ``/sys`` still show the process leader's namespace; only
``/proc/thread-self/net`` and ``/proc/sys/net`` follow the thread (proc(5); net_ctl_root's lookup
in net/sysctl_net.c uses current's namespaces).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from netlab.errors import KernelError

DIRECTORY = Path("/run/netns")
PREFIX = "netlab"

_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_NS_GET_NSTYPE = 0xB703
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SLAVE = 1 << 19
_MS_SHARED = 1 << 20
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

_INSTANCE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,40}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]{0,62}")
_FILE = re.compile(rf"{PREFIX}\.({_INSTANCE.pattern})\.({_NAME.pattern})")

_T = TypeVar("_T")
_libc = ctypes.CDLL(None, use_errno=True)


def check_instance(name: str) -> None:
    """Refuse a name that could mean another file or another instance.

    Raises:
        KernelError
    """
    if not _INSTANCE.fullmatch(name):
        raise KernelError(f"{name!r} cannot name an instance: a-z, 0-9 and '-', at most 42")


def path(instance: str, netns: str) -> Path:
    """The file that holds the namespace; the name is also what ``ip netns`` knows it by.

    Raises:
        KernelError: a name that could mean another file or another instance.
    """
    check_instance(instance)
    if not _NAME.fullmatch(netns):
        raise KernelError(f"{netns!r} cannot name a network namespace")
    return DIRECTORY / f"{PREFIX}.{instance}.{netns}"


def files() -> Iterator[tuple[str, str, Path]]:
    """(instance, netns, file) of every name that could be a lab's; ownership is not checked."""
    with suppress(FileNotFoundError), os.scandir(DIRECTORY) as entries:
        for entry in entries:
            match = _FILE.fullmatch(entry.name)
            if match:
                yield match[1], match[2], DIRECTORY / entry.name


def open_file(file: Path) -> int:
    """A descriptor of the namespace that is mounted on *file*; a link is not followed.

    Raises:
        OSError: no such file, or (ENOTTY) nothing is mounted on it.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        kind = fcntl.ioctl(descriptor, _NS_GET_NSTYPE)
    except OSError:
        kind = 0
    if kind != _CLONE_NEWNET:
        os.close(descriptor)
        raise OSError(errno.ENOTTY, "not a network namespace")
    return descriptor


def switch(descriptor: int) -> None:
    """Put the current thread into the namespace, for good."""
    _call(_libc.setns, descriptor, _CLONE_NEWNET)


def unshare() -> None:
    """Put the current thread into a new, empty namespace, for good."""
    _call(_libc.unshare, _CLONE_NEWNET)


@contextmanager
def entered(descriptor: int) -> Iterator[None]:
    """The current thread is in the namespace for the time of the block, then back where it was."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        switch(descriptor)
        yield
    finally:
        try:
            switch(before)
        finally:
            os.close(before)


@contextmanager
def enter(instance: str, netns: str) -> Iterator[None]:
    """The current thread is in the lab's namespace for the time of the block.

    Sockets made inside stay there. Other threads are not moved.

    Raises:
        KernelError: the instance has no such namespace.
    """
    try:
        descriptor = open_file(path(instance, netns))
    except OSError as error:
        raise KernelError(f"{instance}: no network namespace {netns}: {error.strerror}") from None
    try:
        with entered(descriptor):
            yield
    finally:
        os.close(descriptor)


def in_thread(work: Callable[[], _T]) -> Future[_T]:
    """Run *work* in a thread of its own, which may change its namespace and then ends."""
    future: Future[_T] = Future()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            future.set_exception(error)

    threading.Thread(target=body, name="netlab").start()
    return future


def in_scratch(work: Callable[[], _T]) -> Future[_T]:
    """Run *work* in a new namespace that has no name and ends with it."""

    def body() -> _T:
        unshare()
        return work()

    return in_thread(body)


def prepare_directory() -> None:
    """Make /run/netns a shared mount as iproute2 does (ip/ipnetns.c, netns_add).

    So a namespace that is removed here is gone in every other mount namespace too, and none of
    them keeps it alive.
    """
    DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    held = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    target = os.fsencode(DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            _call(_libc.mount, b"", target, b"none", _MS_SHARED | _MS_REC, None)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _call(_libc.mount, target, target, b"none", _MS_BIND | _MS_REC, None)
            _call(_libc.mount, b"", target, b"none", _MS_SHARED | _MS_REC, None)
    finally:
        os.close(held)


def keep(file: Path) -> None:
    """Mount the current thread's namespace on *file*, which must not exist yet.

    Raises:
        OSError: EEXIST, also where *file* is a link to nowhere.
    """
    flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0)
    try:
        target = f"/proc/thread-self/fd/{descriptor}".encode()
        _call(_libc.mount, b"/proc/thread-self/ns/net", target, b"none", _MS_BIND, None)
    except BaseException:
        file.unlink()
        raise
    finally:
        os.close(descriptor)


def remove(file: Path) -> None:
    """Unmount *file* however often it is mounted, and unlink it; the kernel cleans up later."""
    try:
        while True:
            _call(_libc.umount2, os.fsencode(file), _MNT_DETACH | _UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOENT}:
            raise
    file.unlink(missing_ok=True)


def show_own_sys(name: str) -> None:
    """Give this process a /sys of its own namespace, as ``ip netns exec`` does.

    Where there is no /sys to replace (a bare chroot), it stays as it is.
    """
    _call(_libc.unshare, _CLONE_NEWNS)
    with suppress(OSError):
        _call(_libc.mount, b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
        flags = os.statvfs("/sys").f_flag & os.ST_RDONLY
        _call(_libc.umount2, b"/sys", _MNT_DETACH)
        _call(_libc.mount, name.encode(), b"/sys", b"sysfs", flags, None)


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
