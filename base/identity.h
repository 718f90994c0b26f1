#ifndef MUSTER_BASE_IDENTITY_H_
#define MUSTER_BASE_IDENTITY_H_

#include <cstdint>
#include <string>

namespace muster {

// Returns this machine's name, as the kernel has it; empty if there is none or it cannot be read.
std::string HostName();

// Returns a random number that is unique in practice, such as the incarnation of a process; never
// 0. Ends the process if the kernel gives no random bytes.
uint64_t RandomId();

}  // namespace muster

#endif  // MUSTER_BASE_IDENTITY_H_
