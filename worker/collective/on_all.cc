#include "worker/collective/on_all.h"

#include <vector>

#include "c10/util/Exception.h"

namespace muster {

std::string TextOf(const std::exception_ptr& thrown) {
  std::string text;
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
    text = "what is thrown is no exception";
  }
  return text.empty() ? "an error without a text" : text;
}

void OnAll(Comm& comm, const std::string& what, absl::FunctionRef<void()> step) {
  std::string mistake;
  std::exception_ptr mine;
  try {
    step();
  } catch (...) {
    mine = std::current_exception();
    mistake = TextOf(mine);
  }
  const std::vector<std::string> all = comm.AllGatherBytes(mistake);
  if (mine != nullptr) std::rethrow_exception(mine);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK(all[rank].empty(), "rank ", rank, " cannot ", what, ": ", all[rank]);
  }
}

}  // namespace muster
