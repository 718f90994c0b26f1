#ifndef MUSTER_CLIENT_CHECKPOINTS_MODEL_HEADERS_H_
#define MUSTER_CLIENT_CHECKPOINTS_MODEL_HEADERS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/bigmodel/device_map.h"
#include "worker/checkpoint/weight_files.h"

namespace muster::client {

// What commands learn about a model from the headers of its files, without its weights.

// A model's files: a folder, an index, or a file. Blocks on the disk. Errors: those of
// WeightFiles::Open, and of NOT_FOUND what is missing beside a config.json; NOT_FOUND if there is
// no tensor.
absl::StatusOr<WeightFiles> OpenModel(const std::string& path);

// The model's modules, with the head tied to the embedding where config.json beside the weights
// says so. Errors: those of OpenModel and TreeOf, and a config.json that is no JSON object.
absl::StatusOr<PlannedModel> ReadModelTree(const std::string& path);

// Rows of text under a line of headings: the first column to the left, the others to the right.
std::string Table(const std::vector<std::vector<std::string>>& rows);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MODEL_HEADERS_H_
