#ifndef MUSTER_WORKER_CHECKPOINT_RUN_FOLDER_H_
#define MUSTER_WORKER_CHECKPOINT_RUN_FOLDER_H_

#include <string>

namespace muster {

// Returns what the error about a folder without weights adds if the folder is that of a run, which
// holds checkpoints, itself or in "checkpoints": "; it holds checkpoints: name one, such as
// RUN/...", or if it is or holds a distributed checkpoint of torch: "; it is a distributed
// checkpoint of torch ..." with the command that converts it. Empty if it holds neither.
std::string CheckpointsInPlaceOfWeights(const std::string& folder);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_RUN_FOLDER_H_
