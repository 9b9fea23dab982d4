"""The house rules, checked in the source: sizes, private torch names, the environment, unsafe calls, state, docstrings.

Each rule is a function from one file's syntax tree to the places that break it, as ``file:line what``. A test names
them. Limits and lists are at the top, so that changing a rule is one visible line.
"""

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "plait"
FILES = sorted(SOURCE.rglob("*.py"))
STRATEGIES = [
    p
    for p in FILES
    if p.stem in ("strategy", "accumulate", "batch_norm", "compiled", "offload", "precision", "activation_checkpointing", "threads")
]

LINES, STRATEGY_LINES, FUNCTION_LINES, PARAMETERS = 500, 150, 50, 6
SHORT = 12
"""Lines of a function that may have no docstring."""
UNTYPED = 4
"""Parameters and attributes annotated `Any`. Fewer is better."""
SEAMS = (SOURCE / "tensors" / "torch_private.py", SOURCE / "scripts" / "recorder.py")
"""Files with private names of torch: files of plait, and files that are loaded into processes without plait."""
STANDARD = {"_exit"}
"""Underscore names of the standard library that are its documented interface (`os._exit`)."""
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FROM_ITSELF = (SOURCE / "launch" / "fresh_process.py", SOURCE / "launch" / "fork.py")
"""Files that unpickle. Their input was written by the parent process or a forked child, through a pipe or a file without a name, and never
comes from a file that others could write."""
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_NAMES = {"torch.load", "torch.save", "torch.package", "numpy.load", "np.load"}
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
MUTATING = {"append", "extend", "add", "update", "pop", "clear", "setdefault", "insert", "remove", "discard", "popitem"}
HELP_SECONDS = 0.2


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def at(path: Path, node: ast.AST, what: str) -> str:
    return f"{path.relative_to(SOURCE.parents[1])}:{getattr(node, 'lineno', 1)}  {what}"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, or an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


@cache
def our_private_names() -> frozenset[str]:
    """Underscore names that plait itself defines: functions, classes, variables, attributes, fields."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(name for name in found if private(name))


def torch_aliases(path: Path) -> dict[str, str]:
    """The names under which a file imports torch's modules and names: `nn` -> torch.nn, `tree_map` -> torch.utils._pytree.tree_map."""
    found: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
            if any(a.name.split(".")[0] == "torch" and not a.asname for a in node.names):
                found["torch"] = "torch"
    return found


def private_torch_names(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """(node, full name) of every use of a torch name with a private part, and of private attributes of unknown objects."""
    aliases = torch_aliases(path)
    inner: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (
                (node, f"{node.module}.{a.name}") for a in node.names if _has_private(f"{node.module}.{a.name}")
            )
        elif isinstance(node, ast.Import):
            yield from ((node, a.name) for a in node.names if a.name.startswith("torch.") and _has_private(a.name))
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            head, _, rest = dotted(node).partition(".")
            if head in aliases:
                inner |= {id(n) for n in ast.walk(node.value)}
                if _has_private(rest):
                    yield node, f"{aliases[head]}.{rest}"
            elif private(node.attr) and node.attr not in our_private_names() | STANDARD:
                yield node, f"….{node.attr}"


def _has_private(name: str) -> bool:
    return any(private(part) for part in name.split("."))


def mutable(value: ast.AST | None) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def constant(name: str) -> bool:
    return re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__\w+__", name) is not None


def module_names(path: Path) -> Iterator[tuple[ast.AST, str, ast.AST | None]]:
    """(statement, name, value) of each assignment at the top of a file."""
    for node in tree(path).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node, t.id, node.value) for t in targets if isinstance(t, ast.Name))


def report(broken: list[str]) -> None:
    assert not broken, "\n" + "\n".join(broken)


def untyped(annotation: ast.AST | None) -> bool:
    """`Any`, alone or as a member of a union."""
    if isinstance(annotation, ast.BinOp):
        return untyped(annotation.left) or untyped(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def test_what_has_a_type_says_it() -> None:
    """Checks parameters and attributes. Autograd's `ctx` accepts any attribute, and no torch type does."""
    found = []
    for path in FILES:
        for function in functions(path):
            named = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            found += [at(path, a, f"{a.arg}: Any") for a in named if a.arg != "ctx" and untyped(a.annotation)]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.AnnAssign) and untyped(node.annotation):
                found.append(at(path, node, f"{ast.unparse(node.target)}: Any"))
    assert len(found) <= UNTYPED, "\n".join(found)


def test_files_are_short() -> None:
    sizes = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    report([at(p, tree(p), f"{n} lines, at most {LINES}") for p, n in sizes.items() if n > LINES])


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda p: p.stem)
def test_a_strategy_is_short(path: Path) -> None:
    """Counts lines of code. The explanation at the top may have any length."""
    first = tree(path).body[0]
    skip = first.end_lineno or 0 if ast.get_docstring(tree(path)) else 0
    lines = [s.strip() for s in path.read_text(encoding="utf-8").splitlines()[skip:]]
    code = [s for s in lines if s and not s.startswith("#")]
    assert len(code) <= STRATEGY_LINES, f"{path.name}: {len(code)} lines of code, at most {STRATEGY_LINES}"


