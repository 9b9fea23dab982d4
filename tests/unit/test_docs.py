"""The documents match the code: generated ones are fresh, commands parse, error codes exist. test_site.py checks links."""

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from plait import Engine, Evaluate, Job
from plait.cli.main import COMMANDS, parse_command_line
from plait.config.errors import PlaitError, explain
from plait.config.job import load_job
from plait.config.keys import KEYS
from plait.config.plan import Plan

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "plait"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROVE = (ROOT / "docs" / "prove.md").read_text(encoding="utf-8")
WALK = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
ERRORS = (SOURCE / "errors.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TECHNIQUES = [
    p
    for p in sorted((SOURCE / "parallel").rglob("*.py"))
    if p.stem in ("strategy", "accumulate", "batch_norm", "compiled", "offload", "precision", "activation_checkpointing", "threads")
    and p.parts[-2:] != ("parallel", "strategy.py")
]
README_LINES, WALK_LINES = 120, 213
IN_WORDS = {"order", "token_budget", "weights", "phases"}
"""Fields of a job that the walk explains and its example does not use."""


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(text: str) -> list[str]:
    """Command lines in a document: indented, after a $ in a block, or in backticks."""
    blocks = re.findall(r"(?m)^(?:    |\$ )((?:plait|torchrun|make|python)\b.*)$", text)
    inline = re.findall(r"`((?:plait (?:train|verify|help)|torchrun|make) [^`]+)`", text)
    return [command.strip() for command in (*blocks, *inline)]


def run_by(text: str, program: str) -> list[list[str]]:
    """The words after `program` of each of its command lines, without comments."""
    words = [shlex.split(command, comments=True) for command in commands(text)]
    joined = [w[w.index("-m") + 1 :] if w[0] == "torchrun" and "-m" in w else w for w in words]
    return [w[1:] for w in joined if w and w[0] == program]


def codes_in_source() -> set[str]:
    """Every string in the source that is an error code."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"[A-Z]\d{3}", node.value)
            ):
                found.add(node.value)
    return found


def test_generated_files_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    generated = generator().generated()
    stale = [str(path.relative_to(ROOT)) for path, text in generated.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run  make docs: {stale}"
    there = set((ROOT / "docs" / "techniques").iterdir())
    assert there == {path for path in generated if path.parent.name == "techniques"}, "docs/techniques has generated files alone"


def test_files_that_pages_show_are_as_they_are() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert text == generator().shown(text), f"{path.name}: run  make docs"


@pytest.mark.parametrize("path", TECHNIQUES, ids=lambda p: p.stem)
def test_a_technique_has_the_fixed_headings(path: Path) -> None:
    generate = generator()
    title, opening, found = generate.sections(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    missing = [heading for heading in generate.HEADINGS if not found.get(heading)]
    assert title and opening and not missing, f"{path.name} has no section {', '.join(missing)}"


def picture(name: str) -> str:
    """The text of a picture, which loads nothing."""
    content = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"' ]+", content) == ["http://www.w3.org/2000/svg"]
    return "".join(ElementTree.fromstring(content).itertext()).replace("\xa0", " ")


def test_the_picture_is_of_the_command_beside_it() -> None:
    """Its figures are those of the run that it shows, and its rows are those of `plait verify`."""
    shown = picture("verify.svg")
    assert '$ plait verify examples/stdlib_gpt/job.py --plan "dp=2"' in shown
    assert all(word in shown for word in ("reference", "candidate", "gradients, step 1", "collectives", "EQUAL"))
    assert "✗" not in shown


def test_the_picture_of_prove_is_of_a_script_with_a_mistake() -> None:
    shown = picture("prove.svg")
    assert '$ plait prove "python ddp.py' in shown and all(page.count("prove.svg)") == 1 for page in (README, PROVE))
    assert all(word in shown for word in ("rows, every step and epoch", "gradients after backward", "✗", "DIFFERENT", "E030"))


@pytest.mark.slow
def test_every_error_code_has_a_page() -> None:
    missing = sorted(code for code in codes_in_source() if explain(code) is None)
    assert not missing, f"src/plait/errors.md has no section for {missing}"


@pytest.mark.slow
def test_every_page_is_of_an_error_code() -> None:
    pages = re.findall(r"(?m)^## (\S+)", ERRORS)
    assert len(pages) == len(set(pages)), "a code has two sections"
    assert not sorted(set(pages) - codes_in_source()), "src/plait/errors.md explains codes that nothing raises"
    for code in pages:
        head, _, body = (explain(code) or "").partition("\n")
        assert re.fullmatch(rf"{code} .*[^.]", head) and len(body) > 20, code


@pytest.mark.parametrize("text", [README, WALK], ids=["README", "walk"])
def test_commands_parse(text: str) -> None:
    found = run_by(text, "plait")
    assert len(found) >= 2
    for words in found:
        _, options = parse_command_line(words)
        if not hasattr(options, "job"):
            assert explain(getattr(options, "code", "P001"))  # report and checkpoint have no job
            continue
        assert (ROOT / options.job.partition(":")[0]).is_file() or options.job in ("waves.py", "mine.py", "job.py")
        if "presicion" not in (options.plan or "") and options.plan != "auto":  # the walk shows the error for a typo
            Plan.parse(options.plan or "dp=*").fill(getattr(options, "nproc", None))


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= README_LINES
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert {words[0] for words in run_by(README, "make")} <= targets
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["description"]
    assert about in README


def test_the_walk_covers_job_and_plan() -> None:
    assert len(WALK.splitlines()) <= WALK_LINES
    missing = [f.name for f in fields(Job) if f"# {f.name}" not in WALK] + [k for k in KEYS if f"| `{k}` |" not in WALK]
    assert not missing, f"docs/walk.md does not explain {missing}"


def test_the_walks_job_is_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_file, loop = re.findall(r"(?s)```python\n(.*?)```", WALK)
    (tmp_path / "waves.py").write_text(job_file, encoding="utf-8")
    job = load_job(str(tmp_path / "waves.py"), {"width": "8"})
    assert isinstance(job.evaluate, Evaluate) and None not in [
        getattr(job, f.name) for f in fields(Job) if f.name not in IN_WORDS
    ]
    monkeypatch.chdir(tmp_path)
    with Engine(job, "dp=1", device="cpu") as engine:
        losses = [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(40))]
    assert losses[-1] < losses[0] / 2
    used = {n.attr for n in ast.walk(ast.parse(loop)) if isinstance(n, ast.Attribute)}
    assert {"resume", "batches", "step", "save", "evaluate", "parse"} <= used


def test_files_the_source_speaks_of_exist() -> None:
    lost = []
    for path in (*SOURCE.rglob("*.py"), *PAGES):
        for name in re.findall(
            r"\b((?:docs|bench|examples|tests)/[\w./-]*\w\.(?:md|py|svg))\b", path.read_text("utf-8")
        ):
            if not (ROOT / name).exists():
                lost.append(f"{path.relative_to(ROOT)}: {name}")
    assert not lost, "\n".join(lost)


def plan_keys(text: str) -> list[str]:
    """Words before = in plans of a page: inline code with at least one key, and the tables of plan files."""
    lines = [re.findall(r"(?<!\S)(\w+)=", code) for code in re.findall(r"`(\w+=[^`\n(]+)`", text)]
    files = [tomllib.loads(block) for block in re.findall(r"(?ms)^```toml plan\S*\n(.*?)^```$", text)]
    return [key for words in lines if set(words) & set(KEYS) for key in words] + [key for file in files for table in file.values() for key in table]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_plans_of_a_page_have_present_keys(path: Path) -> None:
    """A key's former name is accepted for one version, so it would not make a command of a page fail."""
    if path.name in ("log.md", "judged.md", "planner.md") or path.parent.name == "decisions":
        return  # what programs printed at that time
    assert not set(plan_keys(path.read_text(encoding="utf-8"))) - set(KEYS)


