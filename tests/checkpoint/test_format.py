"""The documented format: readable without trainkit, and for ever."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from tests.checkpoint.fixtures import make_format_3, make_format_4
from tests.checkpoint.fixtures.make_format_1 import content
from tests.checkpoint.sharded import whole_parts
from tests.checkpoint.test_codec import assert_same
from tests.checkpoint.toys import save_alone
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.format import codec
from trainkit.checkpoint.format.tensor_file import read_header
from trainkit.checkpoint.format.tensors import kept_strides
from trainkit.checkpoint.io.reading import open_directory, open_file
from trainkit.errors import CheckpointCorrupt

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
FIXTURE = Path(__file__).parent / "fixtures" / "format_1"


def test_a_checkpoint_of_version_1_loads_for_ever() -> None:
    checkpoint = CheckpointStore(FIXTURE.parent).open(FIXTURE)
    assert (checkpoint.step, checkpoint.manifest.run_id) == (120, "fixture")
    assert checkpoint.names() == ["model", "optimizer", "tied", "values"]
    for part, state in content().items():
        assert_same(checkpoint.read(part), state)


def test_a_checkpoint_of_version_3_loads_for_ever() -> None:
    path = FIXTURE.with_name("format_3")
    checkpoint = CheckpointStore(path.parent).open(path)
    assert checkpoint.manifest.format_version == 3
    for part, state in make_format_3.content().items():
        read = checkpoint.read(part)
        assert_same(read, state)
        tensors = zip(_tensors(read), _tensors(state), strict=True)
        assert all(one.stride() == kept_strides(two) for one, two in tensors if kept_strides(two))


def test_a_checkpoint_of_version_4_loads_for_ever() -> None:
    path = FIXTURE.with_name("format_4")
    checkpoint = CheckpointStore(path.parent).open(path)
    assert checkpoint.manifest.format_version == 4
    for rank in range(make_format_4.SIZE):
        for part, state in make_format_4.content(rank).items():
            assert_same(checkpoint.read(part), state)


def test_the_documented_reader_finds_what_is_packed() -> None:
    *_, code = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    found = namespace["read_packed"](FIXTURE.with_name("format_4"), "process-00001.json")
    assert json.loads(found)["loaders"] == [{"batches": 1}]


def _tensors(state: Any) -> list[torch.Tensor]:
    values = [state] if isinstance(state, torch.Tensor) else []
    inner = state.values() if isinstance(state, dict) else state if type(state) is list else ()
    return [*values, *(tensor for value in inner for tensor in _tensors(value))]


def test_the_documented_reader_needs_no_trainkit(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    model = torch.nn.Linear(3, 2)
    tied = {"embed": model.weight, "head": model.weight, "bias": model.bias}
    parts = {"model": model.state_dict(), "tied": tied}
    path = save_alone(CheckpointStore(tmp_path), 1, parts)
    save_file({f"{part}.{k}": v.detach().clone() for part in parts for k, v in parts[part].items()},
              tmp_path / "expected.safetensors")  # fmt: skip
    script = f"""
{code}
import sys, torch
expected = load_file("expected.safetensors")
read = {{f"{{p}}.{{k}}": v for p in ("model", "tied")
         for k, v in read_tensors({str(path)!r}, p).items()}}
assert read.keys() == expected.keys(), (read.keys(), expected.keys())
assert all(torch.equal(read[name], expected[name]) for name in read)
assert not [name for name in sys.modules if name.startswith("trainkit")]
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_the_documented_reader_joins_shards() -> None:
    _, code, _ = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    found = namespace["join_tensors"](FIXTURE.with_name("format_2"))
    expected = whole_parts()["model"]
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_every_form_of_a_value_is_documented() -> None:
    forms = set(re.findall(r'\{"(\$[a-z]+)"', DOCUMENT))
    assert forms == set(codec._Decoder.readers) | {"$sharded"}


