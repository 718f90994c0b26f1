#ifndef MUSTER_BASE_DESCRIPTOR_LIMIT_H_
#define MUSTER_BASE_DESCRIPTOR_LIMIT_H_

#include <cstdint>

namespace muster {

// Lets this process have as many open files as the system allows it (the hard limit), for those
// that serve many connections. Returns how many that are. Thread-safe, repeatable.
uint64_t RaiseDescriptorLimit();

// Gives back the limit that this process was started with, for a child before it becomes another
// program: the raised one is none of its business, and select() and loops over all descriptors
// suffer from it. No effect where nothing was raised. Async-signal-safe.
void RestoreDescriptorLimit();

}  // namespace muster

#endif  // MUSTER_BASE_DESCRIPTOR_LIMIT_H_
