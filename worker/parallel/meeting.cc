#include "worker/parallel/meeting.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>

#include "c10/util/Exception.h"

namespace muster {
namespace {

// Marks messages that contain a place; those of the program's own exchanges do not begin with it.
constexpr char kMark = '\x01';

std::string PlaceIn(const std::string& frame) {
  const size_t end = frame.find('\n');
  if (frame.empty() || frame[0] != kMark || end == std::string::npos) {
    return "another exchange of the program";
  }
  return frame.substr(1, end - 1);
}

// The length of the failure after the head.
using Length = uint32_t;

// An earlier failure of some rank; empty: there is none.
std::string FailureIn(const std::vector<std::string>& all) {
  for (const std::string& frame : all) {
    const size_t end = frame.find('\n');
    Length length = 0;
    if (frame.empty() || frame[0] != kMark || end == std::string::npos) continue;
    if (frame.size() - end - 1 < sizeof(length)) continue;
    std::memcpy(&length, frame.data() + end + 1, sizeof(length));
    if (length > 0) return "; before that, " + frame.substr(end + 1 + sizeof(length), length);
  }
  return "";
}

// The messages of all ranks; empty if one of them is in another exchange.
std::vector<std::string> MessagesIn(const std::vector<std::string>& all) {
  std::vector<std::string> messages;
  for (const std::string& frame : all) {
    const size_t end = frame.find('\n');
    Length length = 0;
    if (frame.empty() || frame[0] != kMark || end == std::string::npos) return {};
    if (frame.size() - end - 1 < sizeof(length)) return {};
    std::memcpy(&length, frame.data() + end + 1, sizeof(length));
    const size_t begin = end + 1 + sizeof(length) + length;
    if (frame.size() < begin) return {};
    messages.push_back(frame.substr(begin));
  }
  return messages;
}

// Every rank names the same two places: that of rank 0 and the first other one.
void CheckPlaces(const std::vector<std::string>& all) {
  const std::string first = PlaceIn(all[0]);
  for (const std::string& frame : all) {
    const std::string other = PlaceIn(frame);
    if (other == first) continue;
    throw RanksApart(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        c10::str("the ranks of a sharded model are at different places: one is at ", first,
                 ", another at ", other,
                 "; every rank must call the model, go backward and step its optimizers equally "
                 "often, in accumulation windows of one length, and use the same submodules in the "
                 "same order",
                 FailureIn(all)),
        MessagesIn(all));
  }
}

}  // namespace

bool IsOfRanksApart(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const RanksApart&) {
    return true;
  } catch (const std::exception& error) {
    // The text of Comm's error if ranks make different calls.
    return std::strstr(error.what(), "ranks disagree about a collective") != nullptr;
  } catch (...) {
    return false;
  }
}

std::vector<std::string> MeetAt(Comm& comm, const std::string& place, const std::string& message,
                                const std::string& failure) {
  const std::string head = kMark + place + '\n';
  std::string length(sizeof(Length), '\0');
  const auto bytes = static_cast<Length>(failure.size());
  std::memcpy(length.data(), &bytes, sizeof(bytes));
  std::vector<std::string> all;
  try {
    all = comm.AllGatherBytes(head + length + failure + message);
  } catch (c10::Error& error) {
    error.add_context(c10::str("while the ranks of the sharded model meet at ", place));
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, error.what(), ", while the ranks of the sharded model meet at ", place);
  }
  // There may be thousands of frames: if all ranks are here, nothing is copied.
  const bool here = std::all_of(all.begin(), all.end(),
                                [&](const std::string& frame) { return frame.starts_with(head); });
  if (!here) CheckPlaces(all);
  for (std::string& frame : all) {
    Length of_failure = 0;
    std::memcpy(&of_failure, frame.data() + head.size(), sizeof(of_failure));
    frame.erase(0, head.size() + sizeof(of_failure) + of_failure);
  }
  return all;
}

std::vector<std::string> MeetAll(Comm& world, Comm& parts, const std::string& place,
                                 const std::string& message, const std::string& failure) {
  if (&parts != &world) {
    // The ranks with other parts are waiting in the second meeting: if all ranks of this one would
    // come to it, join it.
    constexpr char kOfAll[] = "all";
    try {
      MeetAt(parts, place, kOfAll, failure);
    } catch (const RanksApart& apart) {
      const bool all = !apart.messages.empty() &&
                       std::all_of(apart.messages.begin(), apart.messages.end(),
                                   [&](const std::string& other) { return other == kOfAll; });
      if (all) MeetAt(world, place, message, failure);
      throw;
    }
  }
  return MeetAt(world, place, message, failure);
}

}  // namespace muster