def test_listing_and_verifying_import_no_torch(tmp_path: Path) -> None:
    save_alone(CheckpointStore(tmp_path), 1)
    script = f"""
import sys
from pathlib import Path
from trainkit.checkpoint import CheckpointStore, KeepPolicy, rotate
from trainkit.basics.lock import RunLock
store = CheckpointStore(Path({str(tmp_path)!r}))
assert store.open(store.checkpoints()[0].path).names()
rotate(store, KeepPolicy())
assert not {{"torch", "numpy", "safetensors"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def _with_strides(text: Any) -> tuple[None, bytes]:
    tensor = {"dtype": "U8", "shape": [4, 2], "data_offsets": [0, 8]}
    return None, json.dumps({"__metadata__": {"strides": text}, "a": tensor}).encode()


HEADERS: dict[str, Any] = {
    "too long": (2**64 - 1, b"{}"),
    "no object": (None, b"[]"),
    "duplicate": (None, b'{"a": 1, "a": 2}'),
    "unknown dtype": (None, b'{"a": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}'),
    "overflow": (None, b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296, 4294967296], '
                       b'"data_offsets": [0, 8]}}'),
    "gap": (None, b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}'),
    "overlap": (None, b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, '
                      b'"b": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}'),
    "reversed": (None, b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [8, 0]}}'),
    "negative": (None, b'{"a": {"dtype": "U8", "shape": [-8], "data_offsets": [8, 0]}}'),
    "trailing": (None, b'{"a": {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]}}'),
    "beyond": (None, b'{"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}'),
    "no number": (None, b'{"a": {"dtype": "U8", "shape": [8.0], "data_offsets": [0, 8]}}'),
    "metadata": (None, b'{"__metadata__": 3, "a": {"dtype": "U8", "shape": [8], '
                       b'"data_offsets": [0, 8]}}'),
    "strides": _with_strides(3),
    "strides of no tensor": _with_strides('{"b": [1, 4]}'),
    "strides that leave gaps": _with_strides('{"a": [1, 5]}'),
    "strides that overlap": _with_strides('{"a": [1, 1]}'),
    "strides of more dimensions": _with_strides('{"a": [1, 4, 8]}'),
    "strides beyond the memory": _with_strides('{"a": [1, 1073741824]}'),
    "negative strides": _with_strides('{"a": [1, -4]}'),
    "strides that are no numbers": _with_strides('{"a": [1.0, 4]}'),
    "strides that are no list": _with_strides('{"a": "14"}'),
    "strides without end": _with_strides("[" * 10_000),
    "infinite": (None, b'{"a": Infinity}'),
    "byte order mark": (None, b"\xef\xbb\xbf{}"),
    "depth": (None, b"[" * 100_000),
    "empty with an offset": (None, b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [8, 8]}}'),
    "negative offset": (None, b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}}'),
    "bool": (None, b'{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}'),
    "text": (None, b'{"a": {"dtype": "U8", "shape": "8", "data_offsets": [0, 8]}}'),
    "dimensions": (None, b'{"a": {"dtype": "U8", "shape": [%s8], "data_offsets": [0, 8]}}'
                         % (b"1," * 999)),
    "three offsets": (None, b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 9]}}'),
    "no offsets": (None, b'{"a": {"dtype": "U8", "shape": [8]}}'),
    "dtype of a list": (None, b'{"a": {"dtype": ["U8"], "shape": [8], "data_offsets": [0, 8]}}'),
    "overlap by half": (None, b'{"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]}, '
                              b'"b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}'),
    "invalid": (None, b'{"\xff": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_header_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    length, text = HEADERS[name]
    number = len(text) if length is None else length
    (tmp_path / "x.safetensors").write_bytes(number.to_bytes(8, "little") + text + bytes(8))
    with (
        open_directory(tmp_path) as directory,
        open_file(directory, "x.safetensors", tmp_path) as file,
        pytest.raises(CheckpointCorrupt, match=r"x\.safetensors"),
    ):
        read_header(file)


FILES = b'{"x.json": {"bytes": 1, "xxh3_128": "0123456789abcdef0123456789abcdef"}}'
MANIFESTS = {
    "path": FILES.replace(b"x.json", b"../x.json"),
    "absolute": FILES.replace(b"x.json", b"/etc/passwd"),
    "hidden": FILES.replace(b"x.json", b".x.json"),
    "nul": FILES.replace(b"x.json", b"x\\u0000.json"),
    "itself": FILES.replace(b"x.json", b"manifest.json"),
    "case": FILES[:-1] + b"," + FILES[1:].replace(b"x.json", b"X.json"),
    "duplicate": FILES[:-1] + b"," + FILES[1:],
    "other kind": FILES.replace(b"x.json", b"x.pkl"),
    "long": FILES.replace(b"x.json", b"x" * 200 + b".json"),
    "negative": FILES.replace(b"1,", b"-1,"),
    "huge": FILES.replace(b"1,", b"9223372036854775808,"),
    "bool": FILES.replace(b"1,", b"true,"),
    "nan": FILES.replace(b"1,", b"NaN,"),
    "digest": FILES.replace(b"0123", b"ZZZZ"),
    "list": b"[]",
    "depth": b"[" * 100_000,
    "folder": FILES.replace(b"x.json", b"a/x.json"),
    "backslash": FILES.replace(b"x.json", b"..\\\\x.json"),
    "accent": FILES.replace(b"x.json", "\u00e9.json".encode()),
    "composed": FILES.replace(b"x.json", "e\u0301.json".encode()),
    "long s": FILES.replace(b"x.json", "\u017f.json".encode()),
    "newline": FILES.replace(b"x.json", b"x\\n.json"),
    "empty": FILES.replace(b"x.json", b""),
    "invalid": FILES.replace(b"x.json", b"\xff.json"),
    "surrogate": FILES.replace(b"x.json", b"\\ud800.json"),
    "float": FILES.replace(b"1,", b"1.0,"),
    "infinity": FILES.replace(b"1,", b"1e999,"),
    "no size": FILES.replace(b'"bytes": 1, ', b""),
    "digits of others": FILES.replace(b"0123456789", "\u0660123456789".encode()),
}


def open_with_files(text: bytes, directory: Path, metadata: bytes = b"{}") -> None:
    """Open a checkpoint whose manifest says this of its files, under a digest that is right."""
    rest = (
        b' "format_version": 1, "step": 1, "revision": 0, "run_id": "", "created": "", '
        b'"world_size": 1, "metadata": ' + metadata + b', "files": ' + text + b"}"
    )
    head = b'{"manifest_xxh3_128": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n'
    folder = directory / "step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(head + rest)
    CheckpointStore(directory).open(folder)


def packed(*files: tuple[str, int, int]) -> bytes:
    text = json.dumps({f"{i}.json": {"bytes": size, "xxh3_128": "0" * 32, "pack": pack, "begin": at}
                       for i, (pack, at, size) in enumerate(files)})  # fmt: skip
    return text.encode()


MANIFESTS |= {
    "gap": packed(("processes.bin", 0, 4), ("processes.bin", 5, 4)),
    "overlap": packed(("processes.bin", 0, 4), ("processes.bin", 3, 4)),
    "late": packed(("processes.bin", 1, 4)),
    "elsewhere": packed(("../x", 0, 4)),
    "manifest": packed(("manifest.json", 0, 4)),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_lies_with_a_right_digest_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"`manifest\.json`"):
        open_with_files(MANIFESTS[name], tmp_path)
    assert CheckpointStore(tmp_path).checkpoints() == []


@pytest.mark.parametrize("metadata", [b'{"$int": "0x1"}', b'{"$float": "nan"}', b'{"$tuple": []}'])
def test_metadata_that_stand_for_another_value_are_refused(metadata: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"`manifest\.json`: `metadata` must be a dict"):
        open_with_files(b"{}", tmp_path, metadata)
    assert CheckpointStore(tmp_path).checkpoints() == []


def test_without_the_lie_that_manifest_is_believed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"`x\.json` is missing"):
        open_with_files(FILES, tmp_path)
