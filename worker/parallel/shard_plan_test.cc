#include "worker/parallel/shard_plan.h"

#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    first = register_module("first", torch::nn::Linear(4, 8));
    second = register_module("second", torch::nn::Linear(8, 4));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Layer);

struct Net : torch::nn::Module {
  Net() {
    words = register_module("words", torch::nn::Embedding(10, 4));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) layers->push_back(Layer());
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 10).bias(false)));
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::Linear head{nullptr};
};

std::vector<NamedParameter> ParametersOf(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters())
    parameters.push_back({item.key(), item.value()});
  return parameters;
}

// Returns texts such as "unit: parameter parameter".
std::vector<std::string> Plan(torch::nn::Module& module, const ShardingOptions& options) {
  std::vector<std::string> lines;
  for (const PlannedUnit& unit : PlanUnits(&module, ParametersOf(module), options)) {
    lines.push_back(unit.name + ":");
    for (const NamedParameter& parameter : unit.parameters) lines.back() += " " + parameter.name;
  }
  return lines;
}

const char kLayer0[] =
    "layers.0: layers.0.first.weight layers.0.first.bias layers.0.second.weight "
    "layers.0.second.bias";
const char kLayer1[] =
    "layers.1: layers.1.first.weight layers.1.first.bias layers.1.second.weight "
    "layers.1.second.bias";

TEST(UnitModules, AreThoseOfTheRule) {
  Net net;
  EXPECT_THAT(UnitModules(net, {}), ElementsAre("layers.0", "layers.1"));
  EXPECT_THAT(UnitModules(net, {.unit_names = {"head"}}), ElementsAre("head"));
  EXPECT_THAT(ModulesOfTypes(net, {"LayerImpl"}, "option"), ElementsAre("layers.0", "layers.1"));
  EXPECT_THAT(
      ErrorOf([&] { ModulesOfTypes(net, {"Block"}, "the.option"); }),
      AllOf(HasSubstr("the.option: the model has no module of class 'Block'"), HasSubstr("Layer")));
}

TEST(PlanUnits, WithoutARule_TakesTheEntriesOfLists) {
  Net net;
  EXPECT_THAT(Plan(net, {}), ElementsAre(kLayer0, kLayer1, "(rest): words.weight head.weight"));
}

TEST(PlanUnits, TypesWithOrWithoutImpl_AreUnits) {
  Net net;
  for (const char* type : {"Layer", "LayerImpl", "muster::LayerImpl"}) {
    EXPECT_THAT(Plan(net, {.unit_types = {type}}),
                ElementsAre(kLayer0, kLayer1, "(rest): words.weight head.weight"));
  }
}

TEST(PlanUnits, NestedUnits_AParameterBelongsToTheInnermost) {
  Net net;
  EXPECT_THAT(
      Plan(net, {.unit_names = {"layers.0", "layers.0.second", "words"}}),
      ElementsAre("words: words.weight", "layers.0: layers.0.first.weight layers.0.first.bias",
                  "layers.0.second: layers.0.second.weight layers.0.second.bias",
                  "(rest): layers.1.first.weight layers.1.first.bias "
                  "layers.1.second.weight layers.1.second.bias head.weight"));
}

TEST(PlanUnits, BySize_TakesTheSmallestModulesThatReachIt) {
  Net net;
  EXPECT_THAT(Plan(net, {.min_unit_parameters = 70}),
              ElementsAre(kLayer0, kLayer1, "(rest): words.weight head.weight"));
  // The first of the linear layers has 40 parameters and the second 36.
  EXPECT_THAT(
      Plan(net, {.min_unit_parameters = 40}),
      ElementsAre("words: words.weight",
                  "layers.0.first: layers.0.first.weight layers.0.first.bias",
                  "layers.1.first: layers.1.first.weight layers.1.first.bias", "head: head.weight",
                  "(rest): layers.0.second.weight layers.0.second.bias "
                  "layers.1.second.weight layers.1.second.bias"));
}

TEST(PlanUnits, TiedWeight_CountsWhereItOccursFirst) {
  Net net;
  net.head->weight = net.words->weight;
  net.head->parameters();  // as registered
  std::vector<NamedParameter> parameters = ParametersOf(net);
  parameters.back().tensor = parameters.front().tensor;
  EXPECT_EQ(PlanUnits(&net, parameters, {}).back().parameters.size(), 1U);
}

