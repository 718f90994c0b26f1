#include "worker/checkpoint/pickled_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Little(uint64_t value, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i, value >>= 8) bytes += static_cast<char>(value & 0xff);
  return bytes;
}

// Returns the instructions of a pickle, as Python writes them.
std::string Text(const std::string& text) { return "X" + Little(text.size(), 4) + text; }
std::string Int(uint64_t value) { return "\x8a\x08" + Little(value, 8); }
std::string Global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
std::string Tuple(const std::vector<uint64_t>& values) {
  std::string bytes = "(";
  for (const uint64_t value : values) bytes += Int(value);
  return bytes + "t";
}
std::string Storage(const std::string& type, const std::string& key, uint64_t elements) {
  return "(" + Text("storage") + Global("torch", type) + Text(key) + Text("cpu") + Int(elements) +
         "tQ";
}
std::string Tensor(const std::string& storage, uint64_t offset, const std::vector<uint64_t>& shape,
                   const std::vector<uint64_t>& strides) {
  return Global("torch._utils", "_rebuild_tensor_v2") + "(" + storage + Int(offset) + Tuple(shape) +
         Tuple(strides) + "\x89" + Global("collections", "OrderedDict") + ")R" + "tR";
}
std::string Pickle(const std::string& value) { return "\x80\x02" + value + "."; }
std::string Dict(const std::string& items) { return "}(" + items + "u"; }

absl::StatusOr<std::vector<PickledTensor>> Parse(const std::string& pickle) {
  return ParsePickledTensors(pickle, "m.bin");
}

std::string ErrorOf(const std::string& pickle) {
  return std::string(Parse(pickle).status().message());
}

TEST(PickledTensors, StateDict_GivesViewsInOrder) {
  const auto tensors =
      Parse(Pickle(Dict(Text("b") + Tensor(Storage("FloatStorage", "0", 12), 2, {2, 3}, {1, 2}) +
                        Text("a") + Tensor(Storage("LongStorage", "1", 1), 0, {}, {}))));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2u);
  const PickledTensor& b = (*tensors)[0];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.storage, "0");
  EXPECT_EQ(b.storage_bytes, 48u);
  EXPECT_EQ(b.type, SafetensorsType::kF32);
  EXPECT_EQ(b.offset, 2u);
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_THAT(b.strides, ElementsAre(1, 2));
  EXPECT_EQ(b.extent_bytes, 24u);
  EXPECT_EQ((*tensors)[1].name, "a");
  EXPECT_THAT((*tensors)[1].shape, IsEmpty());
  EXPECT_EQ((*tensors)[1].extent_bytes, 8u);
}

// Python keeps attributes that a program has set on a parameter.
TEST(PickledTensors, ParametersWithAttributes_AreTheirTensors) {
  const auto tensors = Parse(Pickle(
      Dict(Text("w") + Global("torch._utils", "_rebuild_parameter_with_state") + "(" +
           Tensor(Storage("FloatStorage", "0", 4), 0, {4}, {1}) + "\x88" +
           Global("collections", "OrderedDict") + ")R" + Dict(Text("tag") + Int(5)) + "tR")));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 1u);
  EXPECT_EQ((*tensors)[0].name, "w");
  EXPECT_THAT((*tensors)[0].shape, ElementsAre(4));
}

