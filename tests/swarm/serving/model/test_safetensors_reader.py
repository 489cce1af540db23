from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from swarm.serving.model.safetensors_reader import MAX_HEADER_BYTES, read_header, stored_tensors
from swarm_protocol.errors import ConfigError, IntegrityError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
)


def test_header_that_claims_more_than_is_allowed_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(IntegrityError, match="its header claims"):
        read_header(path)


def test_stored_tensors_are_those_that_were_saved(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([[1, 0, 3], [4, 5, 6]]).to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.zeros(0, 4), "one": torch.tensor(7.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = stored_tensors(tmp_path / "model.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name][...], tensor)
        assert stored[name][...].dtype == tensor.dtype


def test_stored_tensor_of_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    stored = stored_tensors(path)["a"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(IntegrityError, match="ends within a"):
        stored[...]
    with pytest.raises(IntegrityError, match="is damaged"):
        stored_tensors(path)
    path.unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        stored[...]


def test_stored_tensors_of_an_unknown_dtype_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4).to(torch.complex64)}, path)
    with pytest.raises(ConfigError, match="C64"):
        stored_tensors(path)
