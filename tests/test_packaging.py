"""The package as others get it: folders, metadata, and a wheel that is complete and can be imported."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]
PLUGIN_FOLDERS = ("devices", "policies", "transports")
FOR_TESTS = "lagging"
"""The folder of devices/ that wheels do not have."""
COMPILED = ("_kernels*.so", "_engine*.so", "_bound_call*.so")
GENERATED = ("__pycache__", "*.pyc", "*.egg-info", *COMPILED)
COMPILER = sysconfig.get_config_var("CC").split()[0]
OPTIONAL_LIBRARIES = ("mlx", "triton")


def is_compiled(path: Path) -> bool:
    """Test whether a file is a library that the installation compiles."""
    return any(path.match(pattern) for pattern in COMPILED)


def files_to_ship() -> Iterator[tuple[Path, Path]]:
    """(file in the tree, its path in the wheel) of all that is below the package's four folders and shipped."""
    for folder in ("moesched", *PLUGIN_FOLDERS):
        inside = Path(folder) if folder == "moesched" else Path("moesched", folder)
        for directory, folders, names in os.walk(ROOT / folder, followlinks=False):
            folders[:] = [name for name in folders if name not in ("__pycache__", FOR_TESTS)]
            for name in names:
                path = Path(directory, name)
                if path.suffix != ".pyc" and not is_compiled(path) and not path.is_symlink():
                    yield path, inside / path.relative_to(ROOT / folder)


def entry_points() -> list[importlib.metadata.EntryPoint]:
    """The command and every plug-in that pyproject.toml names, whether installed yet or not."""
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    return [
        importlib.metadata.EntryPoint(name, value, group)
        for group, members in groups.items()
        for name, value in members.items()
    ]


def test_the_list_of_packages_names_every_folder_with_code_and_no_other() -> None:
    folders_with_code = {inside.parent for path, inside in files_to_ship() if path.suffix == ".py"}
    assert sorted(PACKAGES) == sorted(".".join(folder.parts) for folder in folders_with_code)


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS)
def test_a_plugin_folder_lies_at_the_top_and_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "moesched" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..", folder)
    assert PYPROJECT["tool"]["setuptools"]["package-dir"][f"moesched.{folder}"] == folder


@pytest.mark.parametrize("entry_point", entry_points(), ids=lambda entry_point: entry_point.value)
def test_an_entry_point_names_something_that_can_be_called(
    entry_point: importlib.metadata.EntryPoint,
) -> None:
    assert callable(entry_point.load())


def test_constraints_pin_every_dependency_within_its_bounds() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    declared = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, declared):
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement.name} is not in constraints.txt"
        assert pinned in requirement.specifier, f"{requirement} is pinned to {pinned}"


@pytest.fixture(scope="module", params=["with a C compiler", "without one"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist built from a copy of the tree, without the network."""
    with_compiler = request.param == "with a C compiler"
    if with_compiler and not shutil.which(COMPILER):
        pytest.skip(f"this machine has no {COMPILER}")
    compiler = quick_compiler(tmp_path_factory.mktemp("compiler")) if with_compiler else "no-such-compiler"
    source = tmp_path_factory.mktemp("source")
    for folder in ("moesched", *PLUGIN_FOLDERS):
        shutil.copytree(
            ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns(*GENERATED)
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = tmp_path_factory.mktemp("dist")
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", str(built)]
    command = [sys.executable, "-m", "build", *options, str(source)]
    done = subprocess.run(command, env=os.environ | {"CC": compiler}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert with_compiler or compiler in done.stdout + done.stderr, "the reason is in plain sight"
    [path] = built.glob("*.whl")
    return path


def quick_compiler(folder: Path) -> str:
    """A compiler that does not optimise, whatever it is asked for: the code is imported, not timed."""
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name for name in shipped if is_compiled(Path(name))}
    assert shipped - compiled == {inside.as_posix() for _, inside in files_to_ship()}
    assert {Path(name).parent for name in compiled} <= {
        Path("moesched"),
        Path("moesched", "devices", "native"),
        Path("moesched", "system"),
    }


IMPORT_EVERYTHING = f"""
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted(root.glob("moesched/**/*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__main__":
        continue
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] not in {OPTIONAL_LIBRARIES}:
            raise
    else:
        assert pathlib.Path(module.__file__).is_relative_to(root), module.__file__
"""
WHICH_PARTS = """
from moesched.devices.native.compiled import availability
print(availability())
from moesched.engine import Engine, PlainEngine
print("engine in Python" if Engine.submit is PlainEngine.submit else "compiled engine")
"""


@pytest.mark.slow
def test_every_module_of_an_installed_wheel_can_be_imported_and_the_kernel_is_there_or_says_why_not(
    wheel: Path, tmp_path: Path
) -> None:
    """Modules are imported without compiled parts; with them, all other tests import them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    built = any(is_compiled(path) for path in tmp_path.rglob("*.so"))
    script = WHICH_PARTS if built else IMPORT_EVERYTHING + WHICH_PARTS
    command = [sys.executable, "-P", "-c", script, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = "CPU kernels: " if built else "no CPU kernels, torch does without: it was not compiled"
    assert done.stdout.startswith(said)
    assert done.stdout.endswith("compiled engine\n" if built else "engine in Python\n")
