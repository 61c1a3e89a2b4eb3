"""The verbs. `python -m netlab`, `cni-netlab` and `invoke lab` all end here.

Each verb imports what it needs when it runs, so that `--help` stays fast. Results go to standard
output, progress and errors to standard error; colour only on a terminal.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from netlab.errors import NetlabError, UsageError

if TYPE_CHECKING:
    from netlab.check import Run
    from netlab.model import Lab
    from netlab.plan import Plan

AS_EXPECTED, NOT_AS_EXPECTED, INSTRUMENT_FAILED, BAD_INPUT = 0, 1, 2, 3
EXEC_FAILED = 125
INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])

_EPILOG = """\b
Exit codes: 0 as expected; 1 something was not; 2 nothing ran or the instrument failed;
3 bad input. `exec` returns the command's own code, 125 if netlab itself failed.
"""


def main(args: Sequence[str] | None = None, prog: str = "cni-netlab") -> int:
    """Run one verb and return its exit code; *args* as in ``sys.argv[1:]``."""
    signal.signal(signal.SIGTERM, _terminate)
    gc.disable()  # a command lives for seconds and makes no garbage in circles
    try:
        code = cli.main(
            args=list(args) if args is not None else None, prog_name=prog, standalone_mode=False
        )
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except NetlabError as error:
        click.echo(str(error), err=True)
        return error.exit_code
    return code if isinstance(code, int) else AS_EXPECTED


def _terminate(_signal: int, _frame: object) -> NoReturn:
    """SIGTERM unwinds like Ctrl-C, so that what was half made is taken down."""
    raise KeyboardInterrupt


def _format(command: Command) -> Command:
    return click.option(
        "--format",
        "style",
        type=click.Choice(["table", "json"]),
        default="table",
        help="A table for people or JSON for scripts.",
    )(command)


def _lab(command: Command) -> Command:
    return click.option(
        "--lab", "wanted", metavar="INSTANCE", help="Which lab; default: the only one that is up."
    )(command)


def _file(name: str | None) -> Path:
    """The lab file that NAME means; left out: ./lab.yaml.

    Raises:
        UsageError: no such lab, or nothing named and no ./lab.yaml.
    """
    from netlab import catalogue

    if name is not None:
        return catalogue.find(name)
    default = Path("lab.yaml")
    if not default.exists():
        raise UsageError("say which lab: a name of the catalogue (see `list`), or a path")
    return default


def _instance(name: str | None) -> str:
    """The instance that NAME means: its own name, or the file that it was made from."""
    from netlab import kernel, lifecycle

    names = [found.name for found in kernel.instances()]
    if name in names:
        return str(name)
    if name is not None and "/" not in name and not name.endswith((".yaml", ".yml")):
        return name
    file = _file(name).resolve()
    made = [found for found in names if lifecycle.source_file(found) == str(file)]
    return made[0] if made else lifecycle.name_in(file)


def _json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
    no_args_is_help=True,
)
@click.version_option(package_name="cni-netlab")
def cli() -> None:
    """Real kernel objects for the network paths of several CNIs, without Kubernetes.

    A lab is a YAML file: a topology, the settings of its components, and what must come out.

    \b
    Start with:
      list                          the catalogue
      up calico-macvlan             bring it up
      test calico-macvlan           prove every scenario of it, and its variants
      probe "curl ma1 -> ca2"       one probe
      exec ma1 -- ip rule           look inside
      down calico-macvlan           remove it
    """


# --- catalogue and files -------------------------------------------------------------------------


@cli.command("list")
@_format
def list_(style: str) -> int:
    """The labs of the catalogue.

    \b
    Example:  list --format json
    """
    from netlab import catalogue, report

    rows = [_catalogue_row(path) for path in catalogue.paths()]
    if style == "json":
        _json({"labs": rows})
    else:
        click.echo(report.catalogue(rows))
    return AS_EXPECTED


def _catalogue_row(path: Path) -> dict[str, object]:
    from netlab.compile import compile_lab
    from netlab.spec import load

    lab = load(path)
    return {
        "name": lab.name,
        "title": lab.title,
        "expectations": len(lab.expect),
        "variants": list(lab.variants),
        "features": sorted(compile_lab(lab).features),
    }


@cli.command()
@click.argument("name", required=False)
def validate(name: str | None) -> int:
    """Check a lab file, every variant of it, without starting anything.

    Every problem is told at once, as file:line:column.

    \b
    Examples:  validate calico-macvlan
               validate ./lab.yaml
    """
    from netlab import report
    from netlab.compile import compile_lab
    from netlab.spec import load_all

    labs = load_all(_file(name))
    plans = [compile_lab(lab) for lab in labs.values()]
    click.echo(report.validated(labs["base"], plans[0], len(labs) - 1))
    return AS_EXPECTED


@cli.command()
def schema() -> int:
    """The lab language as JSON Schema, for editors; `by` lists every component/reason.

    \b
    Example:  schema > lab.schema.json
    """
    from netlab.spec import schema as language

    _json(language())
    return AS_EXPECTED


@cli.command()
@click.argument("name", required=False)
@click.option("--variant", default="base", help="The variant to plan.", show_default=True)
def plan(name: str | None, variant: str) -> int:
    """Print the plan as a shell script that runs, with the reason for each line.

    \b
    Example:  plan calico-macvlan | less
    """
    from netlab import lifecycle, script

    _, planned = lifecycle.load(_file(name), variant)
    click.echo(script.render(planned), nl=False)
    return AS_EXPECTED


# --- whole labs ----------------------------------------------------------------------------------


@cli.command()
@click.argument("name", required=False)
@click.option("--name", "instance", metavar="INSTANCE", help="Its own name, for a second instance.")
@click.option("--variant", default="base", help="Bring this variant up.", show_default=True)
@click.option("--test", "prove", is_flag=True, help="Then run `test` on it.")
def up(name: str | None, instance: str | None, variant: str, prove: bool) -> int:
    """Bring a lab up: NAME is one of the catalogue, or a path.

    Again on the same file: nothing to do. On a changed file: says what differs and rebuilds.

    \b
    Examples:  up calico-macvlan
               up ./lab.yaml --name mine
               up calico-macvlan --variant liberal
    """
    from netlab import lifecycle, report

    file = _file(name)
    done = lifecycle.up(file, instance=instance, variant=variant)
    click.echo(report.up(done))
    if not prove:
        return AS_EXPECTED
    click.echo()
    return _test(file, done.instance, report.Options())


@cli.command()
@click.argument("names", nargs=-1, metavar="NAME")
@click.option("--all", "everything", is_flag=True, help="Every lab that is up.")
def down(names: tuple[str, ...], everything: bool) -> int:
    """Remove labs: their programs and network namespaces, by what the kernel holds alone.

    \b
    Examples:  down calico-macvlan
               down --all
    """
    from netlab import kernel, lifecycle

    if everything and names:
        raise UsageError("name labs, or say --all: not both")
    if everything:
        wanted = [found.name for found in kernel.instances()]
    else:
        wanted = [_instance(name) for name in names or (None,)]
    for name in wanted:
        click.echo(f"{name}: removed" if lifecycle.down(name) else f"{name}: was not up")
    if not wanted:
        click.echo("no lab is up")
    return AS_EXPECTED


@cli.command()
@_format
def status(style: str) -> int:
    """Which labs are up, since when, and whether their file has changed since.

    \b
    Example:  status --format json
    """
    from netlab import kernel, lifecycle, report

    rows: list[dict[str, object]] = [
        {
            "name": found.name,
            "file": lifecycle.source_file(found.name),
            "planHash": found.plan_hash,
            "stale": lifecycle.is_stale(found),
            "state": found.state,
            "netns": len(found.netns),
            "upSince": found.up_since.isoformat() if found.up_since else None,
        }
        for found in kernel.instances()
    ]
    if style == "json":
        _json({"labs": rows})
    else:
        click.echo(report.status(rows))
    return AS_EXPECTED


@cli.command()
@click.argument("name", required=False)
@click.option("--name", "instance", metavar="INSTANCE", help="The instance, where named otherwise.")
@_format
def diff(name: str | None, instance: str | None, style: str) -> int:
    """What differs between a running lab and its file; exit 1 if anything does.

    \b
    Example:  diff calico-macvlan
    """
    from netlab import lifecycle, report
    from netlab.plan import diff as differences

    lab, wanted = lifecycle.load(_file(name))
    running = lifecycle.running(lifecycle.the_only(instance or lab.name))
    found = differences(running.plan, wanted)
    if style == "json":
        _json({"differences": report.differences_json(found)})
    else:
        click.echo(report.differences(found, lab))
    return NOT_AS_EXPECTED if found else AS_EXPECTED


@cli.command()
@click.argument("name", required=False)
@click.option("--name", "instance", metavar="INSTANCE", help="The instance, where named otherwise.")
@_format
def verify(name: str | None, instance: str | None, style: str) -> int:
    """Compare the kernel's state with the plan and name every drift; exit 1 if there is any.

    \b
    Example:  verify calico-macvlan
    """
    from netlab import kernel, lifecycle, report

    wanted = instance or (None if name is None else _instance(name))
    running = lifecycle.running(lifecycle.the_only(wanted))
    drifts = kernel.verify(running.plan, running.instance)
    if style == "json":
        _json({"lab": running.instance, "drift": report.drift_json(drifts)})
    else:
        click.echo(report.drift(drifts, running.lab, running.plan))
    return NOT_AS_EXPECTED if drifts else AS_EXPECTED


# --- proving -------------------------------------------------------------------------------------


@cli.command()
@click.argument("name", required=False)
@click.option("--name", "instance", metavar="INSTANCE", help="Test this instance of it.")
@click.option("--variant", "variants", multiple=True, help="Only this variant (or base); repeat.")
@click.option(
    "--select", "select", multiple=True, metavar="ID|TAG", help="Only these expectations."
)
@click.option("--strict", is_flag=True, help="More than one try counts as failed.")
@click.option("--fail-fast", is_flag=True, help="Stop after the first run that fails.")
@click.option("--keep", is_flag=True, help="Leave private instances of failed runs up.")
@click.option("-v", "--verbose", is_flag=True, help="Say why, for every line.")
@_format
def test(name: str | None, instance: str | None, style: str, **options: Any) -> int:  # noqa: ANN401 - click's
    """Run every expectation of a lab, in the base and in each variant, and print one table.

    The base runs on the lab where it is up and not stale, else on a private instance; each
    variant on a private instance of its own. A lab that is up is never changed.

    \b
    Examples:  test calico-macvlan
               test calico-macvlan --variant base --select S-07
    """
    from netlab import report

    return _test(_file(name), instance, report.Options(json=style == "json", **options))


def _test(file: Path, instance: str | None, options: Any) -> int:  # noqa: ANN401 - report.Options
    from netlab import check, report

    labs = check.select_runs(file, options.variants)
    runs: list[Run] = []
    for lab, planned in labs:
        run = check.run(lab, planned, instance, options, _progress(lab, options.json))
        runs.append(run)
        if not options.json:
            click.echo(report.run(run, runs[0], options))
        if options.fail_fast and report.exit_code([run]) != AS_EXPECTED:
            break
    if options.json:
        _json(report.test_json(labs[0][0].name, runs))
    else:
        click.echo(report.summary(runs))
    return report.exit_code(runs)


def _progress(lab: Lab, quiet: bool) -> Callable[[int, int], None] | None:
    """A counter on standard error while a run goes on; none for scripts."""
    if quiet or not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r\033[K" if done == total else ""
        click.echo(f"\r{lab.variant}: {done} of {total}{end}", err=True, nl=False)

    return show


@cli.command()
@click.argument("text", metavar="PROBE", nargs=-1, required=True)
@_lab
@_format
def probe(text: tuple[str, ...], wanted: str | None, style: str) -> int:
    """Run one probe: [ping|curl|tcp|udp] SRC -> TARGET. Exit 1: rejected or dropped.

    \b
    Examples:  probe "curl ma1 -> ca2"
               probe "ping du2.net1 -> ma1"
               probe "curl ext -> node2:local-ma2"
    """
    from netlab import check, lifecycle, report
    from netlab.spec import parse_probe

    running = lifecycle.running(lifecycle.the_only(wanted))
    parsed = parse_probe(" ".join(text), running.lab)
    outcome = check.observe(parsed, running.instance)
    if style == "json":
        _json(report.outcome_json(parsed, outcome))
    else:
        click.echo(report.outcome(parsed, outcome, running.lab))
    return {"delivered": AS_EXPECTED, "rejected": NOT_AS_EXPECTED, "dropped": NOT_AS_EXPECTED}.get(
        outcome.result, INSTRUMENT_FAILED
    )


# --- looking inside ------------------------------------------------------------------------------


@cli.command(
    "exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@_lab
@click.argument("who")
@click.argument("argv", nargs=-1, required=True, metavar="[--] CMD...", type=click.UNPROCESSED)
def exec_(wanted: str | None, who: str, argv: tuple[str, ...]) -> int:
    """Run a command inside WHO: a node, Pod, host, router or network.

    \b
    Examples:  exec node1 -- iptables-save
               exec ma1 -- ip route get 10.233.101.2
    """
    try:
        return _enter(wanted, who, argv)
    except NetlabError as error:
        click.echo(str(error), err=True)
        return EXEC_FAILED


@cli.command()
@_lab
@click.argument("who")
def shell(wanted: str | None, who: str) -> int:
    """An interactive shell inside WHO.

    \b
    Example:  shell ma1
    """
    import os

    return _enter(wanted, who, (os.environ.get("SHELL", "/bin/sh"),))


def _enter(wanted: str | None, who: str, argv: tuple[str, ...]) -> int:
    from netlab import kernel, lifecycle, report

    instance = lifecycle.the_only(wanted)
    found = lifecycle.find(instance)
    names = found.netns if found else ()
    if who not in names:
        raise UsageError(report.unknown_name(who, names, f"in {instance}"))
    arguments = argv[1:] if argv[0] == "--" else argv
    return kernel.execute(instance, who, arguments)


@cli.command()
@_format
def doctor(style: str) -> int:
    """What this machine can do: kernel features and programs that labs need.

    Exit 2 where something is missing that the catalogue needs.

    \b
    Example:  doctor
    """
    from netlab import catalogue, kernel, report
    from netlab.compile import compile_lab
    from netlab.spec import load

    needs: dict[str, list[str]] = {}
    for path in catalogue.paths():
        lab = load(path)
        planned: Plan = compile_lab(lab)
        for feature in sorted(planned.features):
            needs.setdefault(feature, []).append(lab.name)
    found = kernel.features(needs)
    if style == "json":
        _json({"features": report.features_json(found, needs), "notes": list(kernel.notes())})
    else:
        click.echo(report.features(found, needs, kernel.notes()))
    return INSTRUMENT_FAILED if any(found.values()) else AS_EXPECTED
