// What Muster does on the inputs of quirks.jsonl, for which the real libraries do something that is
// a mistake: each entry of the kinds of data, steps and collectives is decided here, and one that
// no decision fits is a failure.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "muster/tokenizer.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/case_loader.h"
#include "tests/conformance/compare.h"
#include "tests/conformance/handlers.h"
#include "tests/testdata/golden.h"
#include "worker/data/sampler_shard.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

std::vector<Json> Quirks(const std::string& kind) {
  return testing_support::GoldenCases(kind, "quirks.jsonl");
}

Json AnswerTo(const Json& quirk) {
  return Handlers().at(quirk["kind"].get<std::string>())(quirk["in"]);
}

// A reported length is the number of batches given out, per process.
TEST(Quirks, D09_BatchSamplerShard_LengthIsTheNumberOfBatches) {
  for (const Json& quirk : Quirks("batch_sampler_shard")) {
    SCOPED_TRACE(quirk["id"]);
    const Json& in = quirk["in"];
    const BatchSamplerShard shard = ValueOf(BatchSamplerShard::Create(
        ShardOptionsOf(in), IntOf(in, "dataset_len"), IntOf(in, "batch_size")));
    const Json given = AnswerTo(quirk)["batches"];
    for (size_t rank = 0; rank < given.size(); ++rank) {
      EXPECT_EQ(shard.NumBatches(static_cast<int>(rank)), quirk["recommended"]["len"][rank]);
      EXPECT_EQ(given[rank].size(), quirk["recommended"]["len"][rank]);
    }
  }
}

TEST(Quirks, D09_IterableDatasetShard_LengthIsTheNumberOfSamples) {
  for (const Json& quirk : Quirks("iterable_dataset_shard")) {
    SCOPED_TRACE(quirk["id"]);
    if (quirk["recommended"].is_string()) {
      // With batch size 1 split over several processes, the peer silently loses all samples.
      EXPECT_EQ(quirk["in"]["batch_size"], 1);
      try {
        ADD_FAILURE() << AnswerTo(quirk);
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("round multiple"), std::string::npos);
      }
      continue;
    }
    const Json given = AnswerTo(quirk);
    for (size_t rank = 0; rank < given["samples"].size(); ++rank) {
      EXPECT_EQ(given["samples"][rank].size(), quirk["recommended"]["len"][rank]);
    }
    OnEveryRank(quirk["in"], "iterable", true, false, [&](auto loader, Comm& comm) {
      EXPECT_EQ(loader.size(), given["batches"][comm.rank()].size());
    });
  }
}

TEST(Quirks, D09_SkipFirstBatches_LengthIsTheNumberOfBatchesLeft) {
  for (const Json& quirk : Quirks("skip_first_batches")) {
    SCOPED_TRACE(quirk["id"]);
    const Json& in = quirk["in"];
    const Json given = AnswerTo(quirk)["batches"];
    OnEveryRank(in, in["dataset"], true, false, [&](auto loader, Comm& comm) {
      const Json& want = quirk["recommended"]["len"][comm.rank()];
      EXPECT_EQ(SkipFirstBatches(loader, IntOf(in, "skip")).size(), want);
      EXPECT_EQ(given[comm.rank()].size(), want);
    });
  }
}

// Repeated samples are known from the batch's own facts, with or without a length, after skipping
// or not; a loader without any batch just ends.
TEST(Quirks, D07_GatherForMetrics_LeavesNoRepeatedSample) {
  for (const Json& quirk : Quirks("gather_for_metrics")) {
    SCOPED_TRACE(quirk["id"]);
    const Json& recommended = quirk["recommended"];
    const Json given = AnswerTo(quirk);
    if (recommended.contains("ids_in_order")) {
      Json ids = Json::array();
      for (const Json& round : given["gathered"]) ids.insert(ids.end(), round.begin(), round.end());
      EXPECT_EQ(ids, recommended["ids_in_order"]);
    } else {
      EXPECT_EQ(given, recommended);
    }
  }
}

TEST(Quirks, SplitBetweenProcesses_TuplesArePaddedAndNothingIsPaddedToNothing) {
  for (const Json& quirk : Quirks("split_between_processes")) {
    SCOPED_TRACE(quirk["id"]);
    const Json& in = quirk["in"];
    ASSERT_TRUE(in["apply_padding"]);
    Json as_list = in;
    as_list["type"] = "list";
    const Json given = AnswerTo(quirk);
    EXPECT_EQ(given, Handlers().at("split_between_processes")(as_list));
    const size_t each = (in["value"].size() + RanksOf(in) - 1) / RanksOf(in);
    for (const Json& part : given["per_process"]) EXPECT_EQ(part.size(), each);
  }
}

