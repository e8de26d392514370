#include "heap_reserve.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace cumem_sleep {

namespace {

// Smaller than any piece that the C library would map by itself, larger than those that it keeps for a thread.
constexpr size_t kPiece = size_t{64} << 10;

}  // namespace

HeapReserve::HeapReserve(size_t bytes) {
    const size_t count = (std::min(bytes, kMostBytes) + kPiece - 1) / kPiece;
    void* first = nullptr;  // each piece holds the address of the one before: a list would be allocated in between
    for (size_t i = 0; i < count; ++i) {
        void* const piece = std::malloc(kPiece);
        if (!piece) break;
        std::memset(piece, 1, kPiece);
        std::memcpy(piece, &first, sizeof first);
        first = piece;
    }
    end_ = std::malloc(kPiece);
    while (first) {
        void* const piece = first;
        std::memcpy(&first, piece, sizeof first);
        std::free(piece);
    }
}

HeapReserve::~HeapReserve() { std::free(end_); }

}  // namespace cumem_sleep
