#include "copy_kernel.h"

#include <algorithm>
#include <cstdint>

#include "driver.h"
#include "kernel.h"

namespace cumem_sleep {

namespace {

constexpr size_t kWord = 16;
constexpr unsigned int kThreads = 512;  // each has four words in flight
// A launch takes 0.3 ms: longer ones delay the mapping of memory that goes on at the same time.
constexpr size_t kLaunchBytes = size_t{16} << 20;

// What both kernels do, from %at on in steps of %step, of which %three is three times as much; then they are at END.
// clang-format off
#define COPY(END)                                         \
    "four:\n"                                             \
    "add.u64 %last, %at, %three;\n"                       \
    "setp.ge.u64 %over, %last, %bytes;\n"                 \
    "@%over bra one;\n"                                   \
    "add.u64 %from_a, %from, %at;\n"                      \
    "add.u64 %from_b, %from_a, %step;\n"                  \
    "add.u64 %from_c, %from_b, %step;\n"                  \
    "add.u64 %from_d, %from_c, %step;\n"                  \
    "ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%from_a];\n" \
    "ld.global.v4.u32 {%b0, %b1, %b2, %b3}, [%from_b];\n" \
    "ld.global.v4.u32 {%c0, %c1, %c2, %c3}, [%from_c];\n" \
    "ld.global.v4.u32 {%d0, %d1, %d2, %d3}, [%from_d];\n" \
    "add.u64 %to_a, %to, %at;\n"                          \
    "add.u64 %to_b, %to_a, %step;\n"                      \
    "add.u64 %to_c, %to_b, %step;\n"                      \
    "add.u64 %to_d, %to_c, %step;\n"                      \
    "st.global.v4.u32 [%to_a], {%a0, %a1, %a2, %a3};\n"   \
    "st.global.v4.u32 [%to_b], {%b0, %b1, %b2, %b3};\n"   \
    "st.global.v4.u32 [%to_c], {%c0, %c1, %c2, %c3};\n"   \
    "st.global.v4.u32 [%to_d], {%d0, %d1, %d2, %d3};\n"   \
    "add.u64 %at, %last, %step;\n"                        \
    "bra four;\n"                                         \
    "one:\n"                                              \
    "setp.ge.u64 %over, %at, %bytes;\n"                   \
    "@%over bra " END ";\n"                               \
    "add.u64 %from_a, %from, %at;\n"                      \
    "ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%from_a];\n" \
    "add.u64 %to_a, %to, %at;\n"                          \
    "st.global.v4.u32 [%to_a], {%a0, %a1, %a2, %a3};\n"   \
    "add.u64 %at, %at, %step;\n"                          \
    "bra one;\n"
// clang-format on

// In C++:
//
//     void cumem_sleep_copy(uint4* target, const uint4* source, uint64_t bytes) {
//         const uint64_t step = gridDim.x * blockDim.x;
//         uint64_t at = blockIdx.x * blockDim.x + threadIdx.x;
//         for (; at + 3 * step < bytes / 16; at += 4 * step)  // all four are loaded before the first is stored
//             for (int i = 0; i < 4; i++) target[at + i * step] = source[at + i * step];
//         for (; at < bytes / 16; at += step) target[at] = source[at];
//     }
constexpr char kPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry cumem_sleep_copy(.param .u64 target, .param .u64 source, .param .u64 bytes)
{
    .reg .pred %over;
    .reg .b32 %thread, %threads, %block, %blocks;
    .reg .b32 %a<4>, %b<4>, %c<4>, %d<4>;
    .reg .b64 %to, %from, %bytes, %at, %step, %three, %last;
    .reg .b64 %from_a, %from_b, %from_c, %from_d, %to_a, %to_b, %to_c, %to_d;

    ld.param.u64 %to, [target];
    ld.param.u64 %from, [source];
    ld.param.u64 %bytes, [bytes];
    cvta.to.global.u64 %to, %to;
    cvta.to.global.u64 %from, %from;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %thread, %block, %threads, %thread;
    mul.wide.u32 %at, %thread, 16;
    mul.lo.u32 %threads, %threads, %blocks;
    mul.wide.u32 %step, %threads, 16;
    mul.lo.u64 %three, %step, 3;
)" COPY("end") R"(
end:
    ret;
}
)";

// Enough to have 512 KiB in flight, because the rows of the table are read over the link, too.
constexpr unsigned int kPieceBlocks = 16;

// In C++:
//
//     void cumem_sleep_copy_pieces(const CopyPiece* pieces, uint64_t count) {
//         for (uint64_t piece = blockIdx.x; piece < count; piece += gridDim.x) {
//             const auto [target, source, bytes, unused] = pieces[piece];
//             // as cumem_sleep_copy does it, of one block
//         }
//     }
constexpr char kPiecesPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry cumem_sleep_copy_pieces(.param .u64 pieces, .param .u64 count)
{
    .reg .pred %over;
    .reg .b32 %thread, %threads, %block, %blocks;
    .reg .b32 %a<4>, %b<4>, %c<4>, %d<4>;
    .reg .b64 %entry, %piece, %count, %between, %to, %from, %bytes, %unused, %begin, %at, %step, %three, %last;
    .reg .b64 %from_a, %from_b, %from_c, %from_d, %to_a, %to_b, %to_c, %to_d;

    ld.param.u64 %entry, [pieces];
    ld.param.u64 %count, [count];
    cvta.to.global.u64 %entry, %entry;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %begin, %thread, 16;
    mul.wide.u32 %step, %threads, 16;
    mul.lo.u64 %three, %step, 3;
    mul.wide.u32 %piece, %block, 1;
    mul.wide.u32 %between, %blocks, 32;
    mad.wide.u32 %entry, %block, 32, %entry;
next:
    setp.ge.u64 %over, %piece, %count;
    @%over bra end;
    ld.global.v2.u64 {%to, %from}, [%entry];
    ld.global.v2.u64 {%bytes, %unused}, [%entry + 16];
    cvta.to.global.u64 %to, %to;
    mov.u64 %at, %begin;
)" COPY("done") R"(
done:
    mul.wide.u32 %at, %blocks, 1;
    add.u64 %piece, %piece, %at;
    add.u64 %entry, %entry, %between;
    bra next;
end:
    ret;
}
)";

// Never destroyed: at exit other threads may still copy.
auto* const kernel = new Kernel(kPtx, "cumem_sleep_copy");
auto* const pieces_kernel = new Kernel(kPiecesPtx, "cumem_sleep_copy_pieces");

}  // namespace

void load_copy_kernel(int device) { kernel->load(device); }

void launch_copy_pieces(int device, const CopyPiece* pieces, uint64_t count, CUstream stream) {
    if (count == 0) return;
    void* arguments[] = {&pieces, &count};
    const auto blocks = static_cast<unsigned int>(std::min<uint64_t>(count, kPieceBlocks));
    Driver::get().launch_kernel(pieces_kernel->on(device), blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr);
}

size_t launch_copy(int device, CUdeviceptr target, const void* source, size_t bytes, unsigned int blocks,
                   CUstream stream) {
    const CUfunction function = kernel->on(device);
    const size_t whole = bytes - bytes % kWord;
    for (size_t done = 0; done < whole;) {
        auto from = reinterpret_cast<uint64_t>(source) + done;
        CUdeviceptr to = target + done;
        uint64_t part = std::min(whole - done, kLaunchBytes);
        void* arguments[] = {&to, &from, &part};
        Driver::get().launch_kernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr);
        done += part;
    }
    return bytes - whole;
}

}  // namespace cumem_sleep
