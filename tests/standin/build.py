"""Build the stand-in with g++ against the headers of the CUDA wheels of this environment.

``python tests/standin/build.py [OUT]`` writes the libraries to OUT (``build/standin``) and
prints the value of LD_PRELOAD that puts them in the place of NVIDIA's.

All code is in one library.  Three more have nothing but the names under which
torch is linked to NVIDIA's (the dynamic linker does not load a library of a
name that is loaded), and a function for each call that torch is linked to and
the stand-in lacks: it says its name and fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SITE = Path(sysconfig.get_path("purelib"))
CODE = "libstandin.so"
NAMES = {
    # The library's name, the calls that belong to it, and what they return where they are missing.
    "libcudart.so.13": (re.compile(r"(__)?cuda[A-Z]\w+"), 801),  # cudaErrorNotSupported
    "libcuda.so.1": (re.compile(r"cu(?!File)[A-Z]\w+"), 801),  # CUDA_ERROR_NOT_SUPPORTED
    "libnccl.so.2": (re.compile(r"nccl[A-Z]\w+"), 5),  # ncclInvalidUsage
}
COMPILE = ("g++", "-std=c++17", "-O1", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden")


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "standin").resolve()
    out.mkdir(parents=True, exist_ok=True)
    build(out)
    print(preload(out))


def preload(out: Path) -> str:
    """What LD_PRELOAD must be for a process that is to run on the stand-in built into `out`."""
    return ":".join(str(out / name) for name in (CODE, *NAMES))


def build(out: Path) -> None:
    """Compile everything into `out`, unless it is newer than all it is made of."""
    sources = sorted((HERE / "source").iterdir())
    newest = max(path.stat().st_mtime for path in (*sources, Path(__file__)))
    targets = [out / name for name in (CODE, *NAMES)]
    if all(path.exists() and path.stat().st_mtime > newest for path in targets):
        return
    include = [*SITE.glob("nvidia/cu[0-9]*/include"), SITE / "nvidia/nccl/include"]
    headers = [f"-I{path}" for path in include]
    cpp = [str(path) for path in sources if path.suffix == ".cpp"]
    _run(*COMPILE, *headers, *cpp, "-o", str(out / CODE), "-ldl", "-lpthread")
    wanted = _symbols("--undefined-only", *SITE.glob("torch/lib/*.so"), *SITE.glob("torch/_C*.so"))
    missing = wanted - _symbols("--defined-only", out / CODE)
    for name, (calls, error) in NAMES.items():
        source = out / f"{name}.cpp"
        source.write_text(
            'extern "C" int standin_unsupported(const char* name, int error);\n'
            + "".join(
                f'extern "C" int {call}() {{ return standin_unsupported("{call}", {error}); }}\n'
                for call in sorted(filter(calls.fullmatch, missing))
            )
        )
        # The linker wants a library of this name to define the version that it is asked for.
        versions = out / f"{name}.map"
        versions.write_text(f"{name} {{ global: *; }};\n")
        _run(
            *(flag for flag in COMPILE if flag != "-fvisibility=hidden"),
            f"-Wl,-soname,{name},--version-script,{versions}",
            str(source),
            str(out / CODE),
            "-Wl,-rpath,$ORIGIN",
            "-o",
            str(out / name),
        )


def _symbols(which: str, *libraries: Path) -> set[str]:
    """The dynamic symbols of `libraries`, without their versions."""
    text = subprocess.run(
        ["nm", "--dynamic", "--portability", which, *map(str, libraries)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {line.split()[0].partition("@")[0] for line in text.splitlines() if " " in line}


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
