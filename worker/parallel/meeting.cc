#include "worker/parallel/meeting.h"

#include <algorithm>
#include <cstddef>
#include <exception>

#include "c10/util/Exception.h"

namespace muster {
namespace {

// Of messages that say a place; the program's own exchanges have others.
constexpr char kMark = '\x01';

std::string PlaceIn(const std::string& frame) {
  const size_t end = frame.find('\n');
  if (frame.empty() || frame[0] != kMark || end == std::string::npos) {
    return "another exchange of the program";
  }
  return frame.substr(1, end - 1);
}

// Every rank names the same two places: that of rank 0 and the first other one.
void CheckPlaces(const std::vector<std::string>& all) {
  const std::string first = PlaceIn(all[0]);
  for (const std::string& frame : all) {
    const std::string other = PlaceIn(frame);
    TORCH_CHECK(other == first, "the ranks of a sharded model are at different places: one is at ",
                first, ", another at ", other,
                "; every rank must call the model, go backward and step its optimizers equally "
                "often, in accumulation windows of one length, and use the same submodules in the "
                "same order");
  }
}

}  // namespace

std::vector<std::string> MeetAt(Comm& comm, const std::string& place, const std::string& message) {
  const std::string head = kMark + place + '\n';
  std::vector<std::string> all;
  try {
    all = comm.AllGatherBytes(head + message);
  } catch (c10::Error& error) {
    error.add_context(c10::str("while the ranks of the sharded model meet at ", place));
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, error.what(), ", while the ranks of the sharded model meet at ", place);
  }
  // There may be thousands: while all are here, nothing is copied.
  const bool here = std::all_of(all.begin(), all.end(),
                                [&](const std::string& frame) { return frame.starts_with(head); });
  if (!here) CheckPlaces(all);
  for (std::string& frame : all) frame.erase(0, head.size());
  return all;
}

}  // namespace muster
