// How many segments each device has. The table of segments counts them here, outside itself, because streams and host
// memory ask too whether there are any, and the table uses both.
#pragma once

#include <cstddef>
#include <map>

namespace cumem_sleep {

void count_handed_out(int device);
void count_taken_back(int device) noexcept;

// Whether any that is handed out lies on the device.
bool has_segments(int device) noexcept;

// Of every device that had one, for `check_valid`.
std::map<int, size_t> segment_counts();

}  // namespace cumem_sleep
