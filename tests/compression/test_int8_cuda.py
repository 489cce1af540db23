"""The Triton kernel gives the bytes of the CPU, in Triton's interpreter if Triton is installed and on a GPU if there is
one.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from compression.vectors import any_vectors, known_vector
from hypothesis import given
from swarm_compression import CodecError, get_codec
from swarm_compression.int8 import MIN_ABSMAX, has_triton

INT8 = get_codec("int8")
on_gpu = pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs an NVIDIA GPU and Triton")


@on_gpu
@given(x_N=any_vectors)
def test_encode_on_a_gpu_gives_the_bytes_of_the_cpu(x_N: torch.Tensor) -> None:
    assert INT8.encode(x_N.cuda()) == INT8.encode(x_N)


@on_gpu
def test_encode_large_vector_on_a_gpu_gives_the_bytes_of_the_cpu() -> None:
    x_N = torch.cat([known_vector(1_000_003), torch.full((256,), MIN_ABSMAX), torch.zeros(256)])
    assert INT8.encode(x_N.cuda()) == INT8.encode(x_N)


@on_gpu
def test_encode_value_on_a_gpu_that_is_not_finite_is_refused() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(CodecError, match="not finite"):
            INT8.encode(torch.tensor([1.0, bad]).cuda())


# whether a kernel is interpreted is read once, when its module is imported
INTERPRETED = """
    import numpy as np, torch
    from compression.vectors import known_vector
    from swarm_compression import get_codec, int8_cuda

    halves_N = torch.arange(-254.0, 255.0) / 2
    for x_N in (
        known_vector(5003),
        halves_N,
        torch.nextafter(halves_N, torch.zeros(1)),
        torch.tensor([2.0**-100, -(2.0**-101)]),
        torch.tensor([2.0**-101, 1e-45, -0.0]),
        torch.tensor([torch.finfo(torch.float32).max, -1.0]),
        torch.zeros(0),
    ):
        wire = np.zeros(get_codec("int8").encoded_bytes(x_N.numel()), np.uint8)
        scale_K, finite = int8_cuda.quantize_on_gpu(x_N, wire)
        wire[: scale_K.nbytes] = scale_K.view(np.uint8)
        assert finite
        assert wire.tobytes() == get_codec("int8").encode(x_N), x_N
    for bad in (float("nan"), -float("nan"), float("inf"), float("-inf")):
        assert not int8_cuda.quantize_on_gpu(torch.tensor([1.0, bad]), np.zeros(6, np.uint8))[1]
"""


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_interpreted_kernel_gives_the_bytes_of_the_cpu() -> None:
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERPRETED)],
        check=True,
        env={"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
