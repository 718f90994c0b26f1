#include "base/identity.h"

#include <sys/random.h>
#include <unistd.h>

#include "base/log.h"

namespace muster {

std::string HostName() {
  char name[256] = "";
  return gethostname(name, sizeof(name) - 1) == 0 ? OneLine(name) : "";
}

uint64_t RandomId() {
  uint64_t id = 0;
  while (id == 0) MUSTER_CHECK(getrandom(&id, sizeof(id), 0) == sizeof(id));
  return id;
}

}  // namespace muster
