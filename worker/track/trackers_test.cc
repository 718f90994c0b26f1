#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <thread>

#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/crc32c.h"
#include "base/file.h"
#include "base/json.h"
#include "base/test_folder.h"
#include "worker/track/csv.h"
#include "worker/track/jsonl.h"
#include "worker/track/tensorboard.h"
#include "worker/track/tracker.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class TrackersTest : public testing::Test {
 protected:
  void SetUp() override {
    context_.project_name = "mnist";
    context_.logging_dir = folder_.Path("logs");
    context_.start_time = absl::FromUnixMillis(1'700'000'000'125);
  }

  absl::Time At(int seconds) const { return context_.start_time + absl::Seconds(seconds); }

  const TestFolder folder_;
  TrackerContext context_;
};

// A reader of the wire format that shares no code with the writer.
struct Field {
  int number = 0;
  int type = 0;
  uint64_t integer = 0;
  std::string bytes;

  double AsDouble() const {
    double value;
    std::memcpy(&value, &integer, 8);
    return value;
  }
  float AsFloat() const {
    float value;
    std::memcpy(&value, &integer, 4);
    return value;
  }
};

std::vector<Field> Decode(const std::string& bytes) {
  std::vector<Field> fields;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0; at < bytes.size(); shift += 7) {
      const uint8_t byte = bytes[at++];
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) break;
    }
    return value;
  };
  while (at < bytes.size()) {
    const uint64_t key = varint();
    Field field{.number = static_cast<int>(key >> 3),
                .type = static_cast<int>(key & 7),
                .integer = 0,
                .bytes = ""};
    if (field.type == 0) {
      field.integer = varint();
    } else if (field.type == 2) {
      const uint64_t size = varint();
      EXPECT_LE(at + size, bytes.size());
      field.bytes = bytes.substr(at, size);
      at += size;
    } else {
      const int size = field.type == 1 ? 8 : 4;
      EXPECT_TRUE(field.type == 1 || field.type == 5);
      EXPECT_LE(at + size, bytes.size());
      std::memcpy(&field.integer, bytes.data() + at, size);
      at += size;
    }
    fields.push_back(field);
  }
  return fields;
}

Field Get(const std::string& bytes, int number) {
  for (const Field& field : Decode(bytes)) {
    if (field.number == number) return field;
  }
  return {};
}

std::vector<std::string> Events(const std::string& path) {
  const std::string file = *ReadFile(path);
  std::vector<std::string> events;
  size_t at = 0;
  while (at < file.size()) {
    uint64_t length = 0;
    uint32_t crc = 0;
    EXPECT_LE(at + 12, file.size());
    std::memcpy(&length, file.data() + at, 8);
    std::memcpy(&crc, file.data() + at + 8, 4);
    EXPECT_EQ(crc, MaskedCrc32c(absl::string_view(file).substr(at, 8)));
    EXPECT_LE(at + 16 + length, file.size());
    events.push_back(file.substr(at + 12, length));
    std::memcpy(&crc, file.data() + at + 12 + length, 4);
    EXPECT_EQ(crc, MaskedCrc32c(events.back()));
    at += 16 + length;
  }
  return events;
}