// The pickle of a tensor that has attributes, or was made by torch.nn.Buffer.
TEST(PickledTensors, TensorsWithAttributes_AreTheirTensors) {
  const std::string rebuild = Global("torch._tensor", "_rebuild_from_type_v2");
  const std::string make = Global("torch._utils", "_rebuild_tensor_v2");
  const std::string arguments = "(" + Storage("FloatStorage", "0", 12) + Int(2) + Tuple({2, 3}) +
                                Tuple({1, 2}) + "\x89" + Global("collections", "OrderedDict") +
                                ")Rt";
  const auto tensor = [&](const std::string& type, const std::string& state) {
    return rebuild + "(" + make + type + arguments + state + "tR";
  };
  const std::string plain = Global("torch", "Tensor");
  const std::string tagged = Dict(Text("tag") + Int(5));
  for (const std::string& type : {plain, Global("torch.nn.parameter", "Parameter")}) {
    for (const std::string& state : {tagged, std::string("}"), std::string("N")}) {
      const auto tensors = Parse(Pickle(Dict(Text("w") + tensor(type, state))));
      ASSERT_TRUE(tensors.ok()) << tensors.status();
      ASSERT_EQ(tensors->size(), 1u);
      EXPECT_EQ((*tensors)[0].name, "w");
      EXPECT_EQ((*tensors)[0].offset, 2u);
      EXPECT_THAT((*tensors)[0].shape, ElementsAre(2, 3));
      EXPECT_THAT((*tensors)[0].strides, ElementsAre(1, 2));
    }
  }
  EXPECT_THAT(ErrorOf(Pickle(tensor(Global("my.quantized", "Tensor"), tagged))),
              HasSubstr("my.quantized.Tensor, which is refused"));
  EXPECT_THAT(ErrorOf(Pickle(tensor(make, tagged))), HasSubstr("not a class of dense tensors"));
  EXPECT_THAT(ErrorOf(Pickle(tensor(plain, Text("state")))), HasSubstr("not a dictionary"));
  EXPECT_THAT(ErrorOf(Pickle(rebuild + "(" + make + plain + "tR")),
              HasSubstr("as torch.save does"));
  for (const std::string& function : {rebuild, Global("collections", "OrderedDict")}) {
    EXPECT_THAT(ErrorOf(Pickle(rebuild + "(" + function + plain + arguments + "}tR")),
                HasSubstr("what makes dense tensors"));
  }
}

TEST(PickledTensors, NestedContainers_GiveDottedNames) {
  const std::string tensor = Tensor(Storage("HalfStorage", "0", 4), 0, {4}, {1});
  const auto tensors =
      Parse(Pickle(Dict(Text("model") + Dict(Text("w") + tensor) + Text("epoch") + Int(3) +
                        Text("list") + "](" + tensor + "N" + tensor + "e" + Int(7) + tensor)));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  std::vector<std::string> names;
  for (const PickledTensor& found : *tensors) names.push_back(found.name);
  EXPECT_THAT(names, ElementsAre("model.w", "list.0", "list.2", "7"));
}

// A MultiStepLR holds its milestones like this, beside the weights of a training checkpoint.
TEST(PickledTensors, Counters_AreDictionaries) {
  const std::string counter = Global("collections", "Counter");
  const std::string tensor = Tensor(Storage("ByteStorage", "0", 1), 0, {1}, {1});
  const auto tensors = Parse(Pickle(
      Dict(Text("milestones") + counter + Dict(Int(3) + Int(1) + Int(5) + Int(1)) + "\x85R" +
           Text("counted") + counter + Dict(Text("t") + tensor) + "\x85R" + Text("w") + tensor)));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2u);
  EXPECT_EQ((*tensors)[0].name, "counted.t");
  EXPECT_EQ((*tensors)[1].name, "w");
  EXPECT_THAT(ErrorOf(Pickle(counter + "(" + Int(3) + "tR")), HasSubstr("collections.Counter"));
  EXPECT_THAT(ErrorOf(Pickle(counter + ")R")), HasSubstr("collections.Counter"));
}

TEST(PickledTensors, AnyOtherName_IsRefusedAndNamed) {
  EXPECT_THAT(ErrorOf(Pickle(Dict(Text("w") + Global("os", "system") + "(" + Text("id") + "tR"))),
              HasSubstr("m.bin: byte 10: the pickle names os.system, which is refused"));
  for (const auto& [module, name] :
       std::vector<std::pair<std::string, std::string>>{{"builtins", "eval"},
                                                        {"torch", "load"},
                                                        {"torch._utils", "_rebuild_sparse_tensor"},
                                                        {"torch", "QInt8Storage"},
                                                        {"numpy.core.multiarray", "_reconstruct"},
                                                        {"collections", "OrderedDict.__class__"},
                                                        {"", ""}}) {
    EXPECT_THAT(ErrorOf(Pickle(Global(module, name))), HasSubstr(module + "." + name)) << name;
    EXPECT_THAT(ErrorOf("\x80\x04" + Text(module) + Text(name) + "\x93."),
                HasSubstr(module + "." + name));
  }
}

