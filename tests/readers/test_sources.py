"""Files by their content, token files in memory that is mapped, and what is said of files that are
broken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tl_localize.readers.sources import open_source

TOKENS = torch.arange(12).reshape(3, 4)


@pytest.mark.parametrize("name", ["read_tokens", "read_texts"])
def test_readers_name_a_missing_file(tmp_path: Path, name: str) -> None:
    from tl_localize import readers

    with pytest.raises(FileNotFoundError, match=r"existing file, got .*nowhere"):
        list(getattr(readers, name)(tmp_path / "nowhere.npy"))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_read_tokens_maps_npy(tmp_path: Path, dtype: Any) -> None:
    from tl_localize.readers import read_tokens

    np.save(tmp_path / "t.npy", TOKENS.numpy().astype(dtype))
    assert torch.equal(read_tokens(tmp_path / "t.npy").long(), TOKENS)


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_read_tokens_never_writes_to_the_file(tmp_path: Path, suffix: str) -> None:
    from tl_localize.readers import read_tokens

    path = saved(tmp_path / f"t.{suffix}", TOKENS.numpy())
    read_tokens(path)[0, 0] = 99
    assert torch.equal(read_tokens(path), TOKENS)


def saved(path: Path, tokens: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        save_file({"tokens": torch.from_numpy(tokens), "other": torch.zeros(3)}, path)
    return path


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_batches_of_pythias_shape_are_mapped_and_searched_in_blocks_of_rows(
    tmp_path: Path, suffix: str
) -> None:
    from tl_localize.collect.search import chunks_of
    from tl_localize.readers import Data, read_tokens

    tokens = np.random.default_rng(0).integers(50304, size=(1024, 2049), dtype=np.uint16)
    path = saved(tmp_path / f"batch.{suffix}", tokens)
    found = read_tokens(path)
    assert (found.dtype, found.shape) == (torch.uint16, (1024, 2049))
    assert np.array_equal(found.numpy(), tokens)
    maps = Path("/proc/self/maps")
    if maps.is_file():
        (area,) = (
            line.split()[0] for line in maps.read_text().splitlines() if line.endswith(str(path))
        )
        first, end = (int(address, 16) for address in area.split("-"))
        assert first <= found.data_ptr() < end  # its memory is the file's
    data = Data(source=path)
    chunks = chunks_of([data], "any")
    assert [chunk.end - chunk.first for chunk in chunks] == [79] * 12 + [76]
    last, _ = chunks[-1].read()
    assert isinstance(last, torch.Tensor)
    # no copy
    assert last.untyped_storage().data_ptr() == data.opened.block(0, 1).untyped_storage().data_ptr()
    assert np.array_equal(last.numpy(), tokens[-76:])


@pytest.mark.parametrize("old_format", [False, True])
def test_read_tokens_reads_pt(tmp_path: Path, old_format: bool) -> None:
    from tl_localize.readers import read_tokens

    torch.save(TOKENS, tmp_path / "t.pt", _use_new_zipfile_serialization=not old_format)
    assert torch.equal(read_tokens(tmp_path / "t.pt"), TOKENS)


def test_read_tokens_reads_the_tokens_of_safetensors(tmp_path: Path) -> None:
    from tl_localize.readers import read_tokens

    save_file({"any": TOKENS}, tmp_path / "one.safetensors")
    save_file({"tokens": TOKENS, "other": TOKENS + 1}, tmp_path / "two.safetensors")
    assert torch.equal(read_tokens(tmp_path / "one.safetensors"), TOKENS)
    assert torch.equal(read_tokens(tmp_path / "two.safetensors"), TOKENS)


class Harmful:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("harm",))


def test_read_tokens_refuses_to_run_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tl_localize.readers import read_tokens

    torch.save(Harmful(), tmp_path / "t.pt")
    with pytest.raises(
        ValueError,
        match=r"one plain tensor, got .* Nothing else is unpickled: save the tensor alone",
    ):
        read_tokens(tmp_path / "t.pt")
    assert "harm" not in capsys.readouterr().out


def test_read_tokens_refuses_other_files(tmp_path: Path) -> None:
    from tl_localize.readers import read_tokens

    (tmp_path / "t.csv").write_text("1,2")
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY nothing")
    (tmp_path / "t.pt").write_bytes(b"nothing")
    (tmp_path / "t.safetensors").write_bytes(b"nothing")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"tokens": TOKENS}, tmp_path / "dict.pt")
    save_file({"a": TOKENS, "b": TOKENS + 1}, tmp_path / "ab.safetensors")
    for name, message in {
        "t.csv": r"file of tokens \(.npy, .pt, .safetensors\), got .*t.csv",
        "t.npy": "whole .npy file of integers, got .*t.npy",
        "t.pt": "one plain tensor, got .*t.pt",
        "empty.pt": "one plain tensor, got .*empty.pt",
        "t.safetensors": "whole safetensors file, got .*t.safetensors",
        "dict.pt": "one plain tensor, got a dict",
        "ab.safetensors": r"one tensor or one named 'tokens', got \['a', 'b'\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_tokens(tmp_path / name)


@pytest.mark.parametrize("tokens", [TOKENS.float(), TOKENS > 3, TOKENS[0], TOKENS[:0]])
def test_read_tokens_refuses_what_is_no_batch_of_ids(tmp_path: Path, tokens: torch.Tensor) -> None:
    from tl_localize.readers import read_tokens

    torch.save(tokens, tmp_path / "t.pt")
    with pytest.raises(ValueError, match=r"integers of shape \[sequence pos\], got"):
        read_tokens(tmp_path / "t.pt")


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "9" * 5000 + "}"])
def test_json_beyond_the_limits_of_python_is_named_with_its_place(
    tmp_path: Path, line: str
) -> None:
    from tl_localize.readers import read_texts

    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(
        ValueError, match=r"line must be a JSON object, got .* at .*t\.jsonl, line 1 \("
    ):
        list(read_texts(tmp_path / "t.jsonl"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["nested", "sparse", "quantized", "meta"])
def test_tensor_that_is_not_plain_is_named_with_its_path(tmp_path: Path, kind: str) -> None:
    from tl_localize.readers import read_tokens

    special = {
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "sparse": lambda: torch.ones(2, 2, dtype=torch.long).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        "meta": lambda: torch.ones(2, 2, dtype=torch.long, device="meta"),
    }
    torch.save(special[kind](), tmp_path / "t.pt")
    with pytest.raises(
        ValueError, match=r"path must be a \.pt file of one plain tensor, got .*t\.pt"
    ):
        read_tokens(tmp_path / "t.pt")


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    """Without the check, the next touch of a page that is gone kills the process with SIGBUS."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(1 << 20).reshape(-1, 64))
    rows = open_source(path).rows()
    next(rows)
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(
        ValueError,
        match=r"path must stay as it is while it is read, got .*tokens\.npy.* with 4096 bytes of",
    ):
        list(rows)