TEST_F(TrackersTest, TensorBoard_ScalarsTextsAndConfigDecode) {
  TensorBoardTracker tracker(context_);
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker.store_init_configuration({{"lr", 0.1}, {"arch", "cnn"}, {"amp", true}}).ok());
  ASSERT_TRUE(tracker.log({{{"loss", 0.5}, {"epoch", 3}, {"note", "hello ✓"}}, 7, At(2)}).ok());
  ASSERT_TRUE(tracker.log({{{"loss", std::nan("")}}, std::nullopt, At(3)}).ok());
  ASSERT_TRUE(tracker.finish().ok());

  EXPECT_THAT(BaseName(tracker.path()), HasSubstr("events.out.tfevents.1700000000."));
  const std::vector<std::string> events = Events(tracker.path());
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(Get(events[0], 3).bytes, "brain.Event:2");
  EXPECT_DOUBLE_EQ(Get(events[0], 1).AsDouble(), 1'700'000'000.125);

  const auto plugin = [](const std::string& value) { return Get(Get(value, 9).bytes, 1).bytes; };
  const std::string start = Get(Get(events[2], 5).bytes, 1).bytes;
  EXPECT_EQ(Get(start, 1).bytes, "_hparams_/session_start_info");
  EXPECT_EQ(Get(plugin(start), 1).bytes, "hparams");
  const std::string session = Get(Get(plugin(start), 2).bytes, 3).bytes;
  const std::string lr = Get(session, 1).bytes;
  EXPECT_EQ(Get(lr, 1).bytes, "lr");
  EXPECT_DOUBLE_EQ(Get(Get(lr, 2).bytes, 2).AsDouble(), 0.1);

  EXPECT_EQ(Get(events[3], 2).integer, 7u);
  EXPECT_DOUBLE_EQ(Get(events[3], 1).AsDouble(), 1'700'000'002.125);
  const std::vector<Field> values = Decode(Get(events[3], 5).bytes);
  ASSERT_EQ(values.size(), 3u);
  EXPECT_EQ(Get(values[0].bytes, 1).bytes, "loss");
  EXPECT_EQ(Get(values[0].bytes, 2).AsFloat(), 0.5f);
  EXPECT_EQ(Get(values[1].bytes, 2).AsFloat(), 3.0f);
  EXPECT_EQ(Get(values[2].bytes, 1).bytes, "note/text_summary");
  EXPECT_EQ(Get(Get(values[2].bytes, 8).bytes, 8).bytes, "hello ✓");
  EXPECT_EQ(Get(plugin(values[2].bytes), 1).bytes, "text");

  EXPECT_EQ(Get(events[4], 2).integer, 8u) << "without a step, the count goes on";
  EXPECT_TRUE(std::isnan(Get(Get(Get(events[4], 5).bytes, 1).bytes, 2).AsFloat()));
  EXPECT_EQ(*ReadFile(JoinPath(ParentPath(tracker.path()), "hparams.yml")),
            "\"lr\": 0.1\n\"arch\": \"cnn\"\n\"amp\": true\n");
}

// In YAML 1.1, as PyYAML reads it, a float has a point.
TEST_F(TrackersTest, TensorBoard_NumbersOfTheConfig_AreNumbersOfYaml) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  TensorBoardTracker tracker(context_);
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker
                  .store_init_configuration({{"lr", 1e-5},
                                             {"large", 1e+20},
                                             {"exact", 1.5e-7},
                                             {"whole", 3.0},
                                             {"count", 3},
                                             {"nan", std::nan("")},
                                             {"most", kInfinity},
                                             {"least", -kInfinity},
                                             {"count", 4}})
                  .ok());
  EXPECT_EQ(*ReadFile(JoinPath(ParentPath(tracker.path()), "hparams.yml")),
            "\"lr\": 1.0e-05\n\"large\": 1.0e+20\n\"exact\": 1.5e-07\n\"whole\": 3.0\n"
            "\"count\": 4\n\"nan\": .nan\n\"most\": .inf\n\"least\": -.inf\n");
}

// Like after a restart: the program logs without steps.
TEST_F(TrackersTest, TensorBoard_NextRun_CountsOnFromTheLastStep) {
  const auto log = [&](std::optional<int64_t> step) {
    TensorBoardTracker tracker(context_);
    EXPECT_TRUE(tracker.start().ok());
    EXPECT_TRUE(tracker.store_init_configuration({{"lr", 0.1}}).ok());
    const int64_t next = tracker.next_step();
    EXPECT_TRUE(tracker.log({{{"loss", 0.5}}, step, At(0)}).ok());
    EXPECT_TRUE(tracker.finish().ok());
    return std::pair(next, tracker.path());
  };
  EXPECT_EQ(log(std::nullopt).first, 0);
  EXPECT_EQ(log(499).first, 1);
  const auto [next, path] = log(std::nullopt);
  EXPECT_EQ(next, 500);
  // A file without an entry, like that of a run that ended before its first one, and an entry that
  // is cut.
  {
    TensorBoardTracker empty(context_);
    ASSERT_TRUE(empty.start().ok());
    ASSERT_TRUE(WriteFileAtomically(path, *ReadFile(path) + std::string(11, 'x')).ok());
  }
  EXPECT_EQ(log(std::nullopt).first, 501);
}