// A loader that was left, even at its last batch, has no influence on later micro-steps.
TEST(Quirks, D05_GradAccumulation_BreakAtTheLastBatchDoesNotSyncForEver) {
  for (const Json& quirk : Quirks("grad_accumulation")) {
    ASSERT_EQ(quirk["id"], "quirk/grad_accumulation/s001");
    std::string syncs;
    const Json given = AnswerTo(quirk);
    for (const Json& step : given["steps"]) syncs += step["sync"].get<bool>() ? 'S' : '.';
    EXPECT_EQ(syncs, "..SS..S..S");
  }
}

// A one-cycle schedule stops at step total_steps - 1: the rate never rises again once it came down.
// adjust_scheduler does nothing unless it is asked for, and then it works
// (PreparedScheduler.D12_AdjustScheduler_EndsWithTheTraining).
TEST(Quirks, D12_LrScheduler_OneCycleDoesNotBounceAndAdjustingIsOptIn) {
  for (const Json& quirk : Quirks("lr_scheduler")) {
    SCOPED_TRACE(quirk["id"]);
    const Json given = AnswerTo(quirk);
    const Json& peer = quirk["hf"];
    const int64_t last = quirk["in"]["scheduler"]["total_steps"].get<int64_t>() - 1;
    if (peer["scheduler_steps"].back() <= last) {
      EXPECT_GT(quirk["in"]["gradient_accumulation_steps"], 1);
      EXPECT_EQ(Difference(given, peer, {1e-9, 1e-9}), "");
      continue;
    }
    EXPECT_EQ(given["scheduler_steps"].back(), last);
    EXPECT_NEAR(given["lr"].back().get<double>(), 8e-7, 1e-12);
    for (size_t i = 0; peer["scheduler_steps"][i] <= last; ++i) {
      EXPECT_NEAR(given["lr"][i].get<double>(), peer["lr"][i].get<double>(), 1e-9);
    }
  }
}

// The file counts in cases in which the peer ignores it; what the peer crashes on is read as it is
// meant.
TEST(Quirks, D26_ConfigYaml_TheFileCountsAndEveryProcessStarts) {
  for (const Json& quirk : Quirks("config_yaml")) {
    const std::string label = quirk["in"]["label"];
    SCOPED_TRACE(label);
    if (label == "parallelism with fsdp version 1 from flags") {
      EXPECT_THROW(AnswerTo(quirk), std::exception);
      continue;
    }
    const Json given = AnswerTo(quirk);
    if (label == "multi cpu") {
      ASSERT_EQ(given["processes"].size(), 2u);
      EXPECT_EQ(given["processes"][1]["RANK"], "1");
    } else if (label == "c10d in the file") {
      EXPECT_EQ(given["torchrun"]["rdzv_backend"], "c10d");
    } else if (label == "same network in the file") {
      EXPECT_EQ(given["torchrun"]["master_addr"], "10.0.0.1");
      EXPECT_EQ(given["torchrun"]["master_port"], "29576");
    } else if (label == "affinity in the file") {
      EXPECT_EQ(given["processes"][0]["ACCELERATE_CPU_AFFINITY"], "1");
    } else if (label == "unquoted no") {
      EXPECT_EQ(given["processes"][0]["ACCELERATE_MIXED_PRECISION"], "no");
    } else if (label == "unquoted distributed type") {
      EXPECT_EQ(given["processes"].size(), 1u);
      EXPECT_EQ(given["processes"][0]["ACCELERATE_MIXED_PRECISION"], "fp16");
    } else {
      ADD_FAILURE() << "no decision for " << quirk["id"];
    }
  }
}

std::string ErrorOf(const Json& quirk) {
  try {
    return "accepted: " + AnswerTo(quirk).dump();
  } catch (const std::exception& error) {
    return error.what();
  }
}

