"""How much is done at once: sizes and numbers that measuring chose. Nobody has to set them; tests make them small."""

from __future__ import annotations

from dataclasses import dataclass

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(slots=True)
class Tuning:
    """The sizes and numbers of one allocator; `CuMemAllocator.tuning` holds them. Sizes are in bytes, times in seconds.

    Attributes:
        idle_s: waiting for a device without work takes less: 1 ms, also in a vLLM worker (`vllm_serve.json`).
        head_bytes: what a sleep digests before it begins to copy what changed.
        digest_part_bytes: digested at once after that: in a few milliseconds, as long as what is in flight lasts.
        slab_bytes: a backup is reserved in extents of at most so much, so that one can be registered while another is
            filled.
        touch_bytes: prefaulted by one thread at a time.
        stream_bytes: copied to a tier by one stream at a time: 18 ms of copies are in flight on four streams, as long
            as it takes to digest 61 GiB.
        release_later_bytes: more than that is given back by a thread: unregistering and freeing it takes 16 ms.
        between_releases_s: pause of that thread between two blocks, for whoever waits for the lock.
        batch_bytes: copied back at once by a kernel, or timed alone.
        engine_batch_bytes: copied back at once by the copy engine: faster than 64 MiB (`wake_paths.json`).
        batches_in_flight: 5 ms of work: the driver may keep the caller waiting for as long while it maps.
        timed_bytes: the copy engine's rate is that of so many bytes together.
        slots_timed_bytes: the same for compressed backups: twelve slots, so that a stall of the caller's is not taken
            for the engine's.
        least_timed_bytes: of less, most of the time is latency.
        batches_between_trials: copied by the kernel before the engine is tried again.
        worth_choosing_bytes: of less, all is copied by the engine.
        slots: pieces of device memory that encoded chunks pass through, each with a stream.
        slot_bytes: of encoded chunks in a slot; the second where the GPU is full.
        lent_slot_bytes: the same, in memory that is borrowed from a segment.
        rows: chunks in one launch of a codec's kernel, at most.
        few_rows: the same beside a running model, whose launches queue behind those of all slots: 128 MiB to count, so
            a fraction of a millisecond.
        count_part_bytes: what has a compressed backup is counted in parts of so much: in 1 ms; encoding takes 13, so
            the copies before it last longer than its count.
        prepare_piece_bytes: copied by `prepare` in one turn: small copies of the model queue behind it (0.15 ms).
        prepare_extent_bytes: reserved by `prepare` in one piece: the model's launches queue behind its registering
            (0.5 ms). Both measured: `wake_paths.json`, `prepare_cost.json`.
    """

    idle_s: float = 0.003
    head_bytes: int = 2 * _GIB
    digest_part_bytes: int = 8 * _GIB
    slab_bytes: int = 128 * _MIB
    touch_bytes: int = 64 * _MIB
    stream_bytes: int = 256 * _MIB
    release_later_bytes: int = _GIB
    between_releases_s: float = 0.0002
    batch_bytes: int = 64 * _MIB
    engine_batch_bytes: int = 256 * _MIB
    batches_in_flight: int = 4
    timed_bytes: int = _GIB
    slots_timed_bytes: int = 768 * _MIB
    least_timed_bytes: int = 4 * _MIB
    batches_between_trials: int = 48
    worth_choosing_bytes: int = _GIB
    slots: int = 4
    slot_bytes: tuple[int, ...] = (64 * _MIB, 8 * _MIB)
    lent_slot_bytes: int = 8 * _MIB
    rows: int = 1024
    few_rows: int = 16
    count_part_bytes: int = _GIB
    prepare_piece_bytes: int = 8 * _MIB
    prepare_extent_bytes: int = 32 * _MIB
