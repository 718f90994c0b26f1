#ifndef MUSTER_AGENT_DESCRIPTORS_H_
#define MUSTER_AGENT_DESCRIPTORS_H_

namespace muster::agent {

// The system call; tests replace it. Returns 0, or -1 and errno.
using CloseRangeCall = int (*)(unsigned first, unsigned last, unsigned flags);
int SystemCloseRange(unsigned first, unsigned last, unsigned flags);

// Opens /dev/null in place of standard input, output and error where this process was started
// without them. Otherwise the next files it opens would get these numbers, and processes would read
// and write those.
void OpenStandardDescriptors();
// Whether a standard descriptor is what its number says. If it was missing, a library that was
// loaded may have taken the number (gRPC does); exec closes such descriptors.
bool IsStandardDescriptor(int fd);

// From now on CloseFrom leaves this one open, in this process and in those that it forks: a lock
// that lasts as long as any of them. Before any thread is started.
void KeepOpen(int fd);

// Closes all descriptors from `first` on, except that of KeepOpen. Async-signal-safe: for a process
// between fork and exec. Kernels before 5.9 have no close_range, and a sandbox may refuse it: then
// /proc/self/fd is read, or, without /proc, all numbers up to the limit are tried.
void CloseFrom(int first, CloseRangeCall close_range = SystemCloseRange);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_DESCRIPTORS_H_
