"""The Triton kernels without a GPU: they compile for one, and in Triton's interpreter they do what they should."""

from __future__ import annotations

import pytest
from support import run_script

pytest.importorskip("torch", reason="the GPU kernel needs PyTorch: pip install 'cumem-sleep[torch]'")
pytest.importorskip("triton", reason="the GPU kernel needs Triton, which comes with PyTorch for CUDA")


def test_the_kernel_compiles_for_a_gpu() -> None:
    process = run_script(
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from cumem_sleep import digest_kernel as kernel

        source = ASTSource(
            fn=kernel._chunk_sums,
            signature={"table": "i64", "out": "i64", "rows": "i32",
                       "LANES": "constexpr", "UNROLL": "constexpr", "STAGES": "constexpr"},
            constexprs={"LANES": kernel.LANES, "UNROLL": kernel._UNROLL, "STAGES": kernel._STAGES},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel._WARPS})
        assert ".entry _chunk_sums" in compiled.asm["ptx"]
        """
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.sim  # on a GPU the kernel itself is compared (tests/gpu)
def test_the_kernel_equals_the_reference_in_the_interpreter() -> None:
    process = run_script(
        """
        import numpy as np
        from cumem_sleep import digest_kernel as kernel
        from cumem_sleep.digest import CHUNK_BYTES, sums_of

        content = np.random.default_rng(5).integers(0, 256, 2 * CHUNK_BYTES, np.uint8)
        numbers = np.array([7, 8], np.uint64)
        table = np.stack([content.ctypes.data + np.arange(2, dtype=np.uint64) * CHUNK_BYTES, numbers], axis=1)
        table = np.ascontiguousarray(table)
        out = np.zeros((2, 2), np.uint64)
        kernel._chunk_sums[(2,)](table.ctypes.data, out.ctypes.data, kernel.ROWS, kernel.LANES, 1, 1)
        expected = sums_of(content, first_chunk=7)
        assert tuple(int(x) for x in out.sum(axis=0)) == expected, (out, expected)
        """,
        TRITON_INTERPRET="1",
    )
    assert process.returncode == 0, process.stderr


def test_the_copy_kernel_compiles_for_a_gpu() -> None:
    process = run_script(
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from cumem_sleep import copy_kernel as kernel

        source = ASTSource(
            fn=kernel._copy_chunks,
            signature={"table": "i64", "chunks": "i32", "PROGRAMS": "constexpr", "WORDS": "constexpr",
                       "CHUNK": "constexpr"},
            constexprs={"PROGRAMS": kernel._PROGRAMS, "WORDS": kernel._WORDS, "CHUNK": kernel.CHUNK_BYTES // 8},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel._WARPS})
        assert "ld.global.v2.b64" in compiled.asm["ptx"]  # 16 bytes at once
        """
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.sim
def test_the_copy_kernel_copies_in_the_interpreter() -> None:
    process = run_script(
        """
        import numpy as np
        from cumem_sleep import copy_kernel as kernel

        source = np.random.default_rng(6).integers(0, 256, 3 * kernel.CHUNK_BYTES, np.uint8)
        target = np.zeros(4 * kernel.CHUNK_BYTES, np.uint8)
        table = np.array([[source.ctypes.data + i * kernel.CHUNK_BYTES, target.ctypes.data + j * kernel.CHUNK_BYTES]
                          for i, j in ((0, 2), (2, 0), (1, 3))], np.uint64)
        kernel._copy_chunks[(kernel._PROGRAMS,)](
            table.ctypes.data, 3, kernel._PROGRAMS, kernel._WORDS, kernel.CHUNK_BYTES // 8
        )
        parts = source.reshape(3, -1)
        assert np.array_equal(target.reshape(4, -1), np.stack([parts[2], 0 * parts[0], parts[0], parts[1]]))
        """,
        TRITON_INTERPRET="1",
    )
    assert process.returncode == 0, process.stderr
