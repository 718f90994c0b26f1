#ifndef MUSTER_TESTS_GPU_GPU_ENVIRONMENT_H_
#define MUSTER_TESTS_GPU_GPU_ENVIRONMENT_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "absl/status/status.h"
#include "worker/collective/nccl.h"

namespace muster::testing_support {

// Takes NCCL from the plug-in of this build, not from one that is installed.
inline void FindPlugin() {
  if (const char* const root = getenv("TEST_SRCDIR")) {
    const std::string plugin =
        std::string(root) + "/muster/worker/collective/nccl_plugin/libmuster_nccl.so";
    setenv("MUSTER_NCCL_PLUGIN", plugin.c_str(), 1);
  }
}

// Fails the test if there is no GPU.
inline void NeedGpu() {
  FindPlugin();
  ASSERT_GT(VisibleGpus(), 0) << "this test is tagged gpu: it runs where one is";
  const absl::Status loaded = LoadCuda();
  ASSERT_TRUE(loaded.ok()) << loaded;
}

}  // namespace muster::testing_support

#endif  // MUSTER_TESTS_GPU_GPU_ENVIRONMENT_H_
