#ifndef MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_
#define MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_

#include <string>

namespace muster {

// A path that names what the system finds under `given`, without ".", "..", "//" and "/" at its
// end; a "~" at its beginning is the user's home (base/home_path.h). Where ".." follows a name,
// which may be a symbolic link, what comes before is resolved. Of what does not exist the text
// alone counts. Empty if `given` is.
std::string CleanPath(const std::string& given);

// The same, absolute: for processes in other folders.
std::string AbsolutePath(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_CLEAN_PATH_H_
