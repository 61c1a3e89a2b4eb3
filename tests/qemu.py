"""`invoke test --kernel debian`: the live tests in QEMU, on the distribution's own kernel.

The kernel package is downloaded and unpacked, never installed. virtme-ng boots it over the host's
file system, read-only but for overlays in memory and one folder; the guest has no network. It
needs no KVM. Output and exit code come back as files of that folder: without udevd in the guest
the console is no channel for them, and a guest that dies would look like one that succeeded.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "netlab" / "kernel"
PACKAGES = {"debian": "linux-image-amd64"}
BOOT_AND_RUN_SECONDS = 3600
CPUS, MEMORY = 2, "3G"
PATIENCE = 5
"""Emulation is some twenty times slower, and the host may be busy: probes wait that much longer."""


def run(*argv: str, **options: object) -> str:
    """Run a program; its standard output. A failure ends everything, with its words."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{shlex.join(argv)}: {done.stderr.strip() or done.returncode}")
    return str(done.stdout)


def kernel(package: str) -> Path:
    """The unpacked vmlinuz of the newest kernel that *package* depends on."""
    listed = run("apt-cache", "depends", "--important", package).split()
    names = [word for word in listed if word.startswith("linux-image-") and word != package]
    if not names:
        raise SystemExit(f"{package} names no kernel here: run apt-get update")
    folder = CACHE / names[0]
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run("apt-get", "download", names[0], cwd=folder)
        (archive,) = folder.glob("*.deb")
        run("dpkg-deb", "-x", str(archive), str(folder))
        archive.unlink()
        (release,) = (folder / "lib" / "modules").iterdir()
        run("depmod", "-b", str(folder), release.name)
        (folder / "complete").touch()
    (image,) = (folder / "boot").glob("vmlinuz-*")
    return image


def script(folder: Path, select: list[str]) -> str:
    """What the guest runs."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/live", *select)
    return "\n".join(
        (
            "#!/bin/sh",
            f"export HOME=/tmp NETLAB_PATIENCE={PATIENCE}",
            "unset PYTHONDONTWRITEBYTECODE",
            f"export PATH={shlex.quote(os.environ['PATH'])}:/usr/sbin:/sbin",
            f"cd {shlex.quote(str(ROOT))} || exit 2",
            f"uname -sr > {folder}/output",
            f"{shlex.join(pytest)} >> {folder}/output 2>&1",
            f"echo $? > {folder}/code",
            "",
        )
    )


def main() -> int:
    """The guest's pytest exit code; 2 where it did not get so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=tuple(PACKAGES))
    parser.add_argument("select", nargs=argparse.REMAINDER, help="arguments for pytest")
    options = parser.parse_args()
    if shutil.which("qemu-system-x86_64") is None:
        install = ("apt-get", "install", "-qq", "-y", "--no-install-recommends", "qemu-system-x86")
        run(*install, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    image = kernel(PACKAGES[options.kernel])
    compileall.compile_dir(ROOT / "netlab", quiet=2)
    with tempfile.TemporaryDirectory(prefix="netlab-qemu-") as name:
        folder = Path(name)
        guest = folder / "guest"
        guest.write_text(script(folder, options.select))
        guest.chmod(0o755)
        vng = str(Path(sys.executable).with_name("vng"))
        argv = (
            *(vng, "--disable-kvm", "--disable-microvm", "--verbose", "--run", str(image)),
            *("--cpus", str(CPUS), "--memory", MEMORY, "--user", "root"),
            *("--rwdir", str(folder), "--exec", str(guest)),
        )
        console = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=BOOT_AND_RUN_SECONDS,
            env={**os.environ, "PATH": f"{Path(vng).parent}:{os.environ['PATH']}"},
        ).stdout
        output, code = folder / "output", folder / "code"
        sys.stdout.write(output.read_text() if output.exists() else "")
        if not code.exists():
            sys.stdout.write("\n".join(console.splitlines()[-30:]))
            sys.stdout.write("\nthe guest ended without a result\n")
            return 2
        return int(code.read_text())


if __name__ == "__main__":
    sys.exit(main())
