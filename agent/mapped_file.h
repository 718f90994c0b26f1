#ifndef MUSTER_AGENT_MAPPED_FILE_H_
#define MUSTER_AGENT_MAPPED_FILE_H_

#include <sys/types.h>

#include <string>

namespace muster::agent {

// Opens the file that is now at `path`, an absolute one of /proc/PID/maps, for process `pid`, for
// reading. A process in a container (another mount namespace) has another file at the path than
// this process may have, or none is here; in a chroot, paths of maps begin outside of it. Regular
// files only: devices may hang when they are opened, or begin to do something. Returns a
// descriptor, closed on exec, or -1. Thread-safe.
int OpenMappedFile(pid_t pid, const std::string& path);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MAPPED_FILE_H_