// A strategy that was chosen counts, and nothing is silently dropped.
TEST(Quirks, FsdpConfig_WhatWasChosenCountsOrIsRefusedByName) {
  for (const Json& quirk : Quirks("fsdp_config")) {
    const std::string id = quirk["id"];
    SCOPED_TRACE(id);
    const std::string number = id.substr(id.rfind('/') + 1);
    if (number == "s001" || number == "s002") {
      EXPECT_EQ(AnswerTo(quirk)["sharding_strategy"], quirk["recommended"]);
    } else if (number == "s003") {
      EXPECT_NE(ErrorOf(quirk).find("fsdp_version 3 does not exist"), std::string::npos);
    } else if (number == "s004") {
      EXPECT_EQ(ErrorOf(quirk).find("sharding_strategy"), 0u);
    } else if (number == "s005") {
      EXPECT_EQ(ErrorOf(quirk).find("FSDP_FORWARD_PREFETCH"), 0u);
    } else if (number == "s006") {
      const Json given = AnswerTo(quirk);
      EXPECT_EQ(given["state_dict_config"]["class"], "FullStateDictConfig");
      EXPECT_EQ(given["optim_state_dict_config"]["rank0_only"], true);
    } else if (number == "s007") {
      EXPECT_NE(ErrorOf(quirk).find("NO_PREFETCH"), std::string::npos);
    } else if (number == "s008") {
      EXPECT_EQ(AnswerTo(quirk)["fsdp_version"], 2);
    } else if (number == "s009") {
      EXPECT_EQ(AnswerTo(quirk)["transformer_cls_names_to_wrap"],
                Json({"BertLayer", "BertPooler"}));
    } else if (number == "s010") {
      EXPECT_EQ(AnswerTo(quirk), quirk["hf"]);
    } else {
      ADD_FAILURE() << "no decision for " << id;
    }
  }
}

// A value in the config wins over the program, but an absent one does not, and nothing is clipped
// without a request.
TEST(Quirks, DeepSpeedConfig_TheProgramCountsWhereTheConfigIsSilent) {
  for (const Json& quirk : Quirks("deepspeed_config")) {
    const std::string label = quirk["in"]["label"];
    SCOPED_TRACE(label);
    if (label == "accumulation in the code only") {
      EXPECT_EQ(AnswerTo(quirk)["gradient_accumulation_steps"], 4);
    } else if (label == "total batch size in the config") {
      EXPECT_NE(ErrorOf(quirk).find("train_batch_size is 7"), std::string::npos);
    } else if (label == "clipping nobody asked for") {
      EXPECT_FALSE(AnswerTo(quirk)["config"].contains("gradient_clipping"));
    } else if (label == "auto accumulation from the environment") {
      EXPECT_EQ(AnswerTo(quirk)["config"]["gradient_accumulation_steps"], 1);
    } else {
      ADD_FAILURE() << "no decision for " << quirk["id"];
    }
  }
}

// Limits for the disk, and device numbers with gaps, with which the peer fails, give a map like
// others.
TEST(Quirks, BalancedMemory_DiskAndGapsInTheNumbers_AreBalanced) {
  for (const Json& quirk : Quirks("balanced_memory")) {
    SCOPED_TRACE(quirk["id"]);
    const Json limits = AnswerTo(quirk)["max_memory"];
    ASSERT_EQ(limits.size(), quirk["in"]["max_memory"].size());
    for (size_t i = 0; i < limits.size(); ++i) {
      EXPECT_EQ(limits[i][0], quirk["in"]["max_memory"][i][0]);
      EXPECT_LE(limits[i][1], quirk["in"]["max_memory"][i][1]);
    }
  }
}

// Every tensor has a device: also the buffers of divided modules, tied parameters whose owner is
// elsewhere, and modules whose names begin alike. Booleans take a byte.
TEST(Quirks, D15_InferAutoDeviceMap_EveryTensorHasADevice) {
  for (const Json& quirk : Quirks("infer_auto_device_map")) {
    SCOPED_TRACE(quirk["id"]);
    const Json map = AnswerTo(quirk)["device_map"];
    const std::function<void(const Json&, const std::string&)> check = [&](const Json& tree,
                                                                           const std::string& at) {
      for (const char* part : {"params", "buffers"}) {
        for (const Json& tensor : tree.value(part, Json::array())) {
          const std::string name = at + tensor["name"].get<std::string>();
          EXPECT_EQ(std::count_if(map.begin(), map.end(),
                                  [&](const Json& entry) {
                                    const std::string module = entry[0];
                                    return module.empty() || module == name ||
                                           name.rfind(module + ".", 0) == 0;
                                  }),
                    1)
              << name;
        }
      }
      for (const Json& child : tree.value("children", Json::array())) {
        check(child, at + child["name"].get<std::string>() + ".");
      }
    };
    check(quirk["in"]["tree"], "");
  }
}

// {"name": ..., "class": ..., "params": one of so many float32} or with more of the kind in it.
Json ModuleWith(const char* name, const std::vector<std::pair<const char*, int>>& params,
                const std::vector<Json>& children = {}) {
  Json module = {{"name", name}, {"class", "Part"}, {"children", children}};
  for (const auto& [param, size] : params) {
    module["params"].push_back({{"name", param}, {"dtype", "F32"}, {"shape", {size}}});
  }
  return module;
}

