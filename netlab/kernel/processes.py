"""Programs in a lab's namespaces: run, follow to the end, start for good, end all of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, TypeAlias

from netlab.errors import KernelError
from netlab.kernel import namespaces

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_EXECUTABLE, _NOT_FOUND, _SIGNALLED = 126, 127, 128
_ROUNDS = 100
_KILL_SECONDS = 10

_Mask: TypeAlias = Collection[int]
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)

_started: dict[str, list[subprocess.Popen[bytes]]] = {}
"""By instance, the children that outlive `apply`: this process must collect them when they end."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A program that ended; *timed_out*: it was killed when its time was over."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


def environment() -> dict[str, str]:
    """What a program gets: where programs are, and English messages; no proxies, no locale."""
    found = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    parts = dict.fromkeys([*found, *_SYSTEM_PATH.split(os.pathsep)])
    return {"PATH": os.pathsep.join(parts), "LC_ALL": "C"}


def run(
    instance: str,
    netns: str,
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,  # noqa: A002 - subprocess' word
    env: Mapping[str, str] | None = None,
) -> Completed:
    """Run a program in the namespace; any number of threads may do so at once.

    After *timeout* seconds it is killed, with its children. *input* is its standard input (None:
    empty), *env* is added to `environment`.

    Raises:
        KernelError: no such namespace, or the program cannot be started.
    """
    begin = time.perf_counter()
    process = _begin(instance, netns, argv, with_input=input is not None, env=env or {})
    given = None if input is None else input.encode()
    with process:
        try:
            out, err = process.communicate(given, timeout=timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
            _kill_group(process)
            out, err = process.communicate()
        except BaseException:
            _kill_group(process)
            raise
    seconds = time.perf_counter() - begin
    text = (out.decode(errors="replace"), err.decode(errors="replace"))
    return Completed(process.returncode, *text, seconds, late)


def _begin(
    instance: str, netns: str, argv: Sequence[str], *, with_input: bool, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        with namespaces.enter(instance, netns):
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment(), **env},
                start_new_session=True,
            )
    except OSError as error:
        raise KernelError(f"{netns}: cannot run {argv[0]}: {error.strerror}") from None


def execute(instance: str, netns: str, argv: Sequence[str]) -> int:
    """Run a program in the namespace on this terminal, with a /sys of the namespace's own.

    Returns:
        Its exit code; 127 not found, 126 not executable, 128 + n where signal n ended it.

    Raises:
        KernelError: no such namespace.
    """
    file = namespaces.path(instance, netns)
    try:
        descriptor = namespaces.open_file(file)
    except OSError as error:
        raise KernelError(f"{instance}: no network namespace {netns}: {error.strerror}") from None
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if not child:
        _become(descriptor, file.name, argv, mask)
    os.close(descriptor)
    with _forwarding(child, mask):
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _SIGNALLED - code


def _become(descriptor: int, name: str, argv: Sequence[str], mask: _Mask) -> NoReturn:
    """Replace this (forked) process by the program; never return to the parent's code."""
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for number in _PASSED_ON:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        namespaces.switch(descriptor)
        namespaces.show_own_sys(name)
        os.execvp(argv[0], list(argv))  # noqa: S606 - no shell between a user and the program
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: not found\n".encode())
        os._exit(_NOT_FOUND)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_EXECUTABLE)
    finally:
        os._exit(_NOT_EXECUTABLE)


@contextmanager
def _forwarding(child: int, mask: _Mask) -> Iterator[None]:
    """SIGTERM and SIGHUP go to *child*; the terminal's own signals reach it anyway.

    They were held back since before the fork, so that none ends this process alone; *mask* lets
    them through again.
    """

    def forward(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in (signal.SIGINT, signal.SIGQUIT):
        before[number] = signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(
    instance: str,
    descriptor: int,
    argv: Sequence[str],
    log: Path,
    *,
    pipes: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program that stays, in the namespace of *descriptor*, with its messages in *log*.

    Its own session, its own descriptors and `environment` only. With *pipes*, standard input and
    output are pipes to it; else input is empty and output goes to *log*.

    Raises:
        OSError
    """
    with ExitStack() as stack:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        output: IO[bytes] = stack.enter_context(os.fdopen(os.open(log, flags, 0o600), "wb"))
        stack.enter_context(namespaces.entered(descriptor))
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else output,
            stderr=output,
            cwd="/",
            env=environment(),
            start_new_session=True,
        )
    _started.setdefault(instance, []).append(process)
    return process


def living_in(inodes: Collection[int]) -> dict[int, int]:
    """Processes whose leader lives in one of the namespaces: pid -> the namespace's inode."""
    found: dict[int, int] = {}
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                inode = _namespace_of(int(entry.name))
                if inode in inodes:
                    found[int(entry.name)] = inode
    found.pop(os.getpid(), None)
    return found


def arguments(pid: int) -> tuple[str, ...]:
    """The process' command line; empty where it is gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(part.decode(errors="replace") for part in text.rstrip(b"\0").split(b"\0"))


def end_all(instance: str, inodes: Collection[int]) -> None:
    """Kill every process that lives in one of the namespaces, and wait until none is left.

    Raises:
        KernelError: one cannot be killed, or new ones appear faster than they die.
    """
    for _ in range(_ROUNDS):
        living = living_in(inodes)
        if not living:
            break
        _end(living)
    else:
        raise KernelError(f"{instance}: new processes appear in it faster than they can be killed")
    for process in _started.pop(instance, ()):
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        process.wait()


def _end(living: Mapping[int, int]) -> None:
    """Kill the processes (pid -> namespace) and wait for their end."""
    handles: dict[int, int] = {}
    try:
        for pid, inode in living.items():
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                # Only now is the number safe from reuse: whoever has it must still live there.
                if _namespace_of(pid) == inode:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    handles[handle] = pid
                else:
                    os.close(handle)
        _wait(handles)
    finally:
        for handle in handles:
            os.close(handle)


def _wait(handles: Mapping[int, int]) -> None:
    """Until every pidfd has become readable, which says that its process has ended."""
    poll = select.poll()
    left = dict(handles)
    for handle in left:
        poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + _KILL_SECONDS
    while left:
        ready = poll.poll(max(0, deadline - time.monotonic()) * 1000)
        if not ready:
            pids = ", ".join(map(str, left.values()))
            raise KernelError(f"killed, but still there: process {pids}")
        for handle, _ in ready:
            poll.unregister(handle)
            del left[handle]


def _namespace_of(pid: int) -> int:
    """Inode of the network namespace in which the process' leader lives, 0 where it is gone."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a program that was started as the leader of its own group, with its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
