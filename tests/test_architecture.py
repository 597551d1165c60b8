"""Imports point down, and what must not be called is not called (rule 28)."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from trainkit.lazy import ask

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. A room is a folder of trainkit, or a file beside them. It sees the rows below its
# own, and itself; inside of it, files may see each other without a circle. The rows stand in rings:
# the core trains, and none of it imports what is around it.
CORE = (
    ("errors", "lazy", "version"),
    ("types",),
    ("basics",),
    ("containers",),
    ("metrics", "precision"),
    ("distributed",),
    ("checkpoint", "data"),
    ("export",),
    ("strategies",),
    ("training",),
    ("trainer",),
)
WRITERS = (("journal", "storage", "trackers"), ("callbacks",))
TOOLS = (
    ("accelerator", "inspect", "large_models", "losses", "testing", "watch"),
    ("launch",),
    ("accelerate_compat",),
    ("cli",),
)
LAYERS = (*CORE, *WRITERS, *TOOLS)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
CALLBACKS = "callbacks"
# What `Trainer.replay` returns has its type there, and the face of `export` names functions of the
# other: for type checkers, and nothing is imported.
FOR_TYPES = [("trainer", "inspect"), ("export", "large_models")]

PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    *(("builtins", name) for name in FORBIDDEN_NAMES),
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("os", "system"),
    ("os", "popen"),
    # These unpickle what another process sent.
    ("dist", "all_gather_object"),
    ("dist", "broadcast_object_list"),
    ("dist", "gather_object"),
    ("dist", "scatter_object_list"),
}
# The one place that pickles: objects that a user hands to a gather, and nothing of ours.
PICKLES_FOR_USERS = "trainkit/containers/wire_format.py"
# The one place that uses what torch does not document.
INTERNALS = "trainkit/basics/torch_internals.py"
NOT_OF_TORCH = {
    *(
        "_exit",
        "_shutdown",
        "_current_frames",
        "_run_exitfuncs",
        "_asdict",
        "_option_string_actions",
    ),
    "_instances",  # the bars of tqdm at work
    *("_init_weights", "_attn_implementation"),  # transformers
    *("_coalesce_grad_reduction", "_hp_mapping", "_update_model_bit16_weights"),  # DeepSpeed
}
# The one place that calls these: torch's own files, read without unpickling, written on request.
TORCH_FILES = "trainkit/export/pickled.py"

KINDS_OF_DEVICES = {"cuda", "hip", "nccl", "npu", "xccl", "xpu"}
"""Words of one kind of accelerator: everything else goes by what `torch.accelerator` can do."""
NAMES_DEVICES = {
    "trainkit/inspect/argument_names.py": "other libraries' names of arguments",
    "trainkit/basics/device.py": "asks torch, and is asked by all others",
    "trainkit/launch/machine.py": "variables that hide them, and what torch was built for",
    "trainkit/launch/accelerate_keys.py": "knows the keys of another program's file",
    "trainkit/launch/workers.py": "a variable that torchrun gives to processes",
    "trainkit/accelerate_compat/availability.py": "another library's functions for them",
    "trainkit/accelerate_compat/names.py": "their names",
    "trainkit/accelerator/settings.py": "another library's kinds of jobs",
    "trainkit/watch/hints.py": "a variable that helps with one error",
    "callbacks/profiler.py": "an argument of torch's profiler",
}


def _files() -> list[Path]:
    core = [path for path in (ROOT / "trainkit").rglob("*.py") if not _is_linked(path)]
    return sorted(core + list((ROOT / CALLBACKS).rglob("*.py")))


def _is_linked(path: Path) -> bool:
    return (ROOT / "trainkit" / CALLBACKS) in path.parents


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def _nodes(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


@pytest.fixture(scope="module", autouse=True)
def _trees_do_not_stay() -> Iterator[None]:
    """Forget them: each fork of a later test would pay for some hundred MB."""
    yield
    _nodes.cache_clear()
    _tree.cache_clear()


def _room(path: Path) -> str:
    """Return the part of trainkit that `path` belongs to; empty for the public face."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    room = CALLBACKS if parts[0] == CALLBACKS else parts[1]
    return "" if room == "__init__" else room


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of each import, those under TYPE_CHECKING too."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def _rooms_seen(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the room of each import from trainkit."""
    for line, name in _imports(tree):
        parts = name.split(".")
        if parts[0] == "trainkit":
            yield line, parts[1] if len(parts) > 1 else ""


def _upward(room: str, tree: ast.Module) -> Iterator[str]:
    for line, seen in _rooms_seen(tree):
        if seen == room or (room, seen) in FOR_TYPES:
            continue
        # A name that is no room comes through the public face, which is above everything.
        if LEVEL.get(seen, len(LAYERS)) >= LEVEL[room]:
            yield f"line {line} imports trainkit.{seen}"


def test_each_module_has_its_layer() -> None:
    assert not {room for path in _files() if (room := _room(path))} - set(LEVEL)


