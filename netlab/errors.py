"""Everything netlab raises on purpose.

    NetlabError
    ├── LabError            the lab file is wrong: every problem at once             exit 3
    ├── UsageError          the command line is wrong (no such lab, several up, …)   exit 3
    ├── PlanError           a plan that cannot be ordered: a defect in netlab        exit 2
    ├── MissingFeature      this machine cannot run the plan                         exit 2
    ├── Busy                another command holds the lab                            exit 2
    └── KernelError         the kernel, or a program that speaks to it, said no      exit 2

The command line turns each into one message and the exit code of its class.
"""

from __future__ import annotations

from dataclasses import dataclass


class NetlabError(Exception):
    """Base of all errors that a user may meet; ``exit_code`` is what the command line returns."""

    exit_code = 2


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake in a lab file.

    *line* and *column* count from 1 (0: the file as a whole); *path* is the setting's path
    (``pods.ma1.nics.eth0.attach``, empty for the file); *message* says what was expected.
    """

    line: int
    column: int
    path: str
    message: str

    def render(self, file: str) -> str:
        """``file:line:column  path: message``, as editors and CI annotations read it."""
        where = f"{file}:{self.line}:{self.column}" if self.line else file
        return f"{where}  {self.path}: {self.message}" if self.path else f"{where}  {self.message}"


class LabError(NetlabError):
    """A lab file that cannot be used, with every *problem* found in it, in file order."""

    exit_code = 3

    def __init__(self, file: str, problems: tuple[Problem, ...]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems))
        count = len(self.problems)
        lines = [problem.render(file) for problem in self.problems]
        lines.append(f"{count} problem{'s' if count != 1 else ''}, nothing was started")
        super().__init__("\n".join(lines))


class UsageError(NetlabError):
    """The command cannot be understood as given."""

    exit_code = 3


class PlanError(NetlabError):
    """A plan whose objects clash, miss a requirement or require each other in a circle."""


class MissingFeature(NetlabError):
    """The machine lacks something that the plan needs; nothing was started."""


class Busy(NetlabError):
    """Another command is at work on the same lab."""


class KernelError(NetlabError):
    """Creating, changing or reading a kernel object failed; the message names the object."""
