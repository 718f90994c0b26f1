#include "worker/checkpoint/tree_remover.h"

#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(TreeRemoverTest, Remove_ReturnsBeforeTheFolderIsGone_AndWaitAfterwards) {
  Notification go;
  std::vector<std::string> removed;
  TreeRemover remover([&](const std::string& path) {
    go.WaitForNotification();
    removed.push_back(path);
    return absl::OkStatus();
  });
  remover.Remove("a");
  remover.Remove("b");
  EXPECT_TRUE(remover.busy());
  go.Notify();
  remover.Wait();
  EXPECT_FALSE(remover.busy());
  EXPECT_EQ(removed, (std::vector<std::string>{"a", "b"}));
}

TEST(TreeRemoverTest, End_WaitsForWhatIsQueued) {
  int removed = 0;
  auto remover = std::make_unique<TreeRemover>([&](const std::string&) {
    ++removed;
    return absl::OkStatus();
  });
  for (int i = 0; i < 3; ++i) remover->Remove("folder");
  remover.reset();
  EXPECT_EQ(removed, 3);
}

TEST(TreeRemoverTest, FolderThatCannotBeRemoved_DoesNotKeepTheNextOne) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("old/deep")).ok());
  TreeRemover remover([](const std::string& path) {
    return path == "busy" ? absl::UnavailableError("cannot remove busy") : RemoveTree(path);
  });
  remover.Remove("busy");
  remover.Remove(folder.Path("old"));
  remover.Wait();
  EXPECT_FALSE(PathExists(folder.Path("old")));
}

TEST(TreeRemoverTest, NothingToRemove_IsNotWaitedFor) {
  TreeRemover remover;
  remover.Wait();
}

}  // namespace
}  // namespace muster
