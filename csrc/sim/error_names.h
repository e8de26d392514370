// The driver's error codes by name and in words.
#pragma once

#include <string>

#include "cuda_api.h"

namespace cumem_sim {

// Null for a code that the driver does not have.
const char* error_name(int code);
const char* error_string(int code);

// -1 for a name that the driver does not have.
int error_code(const std::string& name);

}  // namespace cumem_sim
