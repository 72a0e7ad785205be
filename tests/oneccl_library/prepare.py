"""Fetch oneCCL's own library and what it needs, and build the shim: ``make test-oneccl``.

``python tests/oneccl_library/prepare.py FOLDER``.  Everything goes below FOLDER, nothing is
installed.  oneCCL comes from the package index; the network library under it (libfabric) from
Debian, since the index has none.  What is already there is used again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

VERSION = "2022.2.0"
# libccl.so.1 of the distribution for the CPU needs the dispatcher libccl.so.2, which loads
# libccl_legacy_cpu.so by name: both are only in the distribution for every device.
WHEELS: dict[str, Callable[[str], bool]] = {
    "oneccl-cpu": lambda name: name == "libccl.so.1.0",
    "oneccl": lambda name: name in ("libccl.so.2.0", "libccl_legacy_cpu.so"),
    "oneccl-cpu-devel": lambda name: name.endswith((".h", ".hpp")),
}
DEBIAN = (
    "ibverbs-providers",
    "libfabric1",
    "libibverbs1",
    "libnl-3-200",
    "libnl-route-3-200",
    "libnuma1",
    "libpsm-infinipath1",
    "libpsm2-2",
    "librdmacm1",
)
SHIM = Path(__file__).with_name("shim.cpp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.resolve()
    ready = folder / f"ready-{VERSION}"
    try:
        if not ready.exists():
            fetch_oneccl(folder)
            fetch_libfabric(folder)
            ready.touch()
        build(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Not run: oneCCL cannot be prepared here ({error})", file=sys.stderr)
        return 1
    return 0


def fetch_oneccl(folder: Path) -> None:
    wheels = folder / "wheels"
    for name, wanted in WHEELS.items():
        print(f"Fetching {name} {VERSION}", flush=True)
        run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--dest", str(wheels), f"{name}=={VERSION}"),
            ]
        )
        (wheel,) = wheels.glob(f"{name.replace('-', '_')}-{VERSION}-*.whl")
        unpack(wheel, wanted, folder)


def unpack(wheel: Path, wanted: Callable[[str], bool], folder: Path) -> None:
    """Unpack the files with `wanted` names into ``include`` and ``lib`` of `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            path = PurePosixPath(member)
            if path.parts[1:2] != ("data",) or not wanted(path.name):
                continue
            target = folder.joinpath(*path.parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def fetch_libfabric(folder: Path) -> None:
    debs = folder / "debian"
    debs.mkdir(parents=True, exist_ok=True)
    print("Fetching libfabric from Debian", flush=True)
    run(["apt-get", "download", "--quiet", *DEBIAN], cwd=debs)
    for package in debs.glob("*.deb"):
        run(["dpkg", "-x", package.name, "root"], cwd=debs)
    for library in debs.glob("root/**/lib*.so*"):
        if not library.is_symlink():
            shutil.copy2(library, folder / "lib")
    # The links that the loader looks for: in part Debian makes them only on installing.
    run(["/sbin/ldconfig", "-n", str(folder / "lib")])


def build(folder: Path) -> None:
    shim = folder / "lib" / "libcommlayer_oneccl_shim.so"
    if shim.exists() and shim.stat().st_mtime >= SHIM.stat().st_mtime:
        return
    print("Building the shim", flush=True)
    run(
        [
            *("g++", "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", str(SHIM)),
            *("-I", str(folder / "include"), "-L", str(folder / "lib"), "-l:libccl.so.1"),
            *("-Wl,-rpath,$ORIGIN", "-Wl,-rpath-link," + str(folder / "lib"), "-o", str(shim)),
        ]
    )


def run(command: list[str], cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
