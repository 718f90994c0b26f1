#ifndef MUSTER_BENCH_LOAD_AVERAGE_H_
#define MUSTER_BENCH_LOAD_AVERAGE_H_

#include <stdlib.h>

namespace muster::bench {

// The machine's load average of the last minute, which each figure is printed with; -1: not known.
inline double LoadAverage() {
  double load = 0;
  return getloadavg(&load, 1) == 1 ? load : -1;
}

}  // namespace muster::bench

#endif  // MUSTER_BENCH_LOAD_AVERAGE_H_