TEST(PlanUnits, DifferentDtypes_AreUnitsOfTheirOwn) {
  Net net;
  net.layers[0]->as<LayerImpl>()->second->to(at::kBFloat16);
  EXPECT_THAT(Plan(net, {}), ElementsAre("layers.0: layers.0.first.weight layers.0.first.bias",
                                         "layers.0: layers.0.second.weight layers.0.second.bias",
                                         kLayer1, "(rest): words.weight head.weight"));
}

// A block that contains a list, as a mixture of experts does.
struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    gate = register_module("gate", torch::nn::Linear(torch::nn::LinearOptions(4, 2).bias(false)));
    experts = register_module("experts", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) experts->push_back(Layer());
  }
  torch::nn::Linear gate{nullptr};
  torch::nn::ModuleList experts{nullptr};
};
TORCH_MODULE(Mixture);

struct Mixtures : torch::nn::Module {
  Mixtures() {
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(Mixture());
    last = register_module("last", Layer());
  }
  torch::nn::ModuleList blocks{nullptr};
  Layer last{nullptr};
};

std::set<std::string> Modules(const ShardingOptions& options) {
  return UnitModules(Mixtures(), options);
}

TEST(NoSplit, ModuleIsTheUnitInPlaceOfThoseInIt) {
  EXPECT_THAT(Modules({}), ElementsAre("blocks.0", "blocks.0.experts.0", "blocks.0.experts.1",
                                       "blocks.1", "blocks.1.experts.0", "blocks.1.experts.1"));
  for (const char* type : {"Mixture", "MixtureImpl"}) {
    EXPECT_THAT(Modules({.no_split = {type}}), ElementsAre("blocks.0", "blocks.1")) << type;
  }
  EXPECT_THAT(Modules({.no_split = {"blocks.1"}}),
              ElementsAre("blocks.0", "blocks.0.experts.0", "blocks.0.experts.1", "blocks.1"));
  // A list is a unit if it is named, and the outermost name counts.
  EXPECT_THAT(Modules({.no_split = {"blocks.0.experts"}}),
              ElementsAre("blocks.0", "blocks.0.experts", "blocks.1", "blocks.1.experts.0",
                          "blocks.1.experts.1"));
  EXPECT_THAT(Modules({.no_split = {"blocks", "blocks.0.experts", "Layer"}}),
              ElementsAre("blocks"));
  // Modules without units inside stay unchanged.
  EXPECT_EQ(Modules({.no_split = {"last"}}), Modules({}));
}

TEST(NoSplit, ComposesWithEveryRule) {
  // A mixture has 160 parameters, 8 of them in its gate.
  EXPECT_THAT(Modules({.min_unit_parameters = 70, .no_split = {"Mixture"}}),
              ElementsAre("blocks.0", "blocks.1", "last"));
  EXPECT_THAT(Modules({.min_unit_parameters = 70}),
              ElementsAre("blocks.0.experts.0", "blocks.0.experts.1", "blocks.1.experts.0",
                          "blocks.1.experts.1", "last"));
  EXPECT_THAT(Modules({.min_unit_parameters = 161, .no_split = {"blocks"}}), ElementsAre("blocks"));
  EXPECT_THAT(Modules({.unit_types = {"Layer"}, .no_split = {"Mixture"}}),
              ElementsAre("blocks.0", "blocks.1", "last"));
  EXPECT_THAT(Modules({.unit_names = {"blocks.0", "last"}, .no_split = {"Mixture"}}),
              ElementsAre("blocks.0", "last"));
}

TEST(NoSplit, ThatMatchesNothingOrContradictsTheUnits_IsRefusedByName) {
  const auto error = [](const ShardingOptions& options) {
    return ErrorOf([&] { Modules(options); });
  };
  EXPECT_THAT(error({.no_split = {"Mixture", "Blok"}}),
              AllOf(HasSubstr("options.sharding.no_split: the model has no module of class or name "
                              "'Blok'"),
                    HasSubstr("Mixture")));
  EXPECT_THAT(error({.unit_names = {"blocks.1.experts.0"}, .no_split = {"Mixture"}}),
              AllOf(HasSubstr("unit_names: 'blocks.1.experts.0' is inside of 'blocks.1'"),
                    HasSubstr("options.sharding.no_split")));
  EXPECT_THAT(error({.unit_types = {"Layer", "Mixture"}, .no_split = {"blocks", "last"}}),
              AllOf(HasSubstr("unit_types: all modules of class 'Mixture'"), HasSubstr("'blocks'"),
                    HasSubstr("options.sharding.no_split")));
  EXPECT_THAT(error({.unit_types = {"Linear"}, .no_split = {"blocks", "last"}}),
              HasSubstr("all modules of class 'Linear'"));
  Net net;
  EXPECT_THAT(ErrorOf([&] { PlanUnits(nullptr, ParametersOf(net), {.no_split = {"Layer"}}); }),
              AllOf(HasSubstr("TorchScript"), HasSubstr("no_split")));
}