def test_imports_point_down() -> None:
    assert not [
        f"{_name(path)}, {found}"
        for path in _files()
        if (room := _room(path))  # the public face names everything
        for found in _upward(room, _tree(path))
    ]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("trainkit", *parts) if parts[0] == CALLBACKS else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_file_is_part_of_a_circle_of_imports() -> None:
    files = {_module(path): path for path in _files()}
    graph = {
        module: {
            name if name in files else name.rpartition(".")[0]
            for _, name in _imports(_tree(path))
            if name.startswith("trainkit")
        }
        - {module}
        for module, path in files.items()
    }
    # A package's face names what is in it: nothing below the face may come through it.
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_are_absolute() -> None:
    assert not [
        f"{_name(path)}, line {line}"
        for path in _files()
        for line, name in _imports(_tree(path))
        if name.startswith(".")
    ]


def test_what_the_core_asks_for_is_provided_by_the_public_face() -> None:
    asked = {
        node.args[0].value
        for path in _files()
        if "trainkit.lazy.ask" in {name for _, name in _imports(_tree(path))}
        for node in _nodes(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ask"
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }
    assert asked
    assert all(callable(ask(name)) for name in asked)


def _forbidden(tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_NAMES:
                yield f"line {node.lineno} calls {name}"
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                if (owner, attribute) in FORBIDDEN_ATTRIBUTES:
                    yield f"line {node.lineno} uses {owner}.{attribute}"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield f"line {node.lineno} asks for a shell"


def test_nothing_runs_foreign_code() -> None:
    assert not [
        f"{_name(path)}, {found}"
        for path in _files()
        if _name(path) != TORCH_FILES
        for found in _forbidden(_tree(path))
    ]


def test_torch_reads_its_files_without_unpickling() -> None:
    tree = _tree(ROOT / TORCH_FILES)
    uses = {use.split(" uses ")[1] for use in _forbidden(tree)}
    assert uses == {"torch.load", "torch.save"}
    assert _always_restricts(tree)


@cache
def _own_names() -> frozenset[str]:
    """Return what is defined anywhere in trainkit: functions, classes, variables, attributes."""
    found: set[str] = set()
    for path in _files():
        for node in _nodes(_tree(path)):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
    return frozenset(found)


def _undocumented(tree: ast.Module) -> Iterator[str]:
    """Yield the uses of names with an underscore that are not ours."""
    for node in _nodes(tree):
        match node:
            case ast.Attribute(attr=name) if re.match("_[^_]", name):
                if name not in _own_names() | NOT_OF_TORCH:
                    yield f"line {node.lineno} uses {name}"
    for line, name in _imports(tree):
        if name.startswith("torch.") and re.search(r"\._[^_]", name):
            yield f"line {line} imports {name}"


def test_what_torch_does_not_document_is_used_in_one_file() -> None:
    users = {_name(path): list(_undocumented(_tree(path))) for path in _files()}
    assert users.pop(INTERNALS)
    assert not {name: found for name, found in users.items() if found}


def _words(tree: ast.Module) -> Iterator[str]:
    """Yield the words of names and of strings, but for docstrings."""
    documents = {
        node.body[0].value
        for node in _nodes(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in _nodes(tree):
        texts = [getattr(node, name, None) for name in ("attr", "id", "name", "arg", "module")]
        if isinstance(node, ast.Constant) and node not in documents:
            texts.append(node.value)
        for text in texts:
            if isinstance(text, str):
                yield from re.split(r"[^a-z]+", text.lower())


def test_one_module_knows_kinds_of_devices() -> None:
    naming = {_name(path) for path in _files() if KINDS_OF_DEVICES & {*_words(_tree(path))}}
    assert naming == set(NAMES_DEVICES)
    assert {*_words(ast.parse('"""cuda"""\ntorch.cuda.empty_cache()'))} >= {"cuda"}
    assert "cuda" not in {*_words(ast.parse('"""cuda"""'))}


def test_one_module_pickles() -> None:
    assert [
        _name(path)
        for path in _files()
        if any(name.split(".")[0] in PICKLERS for _, name in _imports(_tree(path)))
    ] == [PICKLES_FOR_USERS]


def _always_restricts(tree: ast.Module) -> bool:
    """Return whether each `torch.load` has `weights_only=True` written out."""
    loads = [
        node
        for node in _nodes(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    return bool(loads) and all(
        any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in load.keywords)
        for load in loads
    )


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "import torch\ntorch.load('file')",
        "from torch import distributed as dist\ndist.broadcast_object_list([1])",
        "import subprocess\nsubprocess.run('ls', shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(_forbidden(ast.parse(source)))


def test_the_search_sees_imports_for_type_checkers() -> None:
    source = "if TYPE_CHECKING:\n    from trainkit.trainer import Trainer\n"
    assert list(_upward("training", ast.parse(source))) == ["line 2 imports trainkit.trainer"]
    assert list(_upward("training", ast.parse("import trainkit.callbacks")))
    assert list(_upward("training", ast.parse("from trainkit import Trainer")))
    assert not list(_upward(CALLBACKS, ast.parse("from trainkit.training.run import AnyRun")))
