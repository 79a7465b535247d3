"""The house: layers, no cycles, the front door, a light import, files one reads whole."""

import ast
import collections
import graphlib
import pathlib
import subprocess
import sys

import pytest

import jmp
from tests import quick

PACKAGE = pathlib.Path(jmp.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
IN_LAYERS = """
    _jax_compat _lazy _messages
    dtypes
    trees
    _array_calls policy rules sharding
    autocasting
    loss_scaling
    transforms
    adapters
    diagnostics
    __main__
"""
LAYERS = {name: i for i, line in enumerate(IN_LAYERS.splitlines()) for name in line.split()}


def part_of(path):
    """The file or folder of the package that `path` belongs to, such as "transforms"."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def of_each_file(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(PACKAGE)))


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the full address"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@of_each_file(FILES)
def test_a_file_imports_only_from_lower_layers_or_its_own_folder(path):
    own = part_of(path)
    for module in imported_modules(path):
        assert not module.startswith("jax._src"), f"{path} imports {module}"
        names = module.split(".")
        if names[0] != "jmp" or own in ("__init__", "__main__"):  # they stand above all layers
            continue
        other = names[1]
        assert other in LAYERS, f"{path} imports its own root by {module}"
        if other != own:
            # Policies and their rules share a layer; rules stand on policies.
            lower = LAYERS[other] < LAYERS[own] or (own, other) == ("rules", "policy")
            assert lower, f"{path} imports {module} from a layer that is not lower"


def module_name(path):
    names = ("jmp", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(names).removesuffix(".__init__")


def test_no_modules_import_one_another_in_a_cycle():
    """Imports inside of functions count, and so do imports for type checkers."""
    modules = {module_name(path): path for path in FILES}
    imports = {}
    for name, path in modules.items():
        found = set(imported_modules(path))
        # An import that is no module is a name in one.
        found |= {module.rpartition(".")[0] for module in found - set(modules)}
        imports[name] = found & set(modules)
    graphlib.TopologicalSorter(imports).prepare()  # a CycleError names the cycle


def lines_of_code(path):
    """Counts lines that are neither blank nor a comment nor part of a docstring."""
    text = path.read_text()
    left_out = set()
    for node in ast.walk(ast.parse(text)):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                left_out.update(range(docstring.lineno, docstring.end_lineno + 1))
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    return sum(n not in left_out for n, line in lines.items() if line and line[0] != "#")


ROOT = PACKAGE.parent
FOLDERS = {  # beside the package, and those that each may not import
    "testbed": {"tests", "benchmarks", "docs"},
    "benchmarks": {"tests", "docs"},
    "docs": {"tests"},
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_tests_and_benchmarks_share_is_in_the_testbed(folder):
    peers = ROOT / "benchmarks" / "peers"  # other libraries, as they were installed
    paths = [path for path in (ROOT / folder).rglob("*.py") if peers not in path.parents]
    assert paths
    for path in paths:
        roots = {module.partition(".")[0] for module in imported_modules(path)}
        assert not roots & FOLDERS[folder], f"{path} imports {sorted(roots & FOLDERS[folder])}"


def test_no_test_module_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        imported = [name for name in imported_modules(path) if name.startswith("tests.")]
        assert not [name for name in imported if ".test_" in name], path


@of_each_file(FILES)
def test_a_file_can_be_read_whole(path):
    assert lines_of_code(path) <= 350


# Functions that are defined in several modules, under one name, for a reason: what an adapter does
# in its framework has the name of that act, which is public.
ACTS_OF_ADAPTERS = {
    "autocast": "that of jmp, for what a framework hands over",
    "cast_params": "parameters as a policy stores them",
    "reset_masters": "that of jmp.transforms, for an nnx.Optimizer",
    "scaled_value_and_grad": "that of jmp, for functions of modules",
    "train_step": "one step of training, taken or skipped as a whole",
}


def test_no_class_or_function_is_defined_in_two_modules():
    """Private ones count too: each word has one meaning."""
    defined = collections.defaultdict(set)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                defined[node.name].add(str(path.relative_to(PACKAGE)))
    homonyms = {name: places for name, places in defined.items() if len(places) > 1}
    assert set(homonyms) == ACTS_OF_ADAPTERS.keys()
    for name, places in homonyms.items():
        outside = [place for place in places if not place.startswith("adapters/")]
        assert len(outside) <= 1, f"{name} is defined in {outside}"


def test_the_front_door_is_sorted_and_complete():
    assert jmp.__all__ == sorted(jmp.__all__)
    assert len(set(jmp.__all__)) == len(jmp.__all__)
    for name in jmp.__all__:
        assert getattr(jmp, name) is not None
        assert getattr(jmp, name).__doc__
    classes_and_functions = {
        name
        for name, value in vars(jmp).items()
        if callable(value) and getattr(value, "__module__", "").startswith("jmp")
        if not name.startswith("__")
    }
    assert classes_and_functions == set(jmp.__all__)


def run_python(code):
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()


PARTS = ["jmp.transforms", "jmp.diagnostics"]
FRAMEWORKS = {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku"}
ADAPTERS = [f"jmp.adapters.{name}" for name in FRAMEWORKS]


def test_importing_jmp_needs_jax_alone_and_parts_are_loaded_when_touched():
    code = f"""
import sys, jmp
jmp.get_policy("mixed_float16"), dir(jmp), dir(jmp.adapters)
from jax._src import xla_bridge  # private, but the one place where JAX keeps its backends
print(len(xla_bridge._backends))
print(*sys.modules)
for part in {[*PARTS, *ADAPTERS]}:
    assert part not in sys.modules, part
    assert eval(part) is sys.modules[part]
"""
    backends, *loaded = run_python(code)
    assert backends == "0"
    assert "jmp.policy" in loaded
    assert not {"flax", "optax", "chex", "equinox", "haiku"} & set(loaded)


def test_a_missing_framework_is_named_with_the_extra_that_installs_it():
    missing = [("optax", "jmp.transforms")]
    missing += [(extra, f"jmp.adapters.{name}") for name, extra in FRAMEWORKS.items()]
    code = f"""
import sys, jmp
for framework, part in {missing}:
    sys.modules[framework] = None
    try:
        eval(part)
    except ModuleNotFoundError as error:
        print(error, end="|")
    package, _, name = part.rpartition(".")
    assert name not in dir(eval(package)), part  # help() touches all that is listed
    del sys.modules[framework]
    assert name in dir(eval(package)), part
sys.modules["equinox"] = None
try:
    from jmp.adapters import equinox
except ModuleNotFoundError as error:
    print(error)
"""
    found = " ".join(run_python(code)).split("|")
    way = "Install jmp with its extra '{0}': pip install '.[{0}]' in its clone."
    assert found == [
        "jmp.transforms needs optax, which is not installed. Install it: pip install optax.",
        *(
            f"jmp.adapters.{name} needs {extra}, which is not installed. {way.format(extra)}"
            for name, extra in [*FRAMEWORKS.items(), ("equinox", "equinox")]
        ),
    ]


def test_parts_are_listed_and_a_misspelt_name_is_an_attribute_error():
    assert {"adapters", "diagnostics", "transforms", *jmp.__all__} <= set(dir(jmp))
    assert set(FRAMEWORKS) <= set(dir(jmp.adapters))
    with pytest.raises(AttributeError, match="module 'jmp' has no attribute 'transform'"):
        _ = jmp.transform
    with pytest.raises(AttributeError, match="module 'jmp.adapters' has no attribute 'line'"):
        _ = jmp.adapters.line
    assert not hasattr(jmp, "autocasts")


def messages_of(tree):
    """Yields what is raised or warned of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.exc
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("warn", "add_note"):
            yield node


@of_each_file(FILES)
def test_a_message_holds_no_representation_but_a_description(path):
    """The representation of what a user gave may be megabytes long: `jmp._messages.described`."""
    for message in messages_of(ast.parse(path.read_text())):
        for node in ast.walk(message):
            if isinstance(node, ast.FormattedValue):
                assert node.conversion == -1, f"{path}:{node.lineno} prints a representation"


def test_each_file_of_the_package_has_a_list_of_quick_tests():
    named = set(quick.listed())
    files = {str(path.relative_to(ROOT)) for path in FILES}
    assert named == files, "run: make quick-list"