TEST_F(TrackersTest, Jsonl_OneObjectALineAndGoesOnAfterACrash) {
  std::string path;
  {
    JsonlTracker tracker(context_);
    path = tracker.path();
    ASSERT_TRUE(tracker.start().ok());
    ASSERT_TRUE(tracker.store_init_configuration({{"lr", 0.1}}).ok());
    ASSERT_TRUE(tracker
                    .log({{{"loss", 1.0 / 3},
                           {"big", int64_t{1} << 60},
                           {"odd", std::nan("")},
                           {"text", "a\"\n\xff"}},
                          5,
                          At(1)})
                    .ok());
  }
  ASSERT_TRUE(WriteFileAtomically(path, *ReadFile(path) + "{\"time\": 17").ok());
  JsonlTracker tracker(context_);
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker.log({{{"loss", 0.25}}, std::nullopt, At(2)}).ok());
  ASSERT_TRUE(tracker.finish().ok());

  const std::vector<std::string> lines =
      absl::StrSplit(absl::StripSuffix(*ReadFile(path), "\n"), '\n');
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(
      lines[0],
      "{\"time\": 1700000000.125, \"run\": \"mnist\", \"rank\": 0, \"config\": {\"lr\": 0.1}}");
  const auto second = ParseJson(lines[1], "line");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*second)["step"], 5);
  EXPECT_EQ((*second)["values"]["loss"].get<double>(), 1.0 / 3);
  EXPECT_EQ((*second)["values"]["big"].get<int64_t>(), int64_t{1} << 60);
  EXPECT_EQ((*second)["values"]["odd"], "nan");
  EXPECT_EQ(ParseJson(lines[3], "line")->at("values").at("loss"), 0.25);
}

