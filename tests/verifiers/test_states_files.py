"""Tensor files that lie, lead elsewhere or hold something else are refused; whole ones are read as safetensors reads them."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from speculators.verifiers.states_files import Expected, StatesFile, StatesFileError, read_tensors

IDS = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}
STATES = {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 32]}


def raw(header: Any, data: bytes = bytes(32), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def whole() -> bytes:
    return raw({"ids": IDS, "states": STATES})


@pytest.mark.parametrize("mapped", [True, False])
def test_read_as_safetensors_does(tmp_path: Path, mapped: bool) -> None:
    tensors = {
        "a": torch.randn(3, 2, 4),
        "b": torch.randn(3, 2).to(torch.bfloat16),
        "c": torch.randn(5).to(torch.float8_e4m3fn),
        "d": torch.arange(3),
        "e": torch.empty(0, 4),
        "f": torch.tensor(2.5, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"k": "v"})
    found, wanted = read_tensors("x.safetensors", root=tmp_path, mapped=mapped), load_file(tmp_path / "x.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    before = (tmp_path / "x.safetensors").read_bytes()
    found["a"].zero_()  # is not seen by the file
    assert (tmp_path / "x.safetensors").read_bytes() == before
    with StatesFile(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"k": "v"}


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(raw({"ids": IDS, "states": STATES}, bytes(16) + struct.pack("<4f", 1, 2, 3, 4)))
    states = read_tensors(tmp_path / "x")["states"]
    (tmp_path / "x").unlink()
    assert states.tolist() == [[1, 2], [3, 4]]


def test_a_tensor_at_an_odd_place_is_copied(tmp_path: Path) -> None:
    flags = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    file = raw({"flags": flags, "x": {"dtype": "F32", "shape": [1], "data_offsets": [3, 7]}}, bytes(3) + struct.pack("<f", 7))
    (tmp_path / "x").write_bytes(file)
    found = read_tensors(tmp_path / "x")["x"]
    assert found.item() == 7
    assert found.data_ptr() % 4 == 0


def _with(**changes: Any) -> Callable[[], bytes]:
    return lambda: raw({"ids": IDS, "states": STATES | changes})


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "too few"),
    "seven bytes": (lambda: b"1234567", "too few"),
    "header longer than the file": (lambda: raw({"ids": IDS}, length=10_000), "header would be 10000 bytes"),
    "header of 2**63 bytes": (lambda: raw({"ids": IDS}, length=2**63), "header would be"),
    "header is no JSON": (lambda: raw(b"{ids: 1}"), "no JSON"),
    "header is no UTF-8": (lambda: raw(b'{"\xff": 1}'), "no JSON"),
    "header is a list": (lambda: raw([1]), "no JSON object"),
    "header nested without end": (lambda: raw(b"[" * 100_000), "no JSON"),
    "a name twice": (lambda: raw(b'{"a": %b, "a": %b}' % ((json.dumps(IDS).encode(),) * 2), bytes(16)), "occurs twice"),
    "dtype twice": (lambda: raw(b'{"a": {"dtype": "U8", "dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}'), "twice"),
    "metadata no texts": (lambda: raw({"__metadata__": {"a": 1}, "ids": IDS}, bytes(16)), "metadata"),
    "entry is a number": (lambda: raw({"ids": 5}), "is not dtype, shape"),
    "entry with more": (_with(more=1), "is not dtype, shape"),
    "unknown dtype": (_with(dtype="F31"), "'F31', which is not known"),
    "dtype no text": (_with(dtype=["F32"]), "not known"),
    "negative size": (_with(shape=[-2, -2]), "cannot be"),
    "size no integer": (_with(shape=[2.0, 2]), "cannot be"),
    "size true": (_with(shape=[True, 4]), "cannot be"),
    "negative offset": (_with(data_offsets=[-16, 32]), "cannot be"),
    "three offsets": (_with(data_offsets=[16, 32, 48]), "cannot be"),
    "offsets turned round": (_with(data_offsets=[32, 16]), "would lie"),
    "beyond the end": (_with(shape=[4, 2], data_offsets=[16, 48]), "would lie at bytes 16 to 48"),
    "shape too large for its bytes": (_with(shape=[2, 3]), "needs 24 bytes"),
    "shape beyond 64 bits": (_with(shape=[2**40, 2**40]), "needs"),
    "dtype too large for its bytes": (_with(dtype="F64"), "needs 32 bytes"),
    "overlapping": (_with(shape=[6], data_offsets=[8, 32]), "overlaps"),
    "a hole": (_with(shape=[2], data_offsets=[24, 32]), "8 bytes before 'states'"),
    "bytes left at the end": (lambda: whole() + b"x", "1 bytes at its end"),
    "truncated": (lambda: whole()[:-1], "it is cut or lies"),
    "a pickle": (lambda: pickle.dumps({"a": 1}), "a pickle, and only safetensors"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(tmp_path: Path, lie: str) -> None:
    make, problem = LIES[lie]
    (tmp_path / "x").write_bytes(make())
    with pytest.raises(StatesFileError, match=problem) as caught:
        read_tensors("x", root=tmp_path)
    assert str(tmp_path / "x") in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_torch_saves_is_not_read(tmp_path: Path) -> None:
    torch.save({"ids": torch.arange(2)}, tmp_path / "x")
    with pytest.raises(StatesFileError, match="zip archive, as torch"):
        read_tensors(tmp_path / "x")


@given(st.integers(0, len(whole()) - 1), st.integers(1, 255))
def test_any_byte_changed_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, place: int, change: int) -> None:
    file = bytearray(whole())
    file[place] ^= change
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(file)
    try:
        found = read_tensors(path)
    except StatesFileError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) == 32


def test_nothing_is_allocated_for_a_lie(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "x").write_bytes(raw({"a": {"dtype": "F32", "shape": [2**34], "data_offsets": [0, 2**36]}}))
    tracemalloc.start()
    with pytest.raises(StatesFileError):
        read_tensors(tmp_path / "x", mapped=False)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_places(tmp_path: Path) -> None:
    root, outside = tmp_path / "shared", tmp_path / "outside"
    (root / "below").mkdir(parents=True)
    outside.mkdir()
    (outside / "x").write_bytes(whole())
    (root / "below" / "x").write_bytes(whole())
    (root / "link").symlink_to(outside / "x")
    (root / "way").symlink_to(outside)
    (root / "inner").symlink_to(root / "below" / "x")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "fifo")
    for allowed in ("below/x", "below/../below/x", root / "below" / "x", "inner"):
        assert set(read_tensors(allowed, root=root)) == {"ids", "states"}
    for path, problem in {
        "../outside/x": "outside",
        outside / "x": "outside",
        "below/../../outside/x": "outside",
        "link": "outside",
        "way/x": "outside",
        ".": "outside",
        "below": "no ordinary file",
        "fifo": "no ordinary file",
        "missing": "cannot be opened",
        "loop": "cannot be opened",
        "below/x/y": "cannot be opened",
        "a\0b": "zero byte",
        "n" * 300: "cannot be opened",
    }.items():
        with pytest.raises(StatesFileError, match=problem):
            read_tensors(path, root=root)
    with pytest.raises(StatesFileError, match="no ordinary file"):
        read_tensors("/dev/zero")
    (tmp_path / "root").symlink_to(root)  # the folder itself may be a link: it is ours
    assert set(read_tensors("below/x", root=tmp_path / "root")) == {"ids", "states"}


def test_a_link_that_is_swapped_in_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the path and the opening, a folder becomes a link to another place."""
    root, outside = tmp_path / "shared", tmp_path / "outside"
    for folder in (root / "below", outside):
        folder.mkdir(parents=True)
        (folder / "x").write_bytes(whole())
    resolve = Path.resolve

    def swapping(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path.name == "x" and (root / "below").exists() and not (root / "below").is_symlink():
            (root / "below").rename(tmp_path / "away")
            (root / "below").symlink_to(outside)
        return found

    monkeypatch.setattr(Path, "resolve", swapping)
    with pytest.raises(StatesFileError, match="cannot be opened"):
        read_tensors("below/x", root=root)


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({"scales": Expected((torch.float32,), (2,))}, "no tensor 'scales'; it has 'ids', 'states'"),
        ({"states": Expected((torch.bfloat16, torch.float16), (2, 2))}, "is float32, not bfloat16 or float16"),
        ({"states": Expected((torch.float32,), (None, 3))}, r"has shape \[2, 2\], not \[any, 3\]"),
        ({"states": Expected((torch.float32,), (2, 2, 1))}, "has shape"),
    ],
)
def test_other_tensors_than_expected(tmp_path: Path, expected: dict[str, Expected], problem: str) -> None:
    (tmp_path / "x").write_bytes(whole())
    with pytest.raises(StatesFileError, match=problem):
        read_tensors(tmp_path / "x", expected=expected)
    assert set(read_tensors(tmp_path / "x", expected={"states": Expected((torch.float32,), (None, 2))})) == {"states"}


def test_cut_short_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(whole())
    with StatesFile(tmp_path / "x", mapped=False) as file:
        os.truncate(tmp_path / "x", 40)
        with pytest.raises(StatesFileError, match="cut short while"):
            file.tensor("states")
