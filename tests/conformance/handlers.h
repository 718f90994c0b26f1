#ifndef MUSTER_TESTS_CONFORMANCE_HANDLERS_H_
#define MUSTER_TESTS_CONFORMANCE_HANDLERS_H_

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace muster::conformance {

// Computes the `out` of one recorded case from its `in` by calling Muster's own code (kinds:
// tests/testdata/README.md). Rejects a case by throwing; the exception's text becomes the `error`.
using Handler = nlohmann::json (*)(const nlohmann::json& in);

// The kinds this build knows.
const std::map<std::string, Handler>& Handlers();

// Answers one line of the runner: {"id", "out"}, {"id", "error"} or {"id", "unsupported": true}.
// Never throws.
std::string AnswerLine(const std::string& line);

// Groups of handlers, one file each.
std::map<std::string, Handler> DataHandlers();
std::map<std::string, Handler> TrainHandlers();
std::map<std::string, Handler> CollectiveHandlers();
std::map<std::string, Handler> StorageHandlers();
std::map<std::string, Handler> CheckpointHandlers();
std::map<std::string, Handler> LaunchHandlers();
std::map<std::string, Handler> ShardingHandlers();
std::map<std::string, Handler> BigModelHandlers();
std::map<std::string, Handler> ModelsHandlers();
std::map<std::string, Handler> TokenizerHandlers();

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_HANDLERS_H_
