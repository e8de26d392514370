"""How much is done at once: sizes and counts chosen by measurement. Nobody has to set them; tests make them small.

Measurements are named by their result files. One that is not in `benchmarks/results/` is there at commit 5735fe0 or
8d3b3c0, with the script that made it; so it is wherever this package's sources name one.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(slots=True)
class Tuning:
    """The sizes and counts of one allocator (`CuMemAllocator.tuning`). Sizes are in bytes, times in seconds.

    Attributes:
        idle_s: a device is idle if waiting for it takes less than this; an idle one takes 1 ms, also in a vLLM worker
            (`vllm_serve.json`).
        head_bytes: what a sleep digests before it begins to copy what changed.
        digest_part_bytes: digested at a time after that. It takes a few milliseconds, as long as the copies in flight
            last.
        digest_together_bytes: digested at a time by a wake. Kernels of this process and of the vault take turns on the
            GPU, and each turn holds the vault's copies up.
        slab_bytes: the largest extent of a backup. One is registered while another is filled. To register it, beside
            `prepare`, or to unregister it, after a wake, takes 0.5 ms or less, for which a model's launches wait
            (`prepare_cost.json`, `decode_after_wake.json`).
        prefault_bytes: prefaulted by one thread at a time.
        release_later_bytes: more than this is released in a thread. Unregistering and freeing this much takes 16 ms.
        before_releases_s: how long that thread waits first, because an operation that comes meanwhile has to wait for a
            block, and one that follows at once should not (`level_2_wakes.txt`).
        between_releases_s: how long it pauses between two blocks, so that others get the lock.
        pause_per_release: how many times as long as a block took, where the host is not short of memory.
        batch_bytes: copied back at a time by a kernel.
        trial_bytes: copied back when timed alone: if the engine is slow, the kernel waits for it meanwhile.
        engine_batch_bytes: copied at a time by the copy engine on one stream; faster than 64 MiB (`wake_paths.json`).
            On four streams 18 ms of copies are in flight, as long as it takes to digest 61 GiB.
        timed_bytes: how many bytes are timed together for the copy engine's rate.
        slots_timed_bytes: the same for compressed backups: twelve slots, so that a stall of the caller is not mistaken
            for a slow engine.
        least_timed_bytes: smaller copies are not timed, because most of their time is latency.
        batches_between_trials: how many batches the kernel copies before the engine is tried again.
        worth_choosing_bytes: if there is less to copy, the engine copies all of it.
        slots: how many pieces of device memory encoded chunks pass through, each with its own stream.
        most_slots: the same where the device has the memory: 7 ms of copies are in flight then, so the link need not
            wait while the caller plans the next part.
        slot_bytes: how many bytes of encoded chunks fit into a slot; the second number is for a full GPU.
        worth_compiling_bytes: a sleep that has planned less than this with a layout compiles no kernels for it, because
            that takes longer than to copy as much uncompressed (`vllm_first_compressed_sleep.json`).
        rows: the most chunks in one launch of a codec kernel.
        few_rows: the same while a model runs, whose launches queue behind those of all slots: counting 128 MiB takes a
            fraction of a millisecond.
        count_part_bytes: what is copied in parts is counted in parts of this size. Counting takes 1 ms and encoding 13,
            so the copies of one part last longer than the count of the next.
        prepare_piece_bytes: copied by `prepare` at a time; the model's small copies queue behind it (0.15 ms).
        prepare_poll_s: how long `prepare` waits before it tries again to get the lock, which it never waits for.
        bounce_bytes: of device memory that the CPU digests at a time.
        table_bytes_per_gib: of page tables, on every GPU, for pinned host memory (`driver_behaviour.json`).
    """

    idle_s: float = 0.003
    head_bytes: int = 2 * _GIB
    digest_part_bytes: int = 8 * _GIB
    digest_together_bytes: int = 2 * _GIB
    slab_bytes: int = 16 * _MIB
    prefault_bytes: int = 64 * _MIB
    release_later_bytes: int = _GIB
    before_releases_s: float = 0.05
    between_releases_s: float = 0.0002
    pause_per_release: float = 20.0
    batch_bytes: int = 64 * _MIB
    trial_bytes: int = 16 * _MIB
    engine_batch_bytes: int = 256 * _MIB
    timed_bytes: int = _GIB
    slots_timed_bytes: int = 768 * _MIB
    least_timed_bytes: int = 4 * _MIB
    batches_between_trials: int = 48
    worth_choosing_bytes: int = _GIB
    slots: int = 4
    most_slots: int = 7
    slot_bytes: tuple[int, ...] = (64 * _MIB, 8 * _MIB)
    worth_compiling_bytes: int = 256 * _MIB
    rows: int = 1024
    few_rows: int = 16
    count_part_bytes: int = _GIB
    prepare_piece_bytes: int = 8 * _MIB
    prepare_poll_s: float = 0.001
    bounce_bytes: int = 32 * _MIB
    table_bytes_per_gib: int = 2 * _MIB
