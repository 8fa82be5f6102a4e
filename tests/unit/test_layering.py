"""The layers of the repository, read out of the source of every module.

Services never import each other, shared and kernels import nothing of ours, and each package
imports only the libraries that it is meant to need. A package that is not listed here fails.
Within a package the folders lie in layers too: what one of them imports never leads back to it.
Nothing is unpickled, no text is run as code, no shell is asked.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    package.name: package
    for root in ("shared", "kernels", "services")
    for package in (ROOT / root).iterdir()
    if any(package.glob("*.py"))
}

LAYERS = {
    "pagefleet": {"msgspec", "zmq", "prometheus_client"},
    "pagefleet_kernels": {"torch", "triton", "numba", "llvmlite", "numpy"},
    "pagefleet_gateway": {
        *("pagefleet", "msgspec", "zmq", "prometheus_client", "starlette", "uvicorn", "h11"),
        *("tokenizers", "jinja2", "llguidance", "opentelemetry"),
    },
    "pagefleet_scheduler": {"pagefleet", "msgspec", "zmq"},
    "pagefleet_worker": {
        *("pagefleet", "pagefleet_kernels", "msgspec", "zmq", "numpy", "torch", "transformers"),
        *("safetensors", "gguf", "tokenizers", "huggingface_hub", "llguidance", "regex"),
    },
    "pagefleet_launcher": {"pagefleet", "msgspec", "zmq", "msgpack"},
}
"""What each package may import beside itself and the standard library."""

LIGHT = [name for name in LAYERS if name not in ("pagefleet_worker", "pagefleet_kernels")]
HEAVY = ["torch", "transformers", "numpy", "numba", "triton", "gguf", "safetensors"]

UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_ATTRIBUTES = {
    *("recv_pyobj", "send_pyobj", "system", "popen", "create_subprocess_shell"),
    *("getoutput", "getstatusoutput"),
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "importlib.import_module"}
UNSAFE_KEYWORDS = {"trust_remote_code", "shell", "allow_pickle"}


def modules(package: str) -> Iterator[tuple[str, ast.AST]]:
    """Name and source of every module of a package."""
    for path in PACKAGES[package].rglob("*.py"):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    """Top-level names of everything that a module imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield (node.module or "").partition(".")[0]


def room(name: str) -> str:
    """The folder or, beside the folders, the module that a dotted name lies in."""
    return ".".join(name.split(".")[:2])


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Everything in a module that could run what others wrote."""
    yield from UNSAFE_MODULES.intersection(imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_ATTRIBUTES:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            yield ast.unparse(node.func)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            yield from names & UNSAFE_ATTRIBUTES
            yield from {f"{node.module}.{name}" for name in names} & UNSAFE_CALLS
        elif isinstance(node, ast.keyword) and node.arg in UNSAFE_KEYWORDS:
            yield from {ast.unparse(node)} - {f"{node.arg}=False"}


def test_every_package_has_a_layer() -> None:
    assert PACKAGES.keys() == LAYERS.keys()


def test_no_root_is_a_package() -> None:
    for root in {package.parent for package in PACKAGES.values()}:
        assert not (root / "__init__.py").exists()


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_what_its_layer_may(package: str) -> None:
    allowed = {package, *LAYERS[package], *sys.stdlib_module_names}
    found = [(name, each) for name, tree in modules(package) for each in imports(tree)]
    assert [(name, each) for name, each in found if each not in allowed] == []


@pytest.mark.parametrize("package", LAYERS)
def test_folders_of_a_package_never_import_in_a_circle(package: str) -> None:
    needs = defaultdict(set)
    for path in PACKAGES[package].rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGES[package].parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
                for name in node.names:
                    needs[room(module)].add(room(f"{node.module}.{name.name}"))
    TopologicalSorter({each: others - {each} for each, others in needs.items()}).prepare()


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_runs_nothing_that_others_wrote(package: str) -> None:
    assert [(name, found) for name, tree in modules(package) for found in unsafe(tree)] == []


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "def f():\n    import dill.source"),
        *("socket.recv_pyobj()", "torch.load(path)", "eval(text)", "os.system(command)"),
        *("AutoModel.from_pretrained(x, trust_remote_code=True)", "run(command, shell=True)"),
        *("run(command, shell=asked)", "numpy.load(path, allow_pickle=True)"),
        *("from importlib import import_module", "from torch import load", "from os import system"),
    ],
)
def test_what_is_unsafe_is_seen(source: str) -> None:
    assert list(unsafe(ast.parse(source)))


def test_what_is_harmless_passes() -> None:
    harmless = "model.eval()\nast.literal_eval(x)\nload(x, trust_remote_code=False)\nre.match(x, y)"
    assert not list(unsafe(ast.parse(harmless)))


@pytest.mark.parametrize("package", LIGHT)
def test_importing_a_light_package_loads_nothing_heavy(package: str) -> None:
    names = [
        ".".join(path.relative_to(PACKAGES[package].parent).with_suffix("").parts)
        for path in PACKAGES[package].rglob("*.py")
    ]
    program = f"import sys, {', '.join(names)}; print(*sys.modules)"
    paths = [str(folder.parent) for folder in PACKAGES.values()]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {program}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert package in loaded
    assert not loaded.intersection(HEAVY)