TEST(PickledTensors, TypesThatAreNotRead_AreNotCalledExecutable) {
  for (const std::string name : {"ComplexDoubleStorage", "complex128", "complex32"}) {
    EXPECT_THAT(ErrorOf(Pickle(Dict(Text("w") + Global("torch", name)))),
                HasSubstr("names torch." + name + ", a type that is not read, nor held by"));
  }
}

TEST(PickledTensors, InstructionsThatMakeObjects_AreRefused) {
  // OBJ, INST, NEWOBJ, NEWOBJ_EX, EXT1, PERSID, and instructions of protocols 0 and 1.
  for (const std::string opcode : {"o", "i", "\x81", "\x92", "\x82", "P", "I", "S", "V", "g"}) {
    EXPECT_THAT(ErrorOf(Pickle("N" + opcode)), HasSubstr("is refused")) << opcode;
  }
  EXPECT_THAT(ErrorOf("\x80\x01N."), HasSubstr("protocol 1"));
  EXPECT_THAT(ErrorOf("\x80\x06N."), HasSubstr("protocol 6"));
  EXPECT_THAT(ErrorOf("(dp0\n."), HasSubstr("protocol 0 or 1, which are not read: save it again"));
}

TEST(PickledTensors, ConjugatedOrNegatedViews_AreRefused) {
  // Arguments of _rebuild_tensor_v2, the last of which is the tensor's metadata.
  const auto parse = [](const std::string& metadata) {
    return ErrorOf(
        Pickle(Dict(Text("w") + Global("torch._utils", "_rebuild_tensor_v2") + "(" +
                    Storage("ComplexFloatStorage", "0", 2) + Int(0) + Tuple({2}) + Tuple({1}) +
                    "\x89" + Global("collections", "OrderedDict") + ")R" + metadata + "tR")));
  };
  EXPECT_EQ(parse(""), "");
  EXPECT_EQ(parse("N"), "");
  EXPECT_EQ(parse("}"), "");
  for (const char* flag : {"conj", "neg"}) {
    EXPECT_THAT(parse(Dict(Text(flag) + "\x88")),
                HasSubstr("a tensor is a conjugated or negated view of its storage: save it after "
                          ".resolve_conj().resolve_neg()"));
  }
}

TEST(PickledTensors, TensorsThatLeaveTheirStorage_AreRefused) {
  const auto error = [](uint64_t elements, uint64_t offset, const std::vector<uint64_t>& shape,
                        const std::vector<uint64_t>& strides) {
    return ErrorOf(Pickle(
        Dict(Text("w") + Tensor(Storage("FloatStorage", "0", elements), offset, shape, strides))));
  };
  constexpr uint64_t kHuge = uint64_t{1} << 62;
  EXPECT_EQ(error(6, 0, {2, 3}, {3, 1}), "");
  EXPECT_EQ(error(6, 5, {1, 1}, {kHuge, kHuge}), "");
  EXPECT_EQ(error(6, 0, {0, 3}, {kHuge, 1}), "");
  EXPECT_THAT(error(5, 0, {2, 3}, {3, 1}), HasSubstr("leaves its storage \"0\""));
  EXPECT_THAT(error(6, 1, {2, 3}, {3, 1}), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(6, kHuge, {1}, {1}), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(6, 0, {3, 3}, {kHuge, kHuge}), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(0, 0, {}, {}), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(6, 0, {kHuge, 4}, {0, 0}), HasSubstr("shape is too large"));
  EXPECT_THAT(error(kHuge, 0, {1}, {1}), HasSubstr("storage is too large"));
  EXPECT_THAT(error(6, 0, {6}, {}), HasSubstr("differ in length"));
  EXPECT_THAT(error(6, ~uint64_t{0}, {1}, {1}), HasSubstr("offset"));
  EXPECT_THAT(error(6, 0, {2}, {~uint64_t{0}}), HasSubstr("strides"));
  EXPECT_THAT(error(6, 0, std::vector<uint64_t>(65, 1), std::vector<uint64_t>(65, 1)),
              HasSubstr("65 dimensions"));
}

