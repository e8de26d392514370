"""The Triton kernels without a GPU: they compile for one, and in Triton's interpreter they do what they should."""

from __future__ import annotations

import pytest
from support import run_script

pytest.importorskip("torch", reason="the GPU kernel needs PyTorch: pip install torch")
pytest.importorskip("triton", reason="the GPU kernel needs Triton, which comes with PyTorch for CUDA")

LAYOUTS = ["bf16", "fp16", "e4m3", "e5m2", "fp32"]

CODEC_SETUP = """
    import os
    import numpy as np
    from cumem_sleep.codec import exponent as codec
    from cumem_sleep.codec import exponent_kernel as kernel
    from cumem_sleep.codec.codec import Code, parameters_of, rows

    codec.CHUNK_BYTES = 1 << 15  # the interpreter is slow
    layout = {layout.name: layout for layout in codec.LAYOUTS}[os.environ["LAYOUT"]]
    random = np.random.default_rng(7)
    code = Code(layout, bytes(random.permutation(1 << layout.symbol_bits)[:9].tolist()))

    def content_of(chunks):
        '''Of each chunk most values have symbols of the code, but one has none of them, and one is random.'''
        count = codec.CHUNK_BYTES // layout.value_bytes
        weights = 2.0 ** -np.arange(9)
        symbols = random.choice([*code.parameters], (chunks, count), p=weights / weights.sum())
        symbols[1] = next(symbol for symbol in range(10) if symbol not in code.parameters)
        rotated = symbols.astype(np.uint64) << np.uint64(layout.raw_bits)
        rotated |= random.integers(0, 1 << layout.raw_bits, rotated.shape, np.uint64)
        rotated[2] = random.integers(0, 1 << layout.value_bits, count, np.uint64)
        values = rotated >> np.uint64(1) | rotated << np.uint64(layout.value_bits - 1)
        return values.astype(layout.dtype).view(np.uint8).reshape(-1)

    def guarded(nbytes, fill=0):
        '''Memory at a multiple of 16, with canaries around it.'''
        whole = np.full(nbytes + 4096 + 16, 0xC5, np.uint8)
        whole = whole[-whole.ctypes.data % 16 :]
        whole[2048 : 2048 + nbytes] = fill
        def intact():
            return (whole[:2048] == 0xC5).all() and (whole[2048 + nbytes :] == 0xC5).all()
        return whole[2048 : 2048 + nbytes], intact

    def addresses(array, sizes):
        return array.ctypes.data + np.cumsum(sizes) - sizes

    def decode(stored, sizes, chunks):
        decoded, intact = guarded(chunks * codec.CHUNK_BYTES, 0xEE)
        at = addresses(decoded, np.full(chunks, codec.CHUNK_BYTES))
        table = rows(parameters_of([code]), addresses(stored, sizes), at, sizes)
        kernel.decode(layout, table.ctypes.data, chunks)
        assert intact()
        return decoded

    def encode(content, sizes):
        stored, intact = guarded(sizes.sum())
        counters = np.zeros(len(sizes), np.uint32)
        sources = addresses(content, np.full(len(sizes), codec.CHUNK_BYTES))
        table = rows(parameters_of([code]), sources, addresses(stored, sizes), sizes)
        kernel.encode(layout, table.ctypes.data, counters.ctypes.data, len(sizes))
        assert intact()
        return stored, counters + np.uint32(layout.header_bytes)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_codec_compiles_for_a_gpu(layout: str) -> None:
    process = run_script(
        """
        import os
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from cumem_sleep.codec import exponent as codec
        from cumem_sleep.codec import exponent_kernel as kernel

        layout = {layout.name: layout for layout in codec.LAYOUTS}[os.environ["LAYOUT"]]
        constants = dict(zip(["BLOCKS", "BITS", "RAW", "PLANES"], kernel._constants(layout), strict=True))
        for function, options in ((kernel._count_blocks, kernel._COUNT_OPTIONS),
                                  (kernel._encode_blocks, kernel._ENCODE_OPTIONS),
                                  (kernel._decode_blocks, kernel._DECODE_OPTIONS)):
            signature = {name: "constexpr" if name in constants else "i64" for name in function.arg_names}
            source = ASTSource(fn=function, signature=signature, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            ptx = compiled.asm["ptx"]
            assert f".entry {function.__name__}" in ptx
            # Values are read and written 8 or 16 bytes at once, and no atomic operation waits for others.
            assert "st.global.v" in ptx if function is kernel._decode_blocks else "ld.global.v" in ptx
            assert ptx.count("atom.") == ptx.count(".relaxed.")
        """,
        LAYOUT=layout,
    )
    assert process.returncode == 0, process.stderr


def in_the_interpreter(layout: str, script: str) -> None:
    """Run it after `CODEC_SETUP`, in a process of its own: Triton reads the variable when it is imported."""
    process = run_script(CODEC_SETUP, script, LAYOUT=layout, TRITON_INTERPRET="1")
    assert process.returncode == 0, process.stderr


@pytest.mark.sim
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_codec_equals_the_reference_in_the_interpreter(layout: str) -> None:
    in_the_interpreter(
        layout,
        """
        content = content_of(3)
        sizes = codec.chunk_bytes(code, content)

        totals, intact = guarded(12)
        sources = addresses(content, np.full(3, codec.CHUNK_BYTES))
        table = rows(parameters_of([code]), sources, totals.ctypes.data + 4 * np.arange(3))
        kernel.count(layout, table.ctypes.data, 3)
        assert totals.view(np.uint32).tolist() == sizes.tolist() and intact()

        stored, counted = encode(content, sizes)
        assert counted.tolist() == sizes.tolist()
        reference = codec.encode(code, content)
        assert np.array_equal(stored, reference)  # the interpreter runs blocks in order
        assert np.array_equal(codec.decode(code, stored, sizes), content)
        assert np.array_equal(decode(reference, sizes, 3), content)
        """,
    )


@pytest.mark.sim
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_codec_writes_nothing_of_what_no_longer_fits(layout: str) -> None:
    in_the_interpreter(
        layout,
        """
        content = content_of(3)
        sizes = codec.chunk_bytes(code, content)
        sizes[0] -= 16
        stored, counted = encode(content, sizes)
        assert counted[0] == sizes[0] + 16 and (counted[1:] == sizes[1:]).all()
        decoded = codec.decode(code, stored, sizes)
        assert np.array_equal(decoded[codec.CHUNK_BYTES :], content[codec.CHUNK_BYTES :])
        last = 4096 * layout.value_bytes  # of the first chunk only its last block does not fit
        assert np.array_equal(decoded[: codec.CHUNK_BYTES - last], content[: codec.CHUNK_BYTES - last])
        assert stored[: layout.header_bytes].view(np.uint32)[layout.blocks_per_chunk - 1] == 0
        for too_small in (0, 16, layout.header_bytes):
            stored, counted = encode(content, np.full(3, too_small))
            assert not stored.any()
            assert counted[0] == sizes[0] + 16
        """,
    )


@pytest.mark.sim
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_codec_decodes_damaged_bytes_as_the_reference_does(layout: str) -> None:
    in_the_interpreter(
        layout,
        """
        content = content_of(3)
        sizes = codec.chunk_bytes(code, content)
        whole = codec.encode(code, content)
        header = whole[: 4 * layout.blocks_per_chunk].view(np.uint32)

        def compare(bytes_, sizes):
            stored, _ = guarded(sizes.sum())
            stored[:] = bytes_[: stored.size]
            expected = codec.decode(code, stored, sizes)
            assert np.array_equal(decode(stored, sizes, len(sizes)), expected)

        noise = np.frombuffer(random.bytes(whole.size), np.uint8).copy()
        noise[: header.nbytes] = whole[: header.nbytes]  # else hardly a block would begin within the chunk
        compare(noise, sizes)
        compare(np.full_like(whole, 0xFF), sizes)
        for block, offset in enumerate((0xFFFFFFFF, 0x7FFFFFF1, 0x80000000, int(sizes[0]) - 16)):
            damaged = whole.copy()
            damaged[: header.nbytes].view(np.uint32)[block % layout.blocks_per_chunk] = offset
            compare(damaged, sizes)
        unaligned = whole.copy()
        unaligned[: header.nbytes : 4] |= 15
        compare(unaligned, sizes)
        last = whole.copy()
        last[int(header[-1]) : sizes[0]] = 0xFF  # passes on more than there is room for
        compare(last, sizes)
        for size in (0, 4, 17, int(sizes[0]) // 2, int(sizes[0]) - 1, int(sizes[0]) - 16):
            compare(whole, np.array([size]))
        """,
    )


@pytest.mark.sim
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_codec_is_tried_in_host_memory(layout: str) -> None:
    in_the_interpreter(
        layout,
        """
        import contextlib
        from unittest import mock
        import torch
        from cumem_sleep import CodecError
        from cumem_sleep.codec import kernels
        from cumem_sleep.codec.kernels import try_kernels
        from cumem_sleep.core.driver import open_driver

        kernels.CHUNK_BYTES = codec.CHUNK_BYTES
        open_driver("sim")
        launched = []
        for name in ("count", "encode", "decode"):
            real = getattr(kernel, name)
            setattr(kernel, name, lambda *arguments, real=real, name=name: (launched.append(name), real(*arguments)))
        nothing = lambda *arguments, **options: contextlib.nullcontext()
        with mock.patch.multiple(torch.cuda, device=nothing, stream=nothing, ExternalStream=nothing):
            try_kernels(codec, kernel, layout, 0)
            assert launched == ["count", "encode", "decode"]
            assert sim.stats().registered_bytes == 0
            for name in ("count", "encode", "decode"):  # one that does nothing is found out
                with mock.patch.object(kernel, name, lambda *arguments: None):
                    try:
                        try_kernels(codec, kernel, layout, 0)
                    except CodecError as error:
                        assert layout.name in str(error)
                    else:
                        raise AssertionError(name)
        assert sim.stats().registered_bytes == 0
        """,
    )
