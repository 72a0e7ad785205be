"""Build stubs of the CANN libraries that torch_npu links with: ``make test-npu-binding``.

``python tests/npu_binding/stubs.py FOLDER``, with the Python that has torch_npu.  CANN is not
on the package index, so torch_npu cannot be imported without an Ascend machine's toolkit.  A
stub has every function that torch_npu misses, and each does nothing and returns zero, which is
CANN's success.  So the binding can be looked at, and nothing else: nothing is sent, and what a
call would really do is not shown.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ASKED_BY_NAME = {"aclrtSetOpWaitTimeout"}
"""What torch_npu looks up while a group is made, so that no linker misses it."""


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    npu, torch = package("torch_npu"), package("torch")
    linked = [*npu.glob("_C*.so"), *(npu / "lib").glob("*.so")]
    missing = sorted({name for library in linked for name in not_found(library, torch / "lib")})
    wanted = {name for library in linked for name in symbols(library, "--undefined-only")}
    for library in [*linked, *(torch / "lib").glob("*.so*"), *found(linked, torch / "lib")]:
        wanted -= symbols(library, "--defined-only")
    wanted |= ASKED_BY_NAME
    functions = "\n".join(
        f'long stub_{n}(void) __asm__("{name}"); long stub_{n}(void) {{ return 0; }}'
        for n, name in enumerate(sorted(wanted))
    )
    for name in missing:
        # All functions in each: nothing here says which library torch_npu will ask for one.
        compile_library(folder / name, functions)
    print(f"{len(missing)} stubs ({', '.join(missing)}), {len(wanted)} functions")
    return 0


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed here")
    return Path(spec.origin).parent


def needed(library: Path, libraries: Path) -> list[str]:
    """What the loader says of the libraries that `library` needs, a line each."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    return run(["ldd", str(library)], environment).splitlines()


def not_found(library: Path, libraries: Path) -> set[str]:
    lines = needed(library, libraries)
    return {line.split()[0] for line in lines if line.endswith("not found")}


def found(linked: list[Path], libraries: Path) -> set[Path]:
    lines = {line for library in linked for line in needed(library, libraries)}
    paths = {match[1] for line in lines if (match := re.search(r"(/\S+) \(0x", line))}
    return {Path(path) for path in paths}


def symbols(library: Path, which: str) -> set[str]:
    """Names without their version; weak ones may stay undefined, so they are no one's lack."""
    lines = run(["nm", "--dynamic", which, "--format=posix", str(library)]).splitlines()
    fields = [line.split() for line in lines]
    return {name.partition("@")[0] for name, kind, *_ in fields if kind not in "wv"}


def compile_library(target: Path, source: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
    soname = f"-Wl,-soname,{target.name}"
    subprocess.run([*command, soname], input=source, text=True, check=True)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
