#ifndef MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_
#define MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_

#include <string>

namespace muster {

// A path that names what the system finds under `path`, without ".", "..", "//" and "/" at its end.
// Where ".." follows a name, which may be a symbolic link, what comes before is resolved. Of what
// does not exist the text alone counts. Empty if `path` is.
std::string CleanPath(const std::string& path);

// The same, absolute: for processes in other folders.
std::string AbsolutePath(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_
