#ifndef MUSTER_BASE_DESCRIPTOR_LIMIT_H_
#define MUSTER_BASE_DESCRIPTOR_LIMIT_H_

#include <cstdint>

namespace muster {

// Raises this process's limit of open files to the hard limit, for processes that serve many
// connections. Returns the new limit. Thread-safe, repeatable.
uint64_t RaiseDescriptorLimit();

// Restores the limit that this process was started with, for a child before it executes another
// program: a raised limit breaks select() and slows loops over all descriptors. No effect if the
// limit was not raised. Async-signal-safe.
void RestoreDescriptorLimit();

}  // namespace muster

#endif  // MUSTER_BASE_DESCRIPTOR_LIMIT_H_
