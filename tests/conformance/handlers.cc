#include "tests/conformance/handlers.h"

#include <exception>

#include "c10/util/Exception.h"

namespace muster::conformance {

using Json = nlohmann::json;

const std::map<std::string, Handler>& Handlers() {
  static const auto* const handlers = [] {
    auto* all = new std::map<std::string, Handler>;
    for (auto group : {DataHandlers(), TrainHandlers(), CollectiveHandlers(), StorageHandlers(),
                       CheckpointHandlers(), LaunchHandlers(), ShardingHandlers(),
                       BigModelHandlers(), ModelsHandlers(), TokenizerHandlers()}) {
      all->merge(group);
    }
    return all;
  }();
  return *handlers;
}

std::string AnswerLine(const std::string& line) {
  Json answer = {{"id", nullptr}};
  try {
    const Json test_case = Json::parse(line);
    answer["id"] = test_case.at("id");
    const auto handler = Handlers().find(test_case.at("kind").get<std::string>());
    if (handler == Handlers().end()) {
      answer["unsupported"] = true;
    } else {
      answer["out"] = handler->second(test_case.at("in"));
    }
  } catch (const c10::Error& e) {
    answer["error"] = e.what_without_backtrace();
  } catch (const std::exception& e) {
    answer["error"] = e.what();
  }
  // Bytes that are not UTF-8 can only come from a message that quotes a bad file.
  return answer.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace muster::conformance