Json MapOf(const std::vector<Json>& children, const std::vector<std::string>& tied, int limit) {
  return AnswerTo({{"kind", "infer_auto_device_map"},
                   {"in",
                    {{"tree", {{"class", "Net"}, {"children", children}}},
                     {"tied", Json::array({tied})},
                     {"max_memory", Json::array({Json::array({0, limit}), Json::array({1, 200}),
                                                 Json::array({"cpu", 1000})})},
                     {"no_split_module_classes", nullptr},
                     {"dtype", nullptr},
                     {"special_dtypes", nullptr},
                     {"offload_buffers", false},
                     {"fallback_allocation", false},
                     {"clean_result", false}}}})["device_map"];
}

// Accelerate looks for the name of a module anywhere in that of a tied tensor, and takes
// decoder.emb.weight for one inside of emb: it continues without its partner, and ends with "list
// index out of range", or leaves one tensor on two devices.
TEST(Quirks, TiedTensorsOfNamesWithinOneAnother_AreTogether) {
  EXPECT_EQ(MapOf({ModuleWith("emb", {{"weight", 10}}),
                   ModuleWith("decoder", {},
                              {ModuleWith("emb", {{"weight", 10}}),
                               ModuleWith("layer", {{"weight", 20}})})},
                  {"emb.weight", "decoder.emb.weight"}, 160),
            Json::parse(R"([["emb", 0], ["decoder.emb", 0], ["decoder.layer", 0]])"));
}

// The peer's error also comes if a divided module has tied tensors of its own.
TEST(Quirks, TiedTensorsOfADividedModule_AreTogether) {
  EXPECT_EQ(
      MapOf({ModuleWith("cell", {{"w0", 10}, {"w1", 10}}, {ModuleWith("proj", {{"weight", 25}})}),
             ModuleWith("head", {{"weight", 25}})},
            {"cell.w0", "cell.w1"}, 150),
      Json::parse(R"([["cell.w0", 0], ["cell.w1", 0], ["cell.proj", 1], ["head", 1]])"));
}

// Nothing is silently dropped, and added tokens are their own text. If the recorded cases have the
// peer's behavior too (s006 to s008), equal tokens and texts count more than better ones.
TEST(Quirks, HfTokenizer_NothingIsLostInSilence) {
  for (Json quirk : Quirks("hf_tokenizer")) {
    const std::string id = quirk["id"];
    SCOPED_TRACE(id);
    const std::string number = id.substr(id.rfind('/') + 1);
    Json& in = quirk["in"];
    if (number == "s001") {
      const std::string error = ErrorOf(quirk);
      EXPECT_NE(error.find("max_length is 1"), std::string::npos) << error;
      EXPECT_NE(error.find("2 special tokens"), std::string::npos) << error;
    } else if (number == "s002" || number == "s003") {
      const std::vector<int64_t> ids = AnswerTo(quirk)["ids"];
      EXPECT_EQ(Json(ids), quirk["hf"]["ids"]);
      const Tokenizer tokenizer =
          ValueOf(Tokenizer::FromFile(testing_support::GoldenPath(in["tokenizer"])));
      EXPECT_EQ(ValueOf(tokenizer.Decode(ids)), in["text"]);
      EXPECT_EQ(tokenizer.IdToToken(ids[0]), in["text"]);
    } else if (number == "s004") {
      const std::string error = ErrorOf(quirk);
      EXPECT_NE(error.find("id 1205"), std::string::npos) << error;
    } else if (number == "s005") {
      // A text that needs no truncation.
      in["mode"] = "batch";
      in["texts"] = {"a"};
      in["add_special_tokens"] = true;
      in["padding"] = nullptr;
      in["truncation"]["strategy"] = "longest_first";
      in["truncation"]["direction"] = "right";
      const std::string error = ErrorOf(quirk);
      EXPECT_NE(error.find("a stride of 2"), std::string::npos) << error;
    } else if (number == "s006") {
      EXPECT_EQ(AnswerTo(quirk)["text"], quirk["hf"]["text"]);
    } else if (number == "s007" || number == "s008") {
      const Json given = AnswerTo(quirk);
      for (const auto& [name, value] : quirk["hf"].items()) EXPECT_EQ(given[name], value) << name;
    } else {
      ADD_FAILURE() << "no decision for " << id;
    }
  }
}

}  // namespace
}  // namespace muster::conformance
