#ifndef MUSTER_PROTO_RANDOM_MESSAGE_H_
#define MUSTER_PROTO_RANDOM_MESSAGE_H_

#include <cstdint>
#include <random>
#include <string>

#include "google/protobuf/message.h"

namespace muster {

// Fills messages of any type with random fields, for tests of code that takes messages that others
// wrote. The same seed gives the same messages. A test that knows which values reach far overrides
// what is drawn. Not thread-safe.
class RandomMessage {
 public:
  explicit RandomMessage(uint64_t seed) : random_(seed) {}
  virtual ~RandomMessage() = default;

  // Returns a number from 0 to n - 1.
  uint64_t Draw(uint64_t n) { return random_() % n; }
  std::mt19937_64& generator() { return random_; }

  // Sets three quarters of the fields, one of each oneof, and the fields of nested messages.
  void Fill(google::protobuf::Message* message) { Fill(message, 0); }
  // Fills the member `name`, or a random one, of `message`'s first oneof.
  void FillKind(google::protobuf::Message* message, const std::string& name = "");

 protected:
  // Whether a field of that name is always set, or never.
  virtual bool Always(const std::string& /*name*/) const { return false; }
  virtual bool Never(const std::string& /*name*/) const { return false; }
  // The values of fields of that name.
  virtual std::string Text(const std::string& name);
  virtual int64_t Number(const std::string& name);

 private:
  void Fill(google::protobuf::Message* message, int depth);
  void Set(google::protobuf::Message* message, const google::protobuf::FieldDescriptor* field,
           int depth);

  std::mt19937_64 random_;
};

}  // namespace muster

#endif  // MUSTER_PROTO_RANDOM_MESSAGE_H_