// Like after a restart: the program logs without steps.
TEST_F(TrackersTest, Jsonl_ContinuedFile_CountsOnFromItsLastStep) {
  const std::string path = JsonlTracker(context_).path();
  const auto log = [&](int rank, std::optional<int64_t> step) {
    TrackerContext context = context_;
    context.rank = rank;
    JsonlTracker tracker(context);
    ASSERT_TRUE(tracker.start().ok());
    ASSERT_TRUE(tracker.store_init_configuration({{"rank", rank}, {"step", 70}, {"loss", 1}}).ok());
    ASSERT_TRUE(tracker.log({{{"loss", 0.5}, {"step", 90}}, step, At(0)}).ok());
  };
  const auto steps = [&] {
    std::vector<int64_t> all;
    const std::string text = *ReadFile(path);
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      const auto object = ParseJson(std::string(line), "line");
      if (object.ok() && object->contains("step")) all.push_back((*object)["step"]);
    }
    return all;
  };
  log(0, std::nullopt);
  log(0, std::nullopt);
  log(1, std::nullopt);
  log(0, std::nullopt);
  log(0, 499);
  log(0, std::nullopt);
  EXPECT_EQ(steps(), (std::vector<int64_t>{0, 1, 0, 2, 499, 500}));
  // A step that a crash has cut does not count, nor does a line longer than one piece from the end.
  ASSERT_TRUE(WriteFileAtomically(path, *ReadFile(path) +
                                            "{\"time\": 1.000, \"run\": \"mnist\", \"rank\": 0, "
                                            "\"step\": 5" +
                                            std::string(200'000, '0'))
                  .ok());
  log(0, std::nullopt);
  EXPECT_EQ(steps().back(), 501);
}

// Its end is not searched for, which would take minutes, and as much memory.
TEST_F(TrackersTest, Csv_ForeignFileWithoutALineEnd_IsRefusedAtOnce) {
  CsvTracker tracker(context_);
  ASSERT_TRUE(MakeDirectories(ParentPath(tracker.path())).ok());
  ASSERT_TRUE(WriteFileAtomically(tracker.path(), "").ok());
  ASSERT_EQ(truncate(tracker.path().c_str(), int64_t{1} << 30), 0);
  EXPECT_THAT(std::string(tracker.start().message()), HasSubstr("does not begin with time,step"));
}

TEST_F(TrackersTest, Csv_LargestStep_IsNotPassed) {
  for (int run = 0; run < 2; ++run) {
    CsvTracker tracker(context_);
    ASSERT_TRUE(tracker.start().ok());
    ASSERT_TRUE(tracker.log({{{"x", 1}}, std::numeric_limits<int64_t>::max(), At(0)}).ok());
    EXPECT_EQ(tracker.next_step(), std::numeric_limits<int64_t>::max());
  }
}

TEST_F(TrackersTest, Csv_ContinuedTable_CountsOnFromItsLastStep) {
  const std::string path = CsvTracker(context_).path();
  const auto log = [&](std::optional<int64_t> step, const std::string& note) {
    CsvTracker tracker(context_);
    ASSERT_TRUE(tracker.start().ok());
    ASSERT_TRUE(tracker.log({{{"loss", 0.5}, {"note", note}}, step, At(0)}).ok());
  };
  const auto end = [&] {
    const std::string text = *ReadFile(path);
    return text.substr(text.rfind("1700000000.125"));
  };
  log(std::nullopt, "a\n1,2,3");
  log(std::nullopt, "b");
  EXPECT_EQ(end(), "1700000000.125,1,0.5,b\n");
  log(499, "c\n\"7,8,9\"\n");
  log(std::nullopt, "d");
  EXPECT_EQ(end(), "1700000000.125,500,0.5,d\n");
  ASSERT_TRUE(WriteFileAtomically(path, *ReadFile(path) + "1700000000.125,5").ok());
  log(std::nullopt, "e");
  EXPECT_EQ(end(), "1700000000.125,501,0.5,e\n");
}

TEST_F(TrackersTest, Csv_RowCutWithinQuotes_IsEndedBeforeTheNextOne) {
  const auto log = [&] {
    CsvTracker tracker(context_);
    EXPECT_TRUE(tracker.start().ok());
    const int64_t next = tracker.next_step();
    EXPECT_TRUE(tracker.log({{{"loss", 0.5}}, std::nullopt, At(0)}).ok());
    return next;
  };
  const std::string path = CsvTracker(context_).path();
  EXPECT_EQ(log(), 0);
  ASSERT_TRUE(WriteFileAtomically(path, *ReadFile(path) + "1700000000.125,5,\"c, d").ok());
  EXPECT_EQ(log(), 6);
  EXPECT_EQ(log(), 7);
  EXPECT_EQ(*ReadFile(path),
            "time,step,loss\n1700000000.125,0,0.5\n1700000000.125,5,\"c, d\"\n"
            "1700000000.125,6,0.5\n1700000000.125,7,0.5\n");
}

TEST_F(TrackersTest, Csv_HeaderThatIsCut_IsEndedBeforeTheFirstRow) {
  const auto text_after = [&](const std::string& header) {
    CsvTracker tracker(context_);
    EXPECT_TRUE(MakeDirectories(ParentPath(tracker.path())).ok());
    EXPECT_TRUE(WriteFileAtomically(tracker.path(), header).ok());
    EXPECT_TRUE(tracker.start().ok());
    EXPECT_TRUE(tracker.log({{{"loss", 0.5}}, std::nullopt, At(0)}).ok());
    return *ReadFile(tracker.path());
  };
  EXPECT_EQ(text_after("time,step,lo"), "time,step,lo,loss\n1700000000.125,0,,0.5\n");
  EXPECT_EQ(text_after("time,step,loss"), "time,step,loss\n1700000000.125,0,0.5\n");
  EXPECT_EQ(text_after("time,step,\"a, b"), "time,step,\"a, b\",loss\n1700000000.125,0,,0.5\n");
}

TEST_F(TrackersTest, Csv_TwoWriters_KeepEachOthersRowsAndColumns) {
  CsvTracker a(context_);
  CsvTracker b(context_);
  ASSERT_TRUE(a.start().ok());
  ASSERT_TRUE(b.start().ok());
  ASSERT_TRUE(a.log({{{"loss", 1}}, 0, At(0)}).ok());
  ASSERT_TRUE(b.log({{{"acc", 2}}, 0, At(0)}).ok());
  ASSERT_TRUE(a.log({{{"loss", 3}}, 1, At(0)}).ok());
  ASSERT_TRUE(b.log({{{"loss", 4}, {"rate", 5}}, 1, At(0)}).ok());
  ASSERT_TRUE(a.log({{{"acc", 6}}, 2, At(0)}).ok());
  EXPECT_EQ(*ReadFile(a.path()),
            "time,step,loss,acc,rate\n1700000000.125,0,1\n1700000000.125,0,,2\n"
            "1700000000.125,1,3,\n1700000000.125,1,4,,5\n1700000000.125,2,,6,\n");
}

TEST_F(TrackersTest, Csv_ManyWritersAtOnce_LoseNoRow) {
  constexpr int kWriters = 4;
  constexpr int kRows = 25;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([this, writer] {
      CsvTracker tracker(context_);
      EXPECT_TRUE(tracker.start().ok());
      for (int row = 0; row < kRows; ++row) {
        const std::string name = "w" + std::to_string(writer) + "r" + std::to_string(row % 5);
        EXPECT_TRUE(tracker.log({{{name, row}}, row, At(0)}).ok());
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::vector<std::string> lines =
      absl::StrSplit(absl::StripSuffix(*ReadFile(CsvTracker(context_).path()), "\n"), '\n');
  ASSERT_EQ(lines.size(), 1u + kWriters * kRows);
  const std::vector<std::string> names = absl::StrSplit(lines[0], ',');
  EXPECT_EQ(names.size(), 2u + kWriters * 5);
  // Each value is in the column of its name.
  std::map<std::string, std::vector<std::string>> values;
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::vector<std::string> cells = absl::StrSplit(lines[i], ',');
    for (size_t column = 2; column < cells.size(); ++column) {
      if (!cells[column].empty()) values[names[column]].push_back(cells[column]);
    }
  }
  EXPECT_THAT(values["w3r2"], testing::ElementsAre("2", "7", "12", "17", "22"));
}

TEST_F(TrackersTest, Csv_TableBeyondAGibibyte_GoesOn) {
  const std::string path = CsvTracker(context_).path();
  {
    CsvTracker tracker(context_);
    ASSERT_TRUE(tracker.start().ok());
    ASSERT_TRUE(tracker.log({{{"loss", 0.5}}, 7, At(0)}).ok());
  }
  // A hole takes no disk space. Its zeros are one long row.
  constexpr int64_t kSize = (int64_t{1} << 30) + 4096;
  std::filesystem::resize_file(path, kSize);
  {
    std::ofstream file(path, std::ios::binary | std::ios::in | std::ios::ate);
    file << "\n1700000000.125,8,0.25\n";
  }
  CsvTracker tracker(context_);
  const absl::Status started = tracker.start();
  ASSERT_TRUE(started.ok()) << started;
  EXPECT_EQ(tracker.next_step(), 9);
  ASSERT_TRUE(tracker.finish().ok());
}

TEST_F(TrackersTest, Csv_SymbolicLink_StaysOneWhenAColumnIsAdded) {
  const std::string elsewhere = folder_.Path("elsewhere.csv");
  CsvTracker tracker(context_);
  ASSERT_TRUE(MakeDirectories(ParentPath(tracker.path())).ok());
  ASSERT_TRUE(WriteFileAtomically(elsewhere, "").ok());
  std::filesystem::create_symlink(elsewhere, tracker.path());
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker.log({{{"loss", 0.5}}, 1, At(0)}).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(tracker.path()));
  EXPECT_EQ(*ReadFile(elsewhere), "time,step,loss\n1700000000.125,1,0.5\n");
}

TEST_F(TrackersTest, Csv_NewNamesAddColumns) {
  CsvTracker tracker(context_);
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker.log({{{"loss", 0.5}}, 1, At(0)}).ok());
  ASSERT_TRUE(tracker.log({{{"note", "a,\"b\""}, {"loss", 0.25}}, 2, At(1)}).ok());
  ASSERT_TRUE(tracker.finish().ok());
  EXPECT_EQ(*ReadFile(tracker.path()),
            "time,step,loss,note\n1700000000.125,1,0.5\n"
            "1700000001.125,2,0.25,\"a,\"\"b\"\"\"\n");
  CsvTracker again(context_);
  ASSERT_TRUE(again.start().ok());
  ASSERT_TRUE(again.log({{{"new\ncolumn", true}}, 3, At(2)}).ok());
  ASSERT_TRUE(again.log({{{"loss", 1}}, std::nullopt, At(3)}).ok());
  ASSERT_TRUE(again.finish().ok());
  EXPECT_EQ(*ReadFile(tracker.path()),
            "time,step,loss,note,\"new\ncolumn\"\n1700000000.125,1,0.5\n"
            "1700000001.125,2,0.25,\"a,\"\"b\"\"\"\n1700000002.125,3,,,true\n"
            "1700000003.125,4,1,,\n");
}

// While it exists, files cannot grow beyond `bytes`, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(uint64_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_;
  void (*handler_)(int);
};

