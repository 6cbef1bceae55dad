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
    left_out = shutil.ignore_patterns(".*", "build", "dist", "outputs", "runs", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=left_out)
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
    folder = ROOT / "houlsby_peft"
    files = [*folder.rglob("*.py"), folder / "py.typed", folder / "service" / "page.html"]
    files += [ROOT / "houlsby_peft_cli.py", ROOT / "houlsby_peft_serve.py"]
    inside = [*(ROOT / "hub_cards").glob("*.py"), *(ROOT / "hub_cards").glob("*.jinja")]
    for path in (ROOT / "recipes").rglob("*"):
        if path.is_file() and not {"__pycache__", "studies"} & {*path.relative_to(ROOT).parts}:
            inside.append(path)
    installed = {}
    for paths, place in ((files, ""), (inside, "houlsby_peft/")):
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            installed[name] = f"{place}{name}"
    return installed


def required(*texts):
    """The requirements in texts of setup.cfg, by the names of their distributions."""
    lines = "\n".join(texts).split("\n")
    requirements = map(Requirement, filter(str.strip, lines))
    return {requirement.name: requirement for requirement in requirements}


def test_wheel_holds_the_package_and_nothing_else(distributions):
    wheel = zipfile.ZipFile(distributions[0])
    names = set(wheel.namelist())
    dist_info = f"houlsby_peft-{houlsby_peft.__version__}.dist-info/"
    assert f"{dist_info}licenses/LICENSE" in names
    names = {name for name in names if not name.startswith(dist_info)}
    assert names == {*package_files().values()}
    for source, installed in package_files().items():
        assert wheel.read(installed) == (ROOT / source).read_bytes()


def test_sdist_holds_the_sources_and_no_tests(distributions):
    with tarfile.open(distributions[1]) as archive:
        members = [member.name.partition("/")[2] for member in archive if member.isfile()]
    names = {name for name in members if not name.startswith("houlsby_peft.egg-info/")}
    project = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert names == set(package_files()) | project


def imported_distributions(folder):
    """Names of the distributions that the scripts in a folder import, less Python's own and the
    folder's.
    """
    modules, own_modules = set(), set(sys.stdlib_module_names)
    for path in (ROOT / folder).rglob("*.py"):
        own_modules |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.partition(".")[0])
    names = {"sklearn": "scikit-learn", "yaml": "pyyaml"}
    return {names.get(module, module).replace("_", "-") for module in modules - own_modules}


def test_dependencies_are_what_the_library_imports(setup_cfg):
    extras = setup_cfg["options.extras_require"]
    of_extras = [extras[extra] for extra in ("deepspeed", "export", "serve", "ray", "tables")]
    # PyTorch brings Triton where there is a GPU.
    optional = {*required(*of_extras), "houlsby-peft-cli", "houlsby-peft-serve", "triton"}
    declared = {*required(setup_cfg["options"]["install_requires"])}
    assert declared == imported_distributions("houlsby_peft") - optional


def test_extras_declare_what_the_recipes_import(setup_cfg):
    extras = setup_cfg["options.extras_require"]
    of_extras = [extras[extra] for extra in ("recipes", "deepspeed", "demo")]
    own = ("houlsby-peft", "houlsby-peft-cli")
    declared = required(setup_cfg["options"]["install_requires"], *of_extras, *own)
    assert imported_distributions("recipes") <= declared.keys()


@pytest.mark.parametrize(
    "lock", sorted((ROOT / "constraints").glob("python*.txt")), ids=lambda path: path.stem
)
def test_locked_versions_satisfy_the_requirements(setup_cfg, lock):
    """Those of all extras but quantized. PyTorch for CUDA needs one version of Triton."""
    locked = {}
    for name, version in re.findall(r"(.+)==(.+)", lock.read_text()):
        locked[name.replace("_", "-")] = version
    extras = setup_cfg["options.extras_require"]
    texts = [extras[extra] for extra in extras if extra != "quantized"]
    for text in (setup_cfg["options"]["install_requires"], *texts):
        for name, requirement in required(text).items():
            remedy = f"{lock.name} is older than setup.cfg: run `make lock` with that Python"
            assert name == "triton" or locked[name] in requirement.specifier, remedy


def test_every_supported_python_has_a_lock(setup_cfg):
    supported = re.findall(r"Python :: (3\.\d+)", setup_cfg["metadata"]["classifiers"])
    locks = sorted(path.stem for path in (ROOT / "constraints").glob("python*.txt"))
    assert locks == [f"python{version}" for version in supported]


def test_lock_leaves_out_the_project_itself_cuda_and_build_tags():
    installed = []
    for name, version, info in (
        ("torch", "2.13.0+cpu", {}),
        ("Jinja2", "3.1.6", {}),
        ("nvidia-nvtx", "13.0.85", {}),
        ("triton", "3.7", {}),
        ("houlsby-peft", "0.1.0", {"dir_info": {}}),
    ):
        metadata_of_item = {"name": name, "version": version}
        installed.append({"metadata": metadata_of_item, "download_info": info})
    command = [sys.executable, str(ROOT / "constraints/lock.py")]
    report = json.dumps({"install": installed})
    done = subprocess.run(command, input=report, capture_output=True, text=True, check=True)
    assert done.stdout == "jinja2==3.1.6\ntorch==2.13.0\n"


def test_version_is_read_from_the_metadata(setup_cfg):
    version = metadata.version("houlsby-peft")
    assert houlsby_peft.__version__ == version == setup_cfg["metadata"]["version"]


def test_templates_are_found_in_this_environment_too():
    templates = sorted((ROOT / "hub_cards").glob("*.jinja"))
    assert templates
    for path in templates:
        installed = resources.files("houlsby_peft.hub_cards") / path.name
        assert installed.read_text() == path.read_text()
