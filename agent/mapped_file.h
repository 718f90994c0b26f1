#ifndef MUSTER_AGENT_MAPPED_FILE_H_
#define MUSTER_AGENT_MAPPED_FILE_H_

#include <sys/types.h>

#include <string>

namespace muster::agent {

// Opens what process `pid` has mapped as `path`, an absolute one of its /proc/PID/maps, for
// reading. A process in a container (another mount namespace) has another file at the path than
// this process may have, or none is here. Regular files only: devices may hang when they are
// opened, or begin to do something. Returns a descriptor, closed on exec, or -1. Thread-safe.
int OpenMappedFile(pid_t pid, const std::string& path);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MAPPED_FILE_H_
