"""Plan -> Linux: everything, or nothing.

Namespaces first, in a few threads. Then the rtnetlink objects one after another in plan order in
one thread, while the ipset and iptables programs (which wait for the kernel, and look at names
only) and the lab's server start beside it. At last what depends on both.
"""

from __future__ import annotations

import errno
import json
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from netlab.errors import KernelError
from netlab.kernel import namespaces, objects, ownership, processes, rulesets, words
from netlab.kernel.objects import Space
from netlab.kernel.rtnetlink import Socket
from netlab.plan import Command, IpSet, Listener, Netns, Object, Plan, Ruleset, Sysctl

AGENT = Path(__file__).parent.parent / "agent.py"

_MAKERS = 4
_AGENT_SECONDS = 20
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


class _Terminated(BaseException):
    """SIGTERM while a lab is half made."""


@dataclass
class _Job:
    """What the threads of one `apply` share."""

    plan: Plan
    instance: str
    directory: Path
    spaces: dict[str, Space] = field(default_factory=dict)
    children: rulesets.Children = field(default_factory=rulesets.Children)
    stopped: threading.Event = field(default_factory=threading.Event)
    agent: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        for space in self.spaces.values():
            space.close()

    def stop(self) -> None:
        self.stopped.set()
        self.children.stop()
        if self.agent:
            self.agent.kill()


def apply(plan: Plan, instance: str, *, files: Mapping[str, bytes] = _NO_FILES) -> None:
    """Create everything that *plan* says as *instance*; *files* are kept for `stored`.

    The caller holds the instance's `lock`.

    Raises:
        KernelError: the instance exists; or something could not be created, and the message names
            it and its reason. Whatever was made is gone again then, also after KeyboardInterrupt.
    """
    namespaces.check_instance(instance)
    present = sorted(netns for name, netns, _ in namespaces.files() if name == instance)
    if present:
        raise KernelError(f"{instance} exists: network namespace {present[0]}")
    with _undone_on_failure(instance), _sigterm_raises():
        ownership.clear(instance)
        directory = ownership.store(instance, files)
        _build(_Job(plan, instance, directory))


