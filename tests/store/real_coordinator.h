#ifndef MUSTER_TESTS_STORE_REAL_COORDINATOR_H_
#define MUSTER_TESTS_STORE_REAL_COORDINATOR_H_

#include <memory>
#include <string>

namespace muster {

// A coordinator in memory on a free loopback port, behind a header without protobuf: LibTorch's
// headers bring an old copy of it, so the two cannot meet in one file.
class RealCoordinator {
 public:
  RealCoordinator();
  ~RealCoordinator();
  const std::string& address() const { return address_; }

 private:
  std::string address_;
  std::shared_ptr<void> server_;
};

}  // namespace muster

#endif  // MUSTER_TESTS_STORE_REAL_COORDINATOR_H_