def test_functions_are_short() -> None:
    long = [(p, f, (f.end_lineno or 0) - f.lineno + 1) for p in FILES for f in functions(p)]
    report([at(p, f, f"{f.name}: {n} lines, at most {FUNCTION_LINES}") for p, f, n in long if n > FUNCTION_LINES])


def test_functions_take_few_parameters() -> None:
    """Counts positional parameters. A keyword-only parameter is named at its call. (Triton's kernels have no keyword-only ones.)"""
    broken = []
    for path in FILES:
        for f in functions(path):
            if any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list):
                continue
            given = [a.arg for a in (*f.args.posonlyargs, *f.args.args)]
            count = len([name for name in given if name not in ("self", "cls", "ctx", "_")])
            if count > PARAMETERS:
                broken.append(at(path, f, f"{f.name}: {count} parameters, at most {PARAMETERS}"))
    report(broken)


def test_private_torch_names_live_in_the_seam() -> None:
    report([at(p, node, name) for p in FILES if p not in SEAMS for node, name in private_torch_names(p)])


def test_only_launch_reads_the_environment() -> None:
    broken = []
    for path in FILES:
        if "launch" in path.parts:
            continue
        for node in ast.walk(tree(path)):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            imported = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) and node.module == "os" else []
            for word in (name.removeprefix("os."), *imported):
                if word in ("environ", "environb", "getenv", "putenv", "unsetenv"):
                    broken.append(at(path, node, f"os.{word}"))
    report(broken)


def test_one_function_forks() -> None:
    """`os.fork` can lose a Ctrl-C; `fork_process` cannot."""
    forks = [(p, n) for p in FILES for n in ast.walk(tree(p)) if isinstance(n, ast.Attribute) and dotted(n) == "os.fork"]
    report([at(path, node, "os.fork") for path, node in forks if path.name != "child.py"])
    assert len(forks) == 1


def test_nothing_runs_code_from_data() -> None:
    """No pickle, torch.load, eval or exec, and no collective that would unpickle received data."""
    broken = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                names = [module, *(a.name for a in node.names)]
                unsafe = [n for n in names if n.split(".")[0] in UNSAFE_MODULES or n in OBJECT_COLLECTIVES]
                unsafe = unsafe if path not in FROM_ITSELF else []
                broken += [at(path, node, f"import of {n}") for n in unsafe]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                broken.append(at(path, node, f"{node.func.id}(…)"))
            elif isinstance(node, ast.Attribute) and (dotted(node) in UNSAFE_NAMES or node.attr in OBJECT_COLLECTIVES):
                broken.append(at(path, node, dotted(node) or node.attr))
    report(broken)


def test_modules_hold_no_mutable_state() -> None:
    """A list, dict or set at the top of a file has a constant's name, and no code in the file changes it."""
    broken = []
    for path in FILES:
        held = {name for _, name, value in module_names(path) if mutable(value)}
        broken += [at(path, n, name) for n, name, value in module_names(path) if mutable(value) and not constant(name)]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Global):
                broken.append(at(path, node, f"global {', '.join(node.names)}"))
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and dotted(node.value) in held:
                broken.append(at(path, node, f"{dotted(node.value)}[…] is assigned"))
            elif isinstance(node, ast.Attribute) and node.attr in MUTATING and dotted(node.value) in held:
                broken.append(at(path, node, f"{dotted(node)}"))
    report(broken)


def test_public_functions_and_classes_have_docstrings() -> None:
    """A short function needs only its name and signature. The functions of a strategy (is_enabled, validate, ...) are explained once, in the
    contract."""
    contract = {f.name for f in functions(SOURCE / "parallel" / "apply_order.py")}
    broken = []
    for path in FILES:
        for node in tree(path).body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            short = not isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno < SHORT
            if ast.get_docstring(node) is None and not short and not (path in STRATEGIES and node.name in contract):
                broken.append(at(path, node, node.name))
    report(broken)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize(
    "folder", sorted({p.parent for p in FILES} - {SOURCE}), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_a_folder_says_what_each_of_its_files_does(folder: Path) -> None:
    """Its `__init__.py` is the map: one line for each file and each folder in it, and nothing else."""
    told = (ast.get_docstring(tree(folder / "__init__.py")) or "").split("\n\n", 1)[1]
    here = {
        f"{p.stem}/" if p.is_dir() else p.stem
        for p in folder.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert {line.split()[0] for line in told.splitlines()} == here - {"__init__"}
    assert len(tree(folder / "__init__.py").body) == 1, "it imports nothing"


def test_help_imports_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "plait", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert done.stdout.startswith("usage: plait") and "plait" in imported
    heavy = imported & {"torch", "numpy", "rich", "psutil", "safetensors"}
    assert not heavy, f"plait --help imports {sorted(heavy)}"


def processor_seconds(*words: str) -> float:
    """Processor seconds of Python with these arguments, the least of five runs, because other load then hardly matters."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def test_help_answers_at_once() -> None:
    """A slow machine takes long for an empty program too. An import of torch would take a hundred times as long."""
    limit = max(HELP_SECONDS, 15 * processor_seconds("-c", "import argparse, json, pathlib, textwrap"))
    took = processor_seconds("-m", "plait", "--help")
    assert took <= limit, f"best of five: {took:.3f} s, at most {limit:.3f}"
