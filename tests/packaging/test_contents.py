"""What the wheels hold: everything that is needed, and nothing else."""

from __future__ import annotations

import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT, *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))]
LICENSE = (ROOT / "LICENSE").read_bytes()


def name_of(project: Path) -> str:
    return "commlayer" if project == ROOT else project.name


@pytest.fixture(scope="module", params=PROJECTS, ids=name_of)
def wheel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(request.param)).build(directory=str(target), versions=["standard"])
    return zipfile.ZipFile(path)


def package(wheel: zipfile.ZipFile) -> str:
    return Path(wheel.filename or "").name.partition("-")[0]


def metadata(wheel: zipfile.ZipFile, file: str) -> bytes:
    (name,) = [n for n in wheel.namelist() if n.endswith(f".dist-info/{file}")]
    return wheel.read(name)


def test_it_is_typed(wheel: zipfile.ZipFile) -> None:
    assert f"{package(wheel)}/py.typed" in wheel.namelist()


def test_it_has_the_licence(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel, "licenses/LICENSE") == LICENSE


def test_it_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    fields = Parser().parsestr(metadata(wheel, "METADATA").decode())
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["Summary"]
    body = fields.get_payload()
    assert isinstance(body, str)
    assert body.startswith(f"# {fields['Name']}")


def test_it_holds_one_package_and_every_module_of_it(wheel: zipfile.ZipFile) -> None:
    name = package(wheel)
    names = [n for n in wheel.namelist() if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in names} == {name}
    project = ROOT if name == "commlayer" else ROOT / "plugins" / name.replace("_", "-")
    here = {
        str(file.relative_to(project))
        for file in (project / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert set(names) == here


def test_entry_points_name_modules_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    if not any(name.endswith("/entry_points.txt") for name in wheel.namelist()):
        return  # the adapters are imported by those who use them
    for line in metadata(wheel, "entry_points.txt").decode().splitlines():
        if "=" in line:
            module = line.split("=")[1].strip().partition(":")[0].replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & set(wheel.namelist()), line


def test_the_source_distribution_builds_the_same_wheel(tmp_path: Path) -> None:
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path)
    (unpacked,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
    again, first = (
        next(WheelBuilder(str(root)).build(directory=str(tmp_path / sub), versions=["standard"]))
        for sub, root in (("again", unpacked), ("first", ROOT))
    )
    with zipfile.ZipFile(again) as a, zipfile.ZipFile(first) as b:
        assert sorted(a.namelist()) == sorted(b.namelist())