TEST(PickledTensors, ManyTinyInstructions_MeetALimitNotTheMemory) {
  EXPECT_THAT(ErrorOf("\x80\x02" + std::string(10'000'000, ']')), HasSubstr("values allowed"));
  EXPECT_THAT(ErrorOf("\x80\x02" + std::string(1'000'000, '(')), HasSubstr("nested too deep"));
  // A list that is copied again and again.
  std::string copies = "\x80\x02](" + std::string(1'000'000, 'N') + "eq\x01";
  for (int i = 0; i < 20; ++i) copies += Global("torch", "Size") + "h\x01\x85R";
  EXPECT_THAT(ErrorOf(copies), HasSubstr("items allowed"));
  // Each list holds the previous one twice: 2^60 places.
  std::string tree = "]q" + Little(0, 1);
  for (int i = 0; i < 60; ++i) {
    tree += "](h" + Little(i, 1) + "h" + Little(i, 1) + "eq" + Little(i + 1, 1);
  }
  EXPECT_THAT(ErrorOf(Pickle("(" + tree + "l")), HasSubstr("times allowed"));
  // A list that holds itself.
  EXPECT_THAT(ErrorOf(Pickle("]q" + Little(0, 1) + "h" + Little(0, 1) + "a")),
              HasSubstr("nested deeper"));
  // Recursion would need 300 MB of stack.
  std::string deep;
  for (int i = 0; i < 200'000; ++i) deep += "]";
  deep += std::string(199'999, 'a');
  EXPECT_THAT(ErrorOf(Pickle(deep)), HasSubstr("nested deeper"));
  EXPECT_THAT(ErrorOf(std::string(kMaxPickleBytes + 1, 'N')), HasSubstr("more than"));
}

TEST(PickledTensors, TensorsOfManyDimensions_MeetALimitNotTheMemory) {
  const std::vector<uint64_t> ones(64, 1);
  const std::string tensor = Tensor(Storage("FloatStorage", "0", 1), 0, ones, ones);
  // A tensor with many names: 300 KB of pickle would become 300 MB of shapes and strides.
  const auto named = [&](int names) {
    std::string list = "(" + tensor + "q" + Little(0, 1);
    for (int i = 1; i < names; ++i) list += "h" + Little(0, 1);
    return ErrorOf(Pickle(list + "l"));
  };
  EXPECT_EQ(named(100'000), "");
  EXPECT_THAT(named(150'000), HasSubstr("dimensions allowed in all"));
  // Tensors that are made repeatedly, and thrown away.
  const std::string arguments =
      tensor.substr(tensor.find('('), tensor.size() - 1 - tensor.find('('));
  std::string made = "\x80\x02" + Global("torch._utils", "_rebuild_tensor_v2") + "q" +
                     Little(0, 1) + arguments + "q" + Little(1, 1) + "R";
  for (int i = 0; i < 150'000; ++i) made += "0h" + Little(0, 1) + "h" + Little(1, 1) + "R";
  EXPECT_THAT(ErrorOf(made), HasSubstr("dimensions allowed in all"));
}

TEST(PickledTensors, NamesThatCannotBeUsed_AreRefused) {
  const std::string tensor = Tensor(Storage("ByteStorage", "0", 1), 0, {1}, {1});
  EXPECT_THAT(ErrorOf(Pickle(Dict(Text("a.b") + tensor + Text("a") + Dict(Text("b") + tensor)))),
              HasSubstr("\"a.b\" occurs twice"));
  EXPECT_THAT(ErrorOf(Pickle(Dict(Text("\xff") + tensor))), HasSubstr("not UTF-8"));
  EXPECT_THAT(ErrorOf(Pickle(Dict(Text(std::string(5000, 'x')) + tensor))), HasSubstr("longer"));
  EXPECT_THAT(ErrorOf(Pickle(Dict("N" + tensor))), HasSubstr("neither text nor an integer"));
  EXPECT_EQ(ErrorOf(Pickle(Dict("NK\x01"))), "");
  EXPECT_THAT(ErrorOf(Pickle(tensor)), HasSubstr("no dictionary of tensors"));
}

TEST(PickledTensors, CutAnywhere_IsRefused) {
  const std::string pickle =
      Pickle(Dict(Text("w") + Tensor(Storage("FloatStorage", "0", 6), 0, {2, 3}, {3, 1})));
  ASSERT_TRUE(Parse(pickle).ok());
  for (size_t length = 0; length < pickle.size(); ++length) {
    EXPECT_FALSE(Parse(pickle.substr(0, length)).ok()) << length;
  }
  EXPECT_THAT(ErrorOf(pickle + "N"), HasSubstr("something follows"));
}

// Damage of every kind: nothing is read outside of the pickle (under asan), nothing takes long, and
// everything that is accepted lies inside its storage.
TEST(PickledTensors, HundredThousandMutants_AreReadOrRefused) {
  const std::string tensor = Tensor(Storage("FloatStorage", "0", 12), 2, {2, 3}, {1, 2});
  const std::vector<std::string> seeds = {
      Pickle(Dict(Text("w") + tensor)),
      Pickle(Dict(Text("m") + Dict(Text("w") + tensor + Text("v") + tensor) + Int(1) + "](" +
                  tensor + "q\x05" + "h\x05" + "e")),
      "\x80\x04\x95" + Little(40, 8) + Text("a") + "\x94" + Text("b") + "\x94\x86\x94\x85.",
      Pickle(Global("collections", "OrderedDict") + "](" + Text("k") + tensor + "\x86" + "e\x85R" +
             Dict(Text("_metadata") + "}") + "b")};
  const std::string opcodes =
      "().]}l\x85\x86\x87tRQbausde012NqrhjKMJGXU\x88\x89\x8a\x8b\x8c\x93\x94";
  std::mt19937_64 random(7);
  const auto below = [&](size_t limit) { return limit == 0 ? 0 : random() % limit; };
  int accepted = 0;
  for (int i = 0; i < 100'000; ++i) {
    std::string pickle = seeds[below(seeds.size())];
    for (size_t changes = 1 + below(4); changes > 0; --changes) {
      const size_t at = below(pickle.size());
      switch (below(6)) {
        case 0:
          pickle[at] = static_cast<char>(random());
          break;
        case 1:
          pickle[at] ^= static_cast<char>(1 << below(8));
          break;
        case 2:
          pickle.insert(at, 1, opcodes[below(opcodes.size())]);
          break;
        case 3:
          pickle.erase(at, 1 + below(8));
          break;
        case 4:
          pickle.insert(at, pickle.substr(below(pickle.size()), below(40)));
          break;
        case 5:
          pickle.replace(at, 8, Little(random() >> below(64), 8));
          break;
      }
    }
    const auto tensors = Parse(pickle);
    if (!tensors.ok()) continue;
    ++accepted;
    for (const PickledTensor& found : *tensors) {
      const uint64_t begin = found.offset * SafetensorsTypeBits(found.type) / 8;
      if (found.extent_bytes == 0) continue;
      ASSERT_LE(begin, found.storage_bytes);
      ASSERT_LE(found.extent_bytes, found.storage_bytes - begin);
    }
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace muster
