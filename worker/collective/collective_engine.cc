#include "worker/collective/collective_engine.h"

#include "c10/core/ScalarType.h"
#include "c10/util/StringUtil.h"
#include "worker/collective/comm_checks.h"

namespace muster {
namespace {

const char* Name(uint8_t operation) {
  switch (static_cast<Operation>(operation)) {
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kBarrier:
      return "barrier";
  }
  return "an unknown operation";
}

}  // namespace

std::string DescribeCall(const ShmCall& call) {
  return c10::str(Name(call.operation), " #", call.sequence, " of ", call.bytes, " bytes");
}

std::string DescribeDisagreement(const std::vector<int>& ranks, const std::vector<ShmCall>& calls) {
  std::vector<std::string> texts;
  for (const ShmCall& call : calls) {
    texts.push_back(c10::str(DescribeCall(call), " of ",
                             c10::toString(static_cast<c10::ScalarType>(call.dtype))));
  }
  return "ranks disagree about a collective: " +
         comm_checks::ByRanks(texts, "called", "called", ranks) +
         // What only some ranks call may be a call of many collectives.
         "; every process has to make the same calls, save_state() and load_state() too: not only "
         "where is_main_process()";
}

}  // namespace muster
