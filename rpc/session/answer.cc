#include "rpc/session/answer.h"

namespace muster::rpc {

v1::OpResult Answer::Parse() const {
  v1::OpResult result;
  result.ParseFromString(bytes_);
  return result;
}

absl::string_view Answer::reply() const {
  // It is the only field: its tag and its length, two varints, precede it.
  // The high bit of a varint's byte says that another byte follows. The bytes are our own
  // serialization, so they need no bounds check.
  absl::string_view rest = bytes_;
  for (int varint = 0; varint < 2; ++varint) {
    while (static_cast<unsigned char>(rest.front()) >= 0x80) rest.remove_prefix(1);
    rest.remove_prefix(1);
  }
  return rest;
}

}  // namespace muster::rpc