def test_every_commands_help_ends_with_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit):
            parse_command_line([name, "--help"])
        text = capsys.readouterr().out
        for line in command.examples:
            assert f"  plait {name} {line}".rstrip() in text
            _, options = parse_command_line([name, *shlex.split(line)])
            assert Plan.parse(getattr(options, "plan", None) or "dp=1")


def test_a_slip_in_a_document_is_seen() -> None:
    """The tests above can fail: a wrong command does not parse."""
    with pytest.raises(PlaitError, match="U001"):
        parse_command_line(["train", "job.py", "--plam", "dp=2"])
    assert commands("    plait train x.py --nproc 2   # two\n") == ["plait train x.py --nproc 2   # two"]
    assert run_by("`torchrun --nproc-per-node 2 -m plait train x.py`", "plait") == [["train", "x.py"]]


def test_faults_that_are_told_have_their_tests() -> None:
    told = (ROOT / "docs/gpu.md").read_text().partition("## Injected faults")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", told))
    there = "".join(path.read_text() for folder in ("device", "unit") for path in (ROOT / "tests" / folder).glob("test_*.py"))
    assert len(named) >= 12 and not [name for name in named if f"def {name}(" not in there]


def test_what_benches_take_from_plait_exists_and_is_public() -> None:
    """A renaming must not silently break a bench that runs rarely."""
    broken = []
    for path in [*ROOT.glob("bench/*.py"), *ROOT.glob("docs/*.py"), *ROOT.glob("examples/**/*.py")]:
        tree, modules = ast.parse(path.read_text(encoding="utf-8")), dict[str, object]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "plait":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if not is_module(str(node.module)):
                        broken.append(f"{path.name}:{node.lineno}: {node.module}")
                    elif not hasattr(importlib.import_module(str(node.module)), alias.name) and not is_module(whole):
                        broken.append(f"{path.name}:{node.lineno}: {whole}")
                    elif is_module(whole):
                        modules[alias.asname or alias.name] = importlib.import_module(whole)
        for node in ast.walk(tree):
            module = modules.get(node.value.id) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else None
            if module is not None and (node.attr.startswith("_") or not hasattr(module, node.attr)):
                broken.append(f"{path.name}:{node.lineno}: {node.value.id}.{node.attr}")
    assert not broken, broken


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False