@contextmanager
def _undone_on_failure(instance: str) -> Iterator[None]:
    """Tear the instance down where the block fails, without being interrupted a second time."""
    try:
        yield
    except BaseException as error:
        with _uninterrupted():
            ownership.teardown(instance)
        if isinstance(error, _Terminated):
            raise KernelError(f"{instance}: stopped by SIGTERM, nothing is left") from None
        if isinstance(error, OSError):
            raise KernelError(f"{instance}: {_why(error)}") from error
        raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C is not heard while what the first one broke off is cleared away.

    By handlers, not by a mask: any thread may take a signal, and Python's handlers then run in
    the main thread whatever its mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds instead of ending the process at once, unless the caller has seen to it."""

    def terminate(_number: int, _frame: object) -> None:
        raise _Terminated

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _build(job: _Job) -> None:
    with ExitStack() as stack:
        stack.callback(job.close)
        namespaces.prepare_directory()
        made = [item for item in job.plan.objects if isinstance(item, Netns)]
        with _threads(job, _MAKERS) as pool:
            _finish([pool.submit(_make, job, item) for item in made])
        _fill(job)
        if made:
            now = datetime.now(tz=UTC)
            mark = ownership.final_mark(job.instance, job.plan.hash, now, len(made))
            objects.loopback(job.spaces[made[0].netns].socket, mark)


def _fill(job: _Job) -> None:
    sets = rulesets.sets_of(job.plan)
    loads: dict[str, list[Ruleset]] = {netns: [] for netns in sets}
    for ruleset in job.plan.rulesets():
        loads.setdefault(ruleset.netns, []).append(ruleset)
    with _threads(job, len(loads) + 2) as pool:
        pending = [
            pool.submit(_load, job, sets.get(netns, ()), load) for netns, load in loads.items()
        ]
        pending.append(pool.submit(_start_agent, job))
        pending.append(pool.submit(_create, job))
        _finish(pending)
    late = [item for item in job.plan.objects if isinstance(item, Sysctl) and objects.is_late(item)]
    commands = [item for item in job.plan.objects if isinstance(item, Command)]
    with _threads(job, 1) as pool:
        _finish([pool.submit(_write_sysctls, job, late)])
    for command in commands:
        with _named(command):
            log = job.directory / f"{command.netns}.log"
            processes.start(job.instance, job.spaces[command.netns].descriptor, command.argv, log)


@contextmanager
def _threads(job: _Job, count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that change their namespace; where the block fails, what they do is cut short."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="netlab")
    try:
        yield pool
    except BaseException:
        with _uninterrupted():
            job.stop()
            pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()


def _finish(pending: Iterable[Future[None]]) -> None:
    """Wait for all; the first failure counts."""
    done, _ = wait(pending, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


def _make(job: _Job, item: Netns) -> None:
    """A namespace, marked before it gets its name, so that what has the name has the mark."""
    file = namespaces.path(job.instance, item.netns)
    _continue(job)
    with _named(item):
        namespaces.unshare()
        socket = Socket()
        try:
            for name, value in item.sysctls.items():
                objects.write_sysctl(name, value, optional=True)
            objects.loopback(socket, ownership.stamp(job.instance, job.plan.hash))
            namespaces.keep(file)
            job.spaces[item.netns] = Space(file, namespaces.open_file(file), socket)
        except BaseException:
            socket.close()
            raise


def _create(job: _Job) -> None:
    """The rtnetlink objects and the sysctls among them."""
    here = ""
    for item in job.plan.objects:
        _continue(job)
        with _named(item):
            if not isinstance(item, Sysctl):
                objects.create(item, job.spaces)
            elif not objects.is_late(item):
                if item.netns != here:
                    here = item.netns
                    namespaces.switch(job.spaces[here].descriptor)
                objects.write_sysctl(item.name, item.value, optional=item.optional)


def _write_sysctls(job: _Job, items: Iterable[Sysctl]) -> None:
    for item in items:
        with _named(item):
            namespaces.switch(job.spaces[item.netns].descriptor)
            objects.write_sysctl(item.name, item.value, optional=item.optional)


def _load(job: _Job, sets: tuple[IpSet, ...], load: list[Ruleset]) -> None:
    """One namespace's ipsets, then its rules."""
    netns = sets[0].netns if sets else load[0].netns
    namespaces.switch(job.spaces[netns].descriptor)
    if sets:
        rulesets.restore_sets(sets, job.children)
    for ruleset in load:
        rulesets.restore_rules(ruleset, job.children, job.directory)


def _start_agent(job: _Job) -> None:
    """The lab's server, one process for all namespaces, started in one of them and ready."""
    listeners = [item for item in job.plan.objects if isinstance(item, Listener)]
    if not listeners:
        return
    wanted = {
        item.netns: {"path": str(job.spaces[item.netns].file), "ports": list(item.ports)}
        for item in listeners
    }
    order = json.dumps({"instance": job.instance, "netns": wanted})
    argv = [sys.executable, "-I", "-S", str(AGENT)]
    log = job.directory / "agent.messages"
    with _named(listeners[0]):
        where = job.spaces[listeners[0].netns].descriptor
        job.agent = processes.start(job.instance, where, argv, log, pipes=True)
    _continue(job)
    _hand_over(job.agent, order, log)


def _hand_over(agent: subprocess.Popen[bytes], order: str, log: Path) -> None:
    """Give the server its order and wait until it says that every socket listens.

    Raises:
        KernelError: it ended, or took too long; with its last words.
    """
    if agent.stdin is None or agent.stdout is None:
        raise AssertionError(agent)
    with agent.stdout as answers:
        with suppress(BrokenPipeError), agent.stdin as orders:
            orders.write(f"{order}\n".encode())
        ready, _, _ = select.select([answers], [], [], _AGENT_SECONDS)
        said = answers.readline().decode(errors="replace").strip() if ready else "nothing"
    if said != "ready":
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise KernelError(f"the lab's server did not start: it said {said!r}; {last}")


def _continue(job: _Job) -> None:
    if job.stopped.is_set():
        raise KernelError("stopped")


@contextmanager
def _named(item: Object) -> Iterator[None]:
    """An error of the system names the object and the setting's reason."""
    try:
        yield
    except OSError as error:
        raise KernelError(f"{words.describe(item)}: {_why(error)}") from error


def _why(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror} ({name})" if name else str(error)
