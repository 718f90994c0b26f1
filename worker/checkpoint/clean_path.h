#ifndef MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_
#define MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_

#include <string>

namespace muster {

// Returns a path that names what the system finds under `given`, without ".", "..", "//" and a
// trailing "/"; a "~" at its beginning is the user's home (base/home_path.h). If ".." follows a
// name, which may be a symbolic link, the part before it is resolved. A part that does not exist is
// cleaned as text only. Empty if `given` is empty.
std::string CleanPath(const std::string& given);

// Like CleanPath, but returns an absolute path, for processes in other folders.
std::string AbsolutePath(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_
