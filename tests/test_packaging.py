"""What users install: the wheel, the sdist, and what their metadata and the locks say."""

import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import houlsby_peft


ROOT = Path(__file__).parents[1]
EXTRAS = (
    "recipes",
    "trackers",
    "deepspeed",
    "demo",
    "export",
    "serve",
    "ray",
    "integrations",
    "test",
    "dev",
    "docs",
)


@pytest.fixture(scope="module")
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read_string((ROOT / "setup.cfg").read_text())
    return parser


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel, built from the sdist, and the sdist, made in a copy, as building leaves files
    behind.
    """
    source = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".*", "build", "dist", "outputs", "runs", "*.egg-info"),
    )
    out = source / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def package_files():
    """Where each file of the package stands in the checkout -> where it is installed.

    The studies are for a clone, and are not installed.
    """
    files = [
        *(ROOT / "houlsby_peft").rglob("*.py"),
        ROOT / "houlsby_peft/py.typed",
        ROOT / "houlsby_peft/service/page.html",
        ROOT / "houlsby_peft_cli.py",
        ROOT / "houlsby_peft_serve.py",
    ]
    inside = [*(ROOT / "hub_cards").glob("*.py"), *(ROOT / "hub_cards").glob("*.jinja")]
    inside += [
        path
        for path in (ROOT / "recipes").rglob("*")
        if path.is_file() and not {"__pycache__", "studies"} & {*path.relative_to(ROOT).parts}
    ]
    installed = {
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix() for path in files
    }
    names = [path.relative_to(ROOT).as_posix() for path in inside]
    return installed | {name: f"houlsby_peft/{name}" for name in names}


def requirements(text):
    return [Requirement(line) for line in text.splitlines() if line.strip()]


def test_wheel_holds_the_package_and_nothing_else(distributions):
    wheel = zipfile.ZipFile(distributions[0])
    names = set(wheel.namelist())
    dist_info = f"houlsby_peft-{houlsby_peft.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(dist_info)} == set(
        package_files().values()
    )
    for source, installed in package_files().items():
        assert wheel.read(installed) == (ROOT / source).read_bytes()
    assert f"{dist_info}licenses/LICENSE" in names


def test_sdist_holds_the_sources_and_no_tests(distributions):
    with tarfile.open(distributions[1]) as archive:
        names = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    names = {name for name in names if not name.startswith("houlsby_peft.egg-info/")}
    project = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert names == set(package_files()) | project


def imported_distributions(folder):
    """Names of the distributions that the scripts in a folder import, less Python's own and the
    folder's.
    """
    paths = list((ROOT / folder).rglob("*.py"))
    modules = set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module.partition(".")[0])
    modules -= (
        sys.stdlib_module_names
        | {path.stem for path in paths}
        | {path.parent.name for path in paths}
    )
    return {
        {"sklearn": "scikit-learn", "yaml": "pyyaml"}.get(module, module).replace("_", "-")
        for module in modules
    }


def test_dependencies_are_what_the_library_imports(setup_cfg):
    declared = {
        requirement.name for requirement in requirements(setup_cfg["options"]["install_requires"])
    }
    extras = setup_cfg["options.extras_require"]
    optional = {
        item.name
        for extra in ("deepspeed", "export", "serve", "ray", "tables")
        for item in requirements(extras[extra])
    }
    # PyTorch brings Triton where there is a GPU.
    optional |= {"houlsby-peft-cli", "houlsby-peft-serve", "triton"}
    assert declared == imported_distributions("houlsby_peft") - optional


def test_extras_declare_what_the_recipes_import(setup_cfg):
    extras = setup_cfg["options.extras_require"]
    texts = (
        setup_cfg["options"]["install_requires"],
        extras["recipes"],
        extras["deepspeed"],
        extras["demo"],
        "houlsby-peft",
    )
    assert imported_distributions("recipes") <= {
        item.name for text in texts for item in requirements(text)
    }


@pytest.mark.parametrize(
    "lock", sorted((ROOT / "constraints").glob("python*.txt")), ids=lambda path: path.stem
)
def test_locked_versions_satisfy_the_requirements(setup_cfg, lock):
    locked = {
        name.replace("_", "-"): version
        for name, version in re.findall(r"(.+)==(.+)", lock.read_text())
    }
    direct = [
        setup_cfg["options"]["install_requires"],
        *(setup_cfg["options.extras_require"][key] for key in EXTRAS),
    ]
    # Triton is not locked: PyTorch for CUDA needs one version of it.
    outside = [
        str(item)
        for text in direct
        for item in requirements(text)
        if item.name != "triton" and locked[item.name] not in item.specifier
    ]
    assert outside == [], f"{lock.name} is older than setup.cfg: run `make lock` with that Python"


def test_every_supported_python_has_a_lock(setup_cfg):
    supported = re.findall(r"Python :: (3\.\d+)", setup_cfg["metadata"]["classifiers"])
    locks = sorted(path.stem for path in (ROOT / "constraints").glob("python*.txt"))
    assert locks == [f"python{version}" for version in supported]


def test_lock_leaves_out_the_project_itself_cuda_and_build_tags():
    installed = [
        ("torch", "2.13.0+cpu", {}),
        ("Jinja2", "3.1.6", {}),
        ("nvidia-nvtx", "13.0.85", {}),
        ("triton", "3.7", {}),
    ]
    installed.append(("houlsby-peft", "0.1.0", {"dir_info": {}}))
    install = [
        {"metadata": {"name": n, "version": v}, "download_info": info} for n, v, info in installed
    ]
    script = [sys.executable, str(ROOT / "constraints/lock.py")]
    run = subprocess.run(
        script, input=json.dumps({"install": install}), capture_output=True, text=True, check=True
    )
    assert run.stdout == "jinja2==3.1.6\ntorch==2.13.0\n"


def test_version_is_read_from_the_metadata(setup_cfg):
    assert (
        houlsby_peft.__version__
        == metadata.version("houlsby-peft")
        == setup_cfg["metadata"]["version"]
    )


def test_templates_are_found_in_this_environment_too():
    templates = sorted((ROOT / "hub_cards").glob("*.jinja"))
    assert templates
    for path in templates:
        assert (
            resources.files("houlsby_peft.hub_cards") / path.name
        ).read_text() == path.read_text()
