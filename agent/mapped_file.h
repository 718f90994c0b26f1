#ifndef MUSTER_AGENT_MAPPED_FILE_H_
#define MUSTER_AGENT_MAPPED_FILE_H_

#include <sys/types.h>

#include <string>

namespace muster::agent {

// Opens for reading the file that is now at `path`, an absolute path from /proc/PID/maps, as
// process `pid` sees it. For a process in a container (another mount namespace), this process may
// have another file at that path, or none; in a chroot, the paths in maps begin outside of it.
// Regular files only: opening a device may hang, or have effects. Returns a descriptor, closed on
// exec, or -1. Thread-safe.
int OpenMappedFile(pid_t pid, const std::string& path);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MAPPED_FILE_H_