// Writes one entry, one of which only a part fits on the disk, and another one.
template <class Tracker>
void LogOverAFullDisk(Tracker& tracker, absl::Time time) {
  ASSERT_TRUE(tracker.log({{{"loss", 0.5}}, 1, time}).ok());
  const std::string before = *ReadFile(tracker.path());
  {
    const FullDisk full(before.size() + 5);
    EXPECT_FALSE(tracker.log({{{"loss", 0.25}}, 2, time}).ok());
  }
  EXPECT_EQ(*ReadFile(tracker.path()), before);
  ASSERT_TRUE(tracker.log({{{"loss", 0.125}}, 3, time}).ok());
  ASSERT_TRUE(tracker.finish().ok());
}

TEST_F(TrackersTest, RecordThatIsCut_LeavesTheOthersReadable) {
  TensorBoardTracker events(context_);
  ASSERT_TRUE(events.start().ok());
  LogOverAFullDisk(events, At(0));
  EXPECT_EQ(Events(events.path()).size(), 3u);
  JsonlTracker lines(context_);
  ASSERT_TRUE(lines.start().ok());
  LogOverAFullDisk(lines, At(0));
  const std::vector<std::string> written =
      absl::StrSplit(absl::StripSuffix(*ReadFile(lines.path()), "\n"), '\n');
  ASSERT_EQ(written.size(), 2u);
  EXPECT_EQ(ParseJson(written[1], "line")->at("step"), 3);
  CsvTracker table(context_);
  ASSERT_TRUE(table.start().ok());
  LogOverAFullDisk(table, At(0));
  EXPECT_EQ(*ReadFile(table.path()),
            "time,step,loss\n1700000000.125,1,0.5\n1700000000.125,3,0.125\n");
}

