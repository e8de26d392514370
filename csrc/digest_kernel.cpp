#include "digest_kernel.h"

#include "driver.h"
#include "kernel.h"

namespace cumem_sleep {

namespace {

// A block has one chunk. A thread has four of its lanes, two pairs of neighbours, and walks down both columns of each
// with two rows at a time: 64 bytes are in flight for each thread. Of the last two rows it has what is there of them.
constexpr unsigned int kThreads = 512;

// The parts of the kernel that repeat: %a0 and %b0 are both chains of its first lane.
// clang-format off

//     a = (a ^ word) * K0;             a ^= a >> 32;
//     b = (b ^ swapped(word)) * K1;    b ^= b >> 29;
#define CHAINS(LANE, WORD)                                      \
    "xor.b64 %a" LANE ", %a" LANE ", " WORD ";\n"               \
    "mul.lo.u64 %a" LANE ", %a" LANE ", %k0;\n"                 \
    "shr.u64 %shifted, %a" LANE ", 32;\n"                       \
    "xor.b64 %a" LANE ", %a" LANE ", %shifted;\n"               \
    "mov.b64 {%low, %high}, " WORD ";\n"                        \
    "mov.b64 " WORD ", {%high, %low};\n"                        \
    "xor.b64 %b" LANE ", %b" LANE ", " WORD ";\n"               \
    "mul.lo.u64 %b" LANE ", %b" LANE ", %k1;\n"                 \
    "shr.u64 %shifted, %b" LANE ", 29;\n"                       \
    "xor.b64 %b" LANE ", %b" LANE ", %shifted;\n"

// Each chain begins at its seed times the lane's number in the content, counted from 1.
#define BEGIN(LANE, DISTANCE)                                   \
    "add.u64 %number, %lane, " DISTANCE ";\n"                   \
    "mul.lo.u64 %a" LANE ", %number, 0xD6E8FEB86659FD93;\n"     \
    "mul.lo.u64 %b" LANE ", %number, 0xA0761D6478BD642F;\n"

// The end of a chain, by MurmurHash3's finaliser, is added to the sum.
#define FINISH(STATE, SUM)                                      \
    MIX(STATE)                                                  \
    "mul.lo.u64 " STATE ", " STATE ", 0xFF51AFD7ED558CCD;\n"    \
    MIX(STATE)                                                  \
    "mul.lo.u64 " STATE ", " STATE ", 0xC4CEB9FE1A85EC53;\n"    \
    MIX(STATE)                                                  \
    "add.u64 " SUM ", " SUM ", " STATE ";\n"
#define MIX(STATE)                                              \
    "shr.u64 %shifted, " STATE ", 33;\n"                        \
    "xor.b64 " STATE ", " STATE ", %shifted;\n"

// clang-format on

constexpr char kPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry cumem_sleep_digest(.param .u64 chunks, .param .u64 sums)
.maxntid 512, 1, 1
{
    .shared .align 16 .b64 of_threads[1024];
    .reg .pred %more, %idle;
    .reg .b32 %thread, %block, %left, %place, %low, %high, %mine, %other, %distance;
    .reg .b64 %entry, %sums, %at, %chunk, %lane, %number, %shifted, %k0, %k1, %first, %second, %more_first, %more_second;
    .reg .b64 %a<4>, %b<4>, %w<8>;

    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    ld.param.u64 %entry, [chunks];
    ld.param.u64 %sums, [sums];
    cvta.to.global.u64 %entry, %entry;
    cvta.to.global.u64 %sums, %sums;
    mad.wide.u32 %entry, %block, 16, %entry;
    mad.wide.u32 %sums, %block, 16, %sums;
    ld.global.v2.u64 {%at, %chunk}, [%entry];
    mov.b64 {%low, %left}, %chunk;
    cvta.to.global.u64 %at, %at;
    mad.wide.u32 %at, %thread, 16, %at;
    mul.wide.u32 %lane, %low, 2048;
    mad.wide.u32 %lane, %thread, 2, %lane;
)" BEGIN("0", "1") BEGIN("1", "2") BEGIN("2", "1025") BEGIN("3", "1026") R"(
    mov.u64 %k0, 0x9E3779B97F4A7C15;
    mov.u64 %k1, 0xBF58476D1CE4E5B9;
    setp.lt.u32 %idle, %left, 32768;
    @%idle bra rest;
next:
    ld.global.v2.u64 {%w0, %w1}, [%at];
    ld.global.v2.u64 {%w2, %w3}, [%at + 8192];
    ld.global.v2.u64 {%w4, %w5}, [%at + 16384];
    ld.global.v2.u64 {%w6, %w7}, [%at + 24576];
)" CHAINS("0", "%w0") CHAINS("1", "%w1") CHAINS("2", "%w2") CHAINS("3", "%w3") CHAINS("0", "%w4") CHAINS("1", "%w5")
    CHAINS("2", "%w6") CHAINS("3", "%w7") R"(
    add.u64 %at, %at, 32768;
    sub.u32 %left, %left, 32768;
    setp.ge.u32 %more, %left, 32768;
    @%more bra next;
rest:
    mul.lo.u32 %place, %thread, 16;
    setp.ge.u32 %idle, %place, %left;
    @%idle bra ended;
    ld.global.v2.u64 {%w0, %w1}, [%at];
)" CHAINS("0", "%w0") CHAINS("1", "%w1") R"(
    add.u32 %place, %place, 8192;
    setp.ge.u32 %idle, %place, %left;
    @%idle bra ended;
    ld.global.v2.u64 {%w2, %w3}, [%at + 8192];
)" CHAINS("2", "%w2") CHAINS("3", "%w3") R"(
    add.u32 %place, %place, 8192;
    setp.ge.u32 %idle, %place, %left;
    @%idle bra ended;
    ld.global.v2.u64 {%w4, %w5}, [%at + 16384];
)" CHAINS("0", "%w4") CHAINS("1", "%w5") R"(
    add.u32 %place, %place, 8192;
    setp.ge.u32 %idle, %place, %left;
    @%idle bra ended;
    ld.global.v2.u64 {%w6, %w7}, [%at + 24576];
)" CHAINS("2", "%w6") CHAINS("3", "%w7") R"(
ended:
    mov.u64 %first, 0;
    mov.u64 %second, 0;
)" FINISH("%a0", "%first") FINISH("%a1", "%first") FINISH("%a2", "%first") FINISH("%a3", "%first")
        FINISH("%b0", "%second") FINISH("%b1", "%second") FINISH("%b2", "%second") FINISH("%b3", "%second") R"(
    mov.u32 %mine, of_threads;
    mad.lo.u32 %mine, %thread, 16, %mine;
    st.shared.v2.u64 [%mine], {%first, %second};
    mov.u32 %distance, 256;
halve:
    bar.sync 0;
    setp.ge.u32 %idle, %thread, %distance;
    @%idle bra halved;
    mad.lo.u32 %other, %distance, 16, %mine;
    ld.shared.v2.u64 {%more_first, %more_second}, [%other];
    add.u64 %first, %first, %more_first;
    add.u64 %second, %second, %more_second;
    st.shared.v2.u64 [%mine], {%first, %second};
halved:
    shr.u32 %distance, %distance, 1;
    setp.ne.u32 %more, %distance, 0;
    @%more bra halve;

    setp.ne.u32 %idle, %thread, 0;
    @%idle bra end;
    st.global.v2.u64 [%sums], {%first, %second};
end:
    ret;
}
)";

#undef CHAINS
#undef BEGIN
#undef MIX
#undef FINISH

// Never destroyed: at exit other threads may still use it.
auto* const kernel = new Kernel(kPtx, "cumem_sleep_digest");

}  // namespace

void load_digest_kernel(int device) { kernel->load(device); }

void launch_digest(int device, const DigestChunk* chunks, DigestSums* sums, size_t count, CUstream stream) {
    if (count == 0) return;
    void* arguments[] = {&chunks, &sums};
    const auto blocks = static_cast<unsigned int>(count);
    Driver::get().launch_kernel(kernel->on(device), blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr);
}

}  // namespace cumem_sleep