TEST(IgnoredParameters, AreUnitsOfTheirOwnAtTheEnd) {
  Net net;
  const std::vector<PlannedUnit> units =
      PlanUnits(&net, ParametersOf(net), {.ignored_parameters = "words.*|layers\\.1\\..*bias"});
  EXPECT_THAT(Plan(net, {.ignored_parameters = "words.*|layers\\.1\\..*bias"}),
              ElementsAre(kLayer0, "layers.1: layers.1.first.weight layers.1.second.weight",
                          "(rest): head.weight",
                          "(ignored): words.weight layers.1.first.bias layers.1.second.bias"));
  EXPECT_TRUE(units.back().whole);
  EXPECT_FALSE(units.front().whole);
  // Together with ignored modules; and a TorchScript model has names of parameters, too.
  EXPECT_THAT(Plan(net, {.ignored_modules = "layers\\.0", .ignored_parameters = "head.weight"})[2],
              HasSubstr("(ignored): layers.0.first.weight"));
  EXPECT_EQ(PlanUnits(nullptr, ParametersOf(net), {.ignored_parameters = ".*bias"}).size(), 2U);
}

TEST(IgnoredParameters, TiedWeight_IsIgnoredUnderAnyOfItsNames) {
  Net net;
  std::vector<NamedParameter> parameters = ParametersOf(net);
  parameters.back().tensor = parameters.front().tensor;
  const ShardingOptions by_name = {.ignored_parameters = "head\\.weight"};
  const ShardingOptions by_module = {.ignored_modules = "head"};
  for (const ShardingOptions& options : {by_name, by_module}) {
    const std::vector<PlannedUnit> units = PlanUnits(&net, parameters, options);
    EXPECT_TRUE(units.back().whole);
    EXPECT_EQ(units.back().parameters.size(), 1U);
    EXPECT_EQ(units.back().parameters[0].name, "words.weight");
  }
}

TEST(IgnoredParameters, ThatAreNone_AreRefused) {
  Net net;
  EXPECT_THAT(ErrorOf([&] { Plan(net, {.ignored_parameters = "bias"}); }),
              AllOf(HasSubstr("ignored_parameters: no parameter's name is 'bias'"),
                    HasSubstr("layers.0.first.bias")));
  EXPECT_THAT(ErrorOf([&] { Plan(net, {.ignored_parameters = "("}); }),
              HasSubstr("ignored_parameters: '(' is no regular expression"));
}

TEST(PlanUnits, RuleThatMatchesNothing_NamesWhatThereIs) {
  Net net;
  EXPECT_THAT(ErrorOf([&] { Plan(net, {.unit_types = {"Block"}}); }),
              AllOf(HasSubstr("no module of class 'Block'"), HasSubstr("Layer, Linear")));
  EXPECT_THAT(ErrorOf([&] { Plan(net, {.unit_names = {"layers.7"}}); }),
              AllOf(HasSubstr("no module 'layers.7'"), HasSubstr("layers.1")));
  EXPECT_THAT(ErrorOf([&] { Plan(net, {.min_unit_parameters = 1000}); }), HasSubstr("1000"));
  EXPECT_THAT(ErrorOf([&] { Plan(net, {.unit_types = {"Layer"}, .unit_names = {"words"}}); }),
              HasSubstr("exclude each other"));
  EXPECT_THAT(ErrorOf([&] { PlanUnits(nullptr, ParametersOf(net), {.unit_types = {"Layer"}}); }),
              HasSubstr("TorchScript"));
}

TEST(ParseSharding, Names_AreUnderstood) {
  EXPECT_EQ(ParseSharding("zero2", 8).strategy, ShardingStrategy::kGradients);
  EXPECT_EQ(ParseSharding("hybrid", 8).group_size, 8);
  EXPECT_THAT(ErrorOf([] { ParseSharding("zero4", 8); }), HasSubstr("zero4"));
}

}  // namespace
}  // namespace muster