TEST_F(TrackersTest, Csv_HeaderThatCannotBeRewritten_IsRewrittenLater) {
  CsvTracker tracker(context_);
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker.log({{{"loss", 0.5}}, 1, At(0)}).ok());
  {
    const FullDisk full(5);
    EXPECT_FALSE(tracker.log({{{"new", 7}}, 2, At(1)}).ok());
  }
  ASSERT_TRUE(tracker.log({{{"loss", 0.25}}, 3, At(2)}).ok());
  ASSERT_TRUE(tracker.log({{{"new", 8}}, 4, At(3)}).ok());
  EXPECT_EQ(*ReadFile(tracker.path()),
            "time,step,loss,new\n1700000000.125,1,0.5\n1700000002.125,3,0.25\n"
            "1700000003.125,4,,8\n");
}

TEST_F(TrackersTest, Csv_ForeignFile_IsLeftAlone) {
  CsvTracker tracker(context_);
  ASSERT_TRUE(MakeDirectories(ParentPath(tracker.path())).ok());
  ASSERT_TRUE(WriteFileAtomically(tracker.path(), "a,b\n1,2\n").ok());
  EXPECT_THAT(std::string(tracker.start().message()), HasSubstr("move the file away"));
  EXPECT_FALSE(tracker.log({{{"a", 1}}, 1, At(0)}).ok());
  EXPECT_EQ(*ReadFile(tracker.path()), "a,b\n1,2\n");
}

