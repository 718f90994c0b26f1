#ifndef MUSTER_AGENT_DESCRIPTORS_H_
#define MUSTER_AGENT_DESCRIPTORS_H_

namespace muster::agent {

// Type of the system call, which tests replace. Returns 0, or -1 and errno.
using CloseRangeCall = int (*)(unsigned first, unsigned last, unsigned flags);
int SystemCloseRange(unsigned first, unsigned last, unsigned flags);

// Opens /dev/null in place of standard input, output and error if this process was started without
// them. Otherwise the next files that it opens would get these numbers, and child processes would
// read and write those files.
void OpenStandardDescriptors();
// Returns whether a standard descriptor really is the standard stream. If it was missing, a library
// that was loaded may have taken its number (gRPC does); exec closes such descriptors.
bool IsStandardDescriptor(int fd);

// From now on CloseFrom leaves this descriptor open, in this process and in its forks: a lock that
// lasts as long as any of these processes. Call it before any thread is started.
void KeepOpen(int fd);

// Closes all descriptors from `first` on, except that of KeepOpen. Async-signal-safe: for a process
// between fork and exec. Kernels before 5.9 have no close_range, and a sandbox may refuse it: then
// it reads /proc/self/fd or, without /proc, tries all numbers up to the limit.
void CloseFrom(int first, CloseRangeCall close_range = SystemCloseRange);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_DESCRIPTORS_H_
