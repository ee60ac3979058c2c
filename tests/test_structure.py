"""The shape of the repository: import direction, links, private torch names, file sizes."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = {"zcompile": ROOT / "zcompile", "zcompile.passes": ROOT / "passes", "zcompile.runtime": ROOT / "runtime"}

MAX_LINES = 400
MAX_LINES_EXAMPLE = 100
# Files that may be longer, each with its reason.
LONG_FILES = frozenset(
    {
        "zcompile/compat.py",  # every private torch name lives in this one file
    }
)

# What each layer may import directly; what those may import is allowed as well.
LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "compat": ("errors",),
    "offloading": ("errors",),
    "config": ("compat", "offloading"),
    "placement": ("config",),
    "cross_entropy": (),
    "ops": ("placement", "cross_entropy"),
    "store": ("compat",),
    "ir": ("ops", "store"),
    "analysis": ("ir",),
    "verify": ("analysis",),
    "pipeline": ("verify",),
    "passes": ("pipeline",),
    "capture": ("ir",),
    "program": ("ops",),
    "lower": ("analysis", "program"),
    "parameters": ("placement",),
    "scheduled": ("capture", "pipeline"),
    "planner": ("analysis", "lower", "parameters", "passes", "runtime", "scheduled"),
    "runtime": ("ops", "program"),
    "dsconfig": ("errors",),
    "lr_schedules": ("errors",),
    "loader": ("errors",),
}
# These make up the public surface, stand on top and may import every layer.
TOP = frozenset(
    {
        "__init__",
        "__main__",
        "api",
        "budgeted",
        "build",
        "checkpoint",
        "commands",
        "components",
        "contents",
        "engine",
        "explained",
        "export",
        "launch",
        "losses_alike",
        "module",
        "modules",
        "optim",
        "planning",
        "profiling",
        "progress",
        "out_of_memory",
        "report",
        "restore",
        "session",
        "unsharded",
        "weights",
    }
)


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (import name, path) of every module of the package, in a stable order."""
    for package, folder in SOURCE_ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if package == "zcompile" and relative.parts[0] in ("passes", "runtime"):
                continue
            yield ".".join([package, *relative.with_suffix("").parts]), path


MODULES = list(modules())
module_cases = pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])


def layer_of(name: str) -> str:
    """The layer of a dotted import name: the part after ``zcompile``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def allowed_layers(layer: str) -> set[str]:
    """The layer itself and everything below it."""
    allowed = {layer}
    for below in LAYERS[layer]:
        allowed |= allowed_layers(below)
    return allowed


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def import_problems(name: str, tree: ast.Module) -> list[str]:
    """The imports of one module that go against the import direction."""
    layer = layer_of(name)
    if layer not in TOP and layer not in LAYERS:
        return [f"layer {layer!r} has no place in LAYERS of {Path(__file__).name}; add it with what it may import"]
    problems = []
    for line, imported in imported_names(tree):
        root = imported.split(".")[0]
        if root in ("passes", "runtime"):
            problems.append(f"line {line}: bare import of {imported!r}; write zcompile.{imported}")
        if root != "zcompile" or layer in TOP:
            continue
        target = layer_of(imported)
        if target not in allowed_layers(layer):
            problems.append(f"line {line}: layer {layer!r} imports {imported!r}, which is not below it")
    return problems


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def private_torch_names(tree: ast.Module) -> list[str]:
    """Private torch names that a module imports or reads as an attribute of a torch module."""
    found = []
    bound: dict[str, str] = {}  # local name -> torch module it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if any(is_private(part) or part == "_C" for part in alias.name.split(".")):
                        found.append(f"line {node.lineno}: {alias.name}")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                if any(is_private(part) for part in full.split(".")):
                    found.append(f"line {node.lineno}: {full}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            parts, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in bound:
                found.append(f"line {node.lineno}: {'.'.join([bound[value.id], *reversed(parts)])}")
    return found


@module_cases
def test_imports_go_downwards(name: str, path: Path) -> None:
    assert import_problems(name, ast.parse(path.read_text())) == []


@module_cases
def test_private_torch_names_live_in_compat(name: str, path: Path) -> None:
    if name != "zcompile.compat":
        assert private_torch_names(ast.parse(path.read_text())) == []


@module_cases
def test_file_is_not_too_long(name: str, path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES or relative in LONG_FILES, f"{relative} has {num_lines} lines, more than {MAX_LINES}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_is_not_too_long(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    relative = path.relative_to(ROOT).as_posix()
    assert num_lines <= MAX_LINES_EXAMPLE or relative in LONG_FILES, f"{relative} has {num_lines} lines"


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_no_bare_imports_outside_the_package(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        roots = {imported.split(".")[0] for _, imported in imported_names(ast.parse(path.read_text()))}
        assert not roots & {"passes", "runtime"}, path


def test_the_import_check_sees_a_wrong_import() -> None:
    wrong = ast.parse("import zcompile.api\nfrom zcompile.passes.zero import shard\nimport runtime.mesh\n")
    assert len(import_problems("zcompile.ir.graph", wrong)) == 3
    assert import_problems("zcompile.api", ast.parse("from zcompile.passes.zero import shard")) == []
    assert import_problems("zcompile.passes.zero.shard", ast.parse("from zcompile.pipeline import Pass")) == []
    assert len(import_problems("zcompile.runtime.communication.mesh", ast.parse("import zcompile.ir.graph"))) == 1
    assert len(import_problems("zcompile.nowhere", ast.parse(""))) == 1


def test_the_private_name_check_sees_private_names() -> None:
    source = """
import torch
import torch.distributed as dist
from torch.utils import _pytree
from torch._dynamo import config
x = torch._C.Graph
y = dist._functional_collectives
z = torch.ops.aten.mm, self._private, torch.__version__
"""
    assert len(private_torch_names(ast.parse(source))) == 4


@pytest.mark.parametrize("package", ["passes", "runtime"])
def test_links_are_relative(package: str) -> None:
    link = ROOT / "zcompile" / package
    assert link.is_symlink()
    assert link.readlink() == Path("..") / package


def test_imports_from_a_checkout_without_installation() -> None:
    """`-S` hides an installed copy's path hook; only the links are left."""
    script = "import zcompile.passes, zcompile.runtime; print(zcompile.passes.__file__, zcompile.runtime.__file__)"
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {[str(ROOT), *sys.path]!r}; {script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for shown, package in zip(result.stdout.split(), ("passes", "runtime"), strict=True):
        assert Path(shown).resolve() == ROOT / package / "__init__.py"


def test_version_is_the_same_everywhere() -> None:
    import zcompile

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert zcompile.__version__ == declared
    try:
        assert importlib.metadata.version("zcompile") == declared
    except importlib.metadata.PackageNotFoundError:
        pass  # run from a checkout


@pytest.mark.slow
def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    """Build a wheel of a clean copy with the setuptools at hand and compare its list of files."""
    import shutil
    import zipfile

    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("zcompile", "passes", "runtime"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    script = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {name.replace(".", "/") + ".py" for name, _ in MODULES}
    assert expected | {"zcompile/py.typed"} <= packed
    assert not any(entry.startswith(("passes/", "runtime/", "tests/")) for entry in packed)


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest's default skips folders called ``dist``."""
    skipped = pytestconfig.getini("norecursedirs")
    for file in (ROOT / "tests").rglob("test_*.py"):
        for folder in file.relative_to(ROOT).parts[:-1]:
            assert not any(fnmatch(folder, pattern) for pattern in skipped), f"{file} is never collected"