TEST_F(TrackersTest, Jsonl_NameTwiceInAnEntry_HasItsLastValue) {
  JsonlTracker tracker(context_);
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker.log({{{"loss", 1}, {"acc", 2}, {"loss", 3}}, 1, At(0)}).ok());
  const auto line = ParseJson(*ReadFile(tracker.path()), "line");
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ((*line)["values"]["loss"], 3);
  EXPECT_EQ((*line)["values"]["acc"], 2);
}

TEST_F(TrackersTest, LogAfterFinish_SaysThatItIsFinished) {
  JsonlTracker tracker(context_);
  ASSERT_TRUE(tracker.start().ok());
  ASSERT_TRUE(tracker.finish().ok());
  EXPECT_THAT(std::string(tracker.log({{{"a", 1}}, 1, At(0)}).message()),
              HasSubstr("or is finished"));
}

TEST_F(TrackersTest, LogBeforeStart_IsAnError) {
  EXPECT_FALSE(JsonlTracker(context_).log({{{"a", 1}}, 1, At(0)}).ok());
  EXPECT_FALSE(CsvTracker(context_).log({{{"a", 1}}, 1, At(0)}).ok());
  EXPECT_FALSE(TensorBoardTracker(context_).log({{{"a", 1}}, 1, At(0)}).ok());
}

TEST_F(TrackersTest, MakeTracker_UnknownNameOrNoFolder_SaysWhatToDo) {
  EXPECT_EQ((*MakeTracker("jsonl", context_))->name(), "jsonl");
  EXPECT_THAT(std::string(MakeTracker("wandb", context_).status().message()),
              HasSubstr("known are csv, jsonl, tensorboard"));
  context_.logging_dir = "";
  EXPECT_THAT(std::string(MakeTracker("csv", context_).status().message()),
              HasSubstr("needs a logging_dir"));
  context_.logging_dir = TestPath("unused");
  RegisterTrackerClass("mine", [](const TrackerContext& context) {
    return std::unique_ptr<GeneralTracker>(std::make_unique<JsonlTracker>(context));
  });
  EXPECT_TRUE(MakeTracker("mine", context_).ok());
  RegisterTrackerClass("nothing",
                       [](const TrackerContext&) { return std::unique_ptr<GeneralTracker>(); });
  EXPECT_THAT(std::string(MakeTracker("nothing", context_).status().message()),
              HasSubstr("registered for the tracker \"nothing\" returns null"));
}

TEST(TrackerValue, Texts_AreShortAndExact) {
  EXPECT_EQ(TrackerValue(0.1).text(), "0.1");
  EXPECT_EQ(TrackerValue(0.1f).number(), static_cast<double>(0.1f));
  EXPECT_EQ(TrackerValue(1.0 / 3).text(), "0.3333333333333333");
  EXPECT_EQ(TrackerValue(7u).text(), "7");
  EXPECT_EQ(TrackerValue(uint64_t{7}).get(), TrackerValue::Variant(int64_t{7}));
  EXPECT_EQ(TrackerValue(uint64_t{1} << 63).text(), "9223372036854775808");
  EXPECT_EQ(TrackerValue(std::numeric_limits<uint64_t>::max()).json(), "18446744073709551615");
  EXPECT_EQ(TrackerValue(uint64_t{1} << 63).number(), 0x1p63);
  EXPECT_FALSE(TrackerValue(uint64_t{1} << 63).is_text());
  EXPECT_EQ(TrackerValue(false).json(), "false");
  EXPECT_EQ(TrackerValue(-std::numeric_limits<double>::infinity()).json(), "\"-inf\"");
  EXPECT_EQ(TrackerValue("a\"b").json(), "\"a\\\"b\"");
}

}  // namespace
}  // namespace muster
