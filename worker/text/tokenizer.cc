#include "worker/text/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/ordered_json.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/encoding_ops.h"
#include "worker/text/folder_tokens.h"
#include "worker/text/older_files.h"
#include "worker/text/tokenizer_core.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxFileBytes = size_t{256} << 20;
// The size limit of a file beside tokenizer.json.
constexpr size_t kMaxSideFileBytes = size_t{16} << 20;
// Below this much text a thread costs more than it saves.
constexpr size_t kMinBytesOfThread = 16 << 10;

absl::StatusOr<Json> ParseFile(absl::string_view json, absl::string_view source) {
  return ParseJson(json, source, {.max_bytes = kMaxFileBytes, .max_depth = 64});
}

// NOT_FOUND means that there was never a file. A dangling link, as a pruned cache of the Hub leaves
// it, is another error, because there was one.
absl::Status RefuseLinkToNothing(const std::string& path) {
  if (!PathExists(path)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(path, " is a link to a file that is not there; download the folder again"));
}

absl::StatusOr<std::optional<std::string>> TextIfThere(const std::string& path,
                                                       size_t max_bytes = kMaxFileBytes) {
  if (!PathExists(path)) return std::nullopt;
  absl::StatusOr<std::string> contents = ReadFile(path, max_bytes);
  if (absl::IsNotFound(contents.status())) MUSTER_RETURN_IF_ERROR(RefuseLinkToNothing(path));
  MUSTER_RETURN_IF_ERROR(contents.status());
  return std::optional<std::string>(*std::move(contents));
}

// Returns null if the file does not exist.
absl::StatusOr<nlohmann::ordered_json> ReadIfThere(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const auto contents, TextIfThere(path, kMaxSideFileBytes));
  if (!contents.has_value()) return nlohmann::ordered_json();
  return ParseOrderedJson(*contents, path, {.max_bytes = kMaxSideFileBytes});
}

absl::StatusOr<Json> ReadConfigIfThere(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const auto contents, TextIfThere(path, kMaxSideFileBytes));
  if (!contents.has_value()) return Json();
  return ParseJson(*contents, path, {.max_bytes = kMaxSideFileBytes});
}

// Makes the contents of tokenizer.json from the files of older folders, which lack it.
absl::Status ReadOlderFiles(text::FolderFiles& files) {
  text::OlderFiles older = {.beside = files};
  const auto in_folder = [&files](const char* name) { return JoinPath(files.folder, name); };
  MUSTER_ASSIGN_OR_RETURN(older.config, ReadConfigIfThere(in_folder("config.json")));
  older.has_tokenizer_model = PathExists(in_folder("tokenizer.model"));
  // Only the class determines what is read, because a file of another class may be anything.
  const std::vector<std::string> names = text::FilesOf(older);
  for (const auto& [name, contents, max_bytes] :
       {std::tuple("vocab.json", &older.vocab_json, kMaxFileBytes),
        {"merges.txt", &older.merges_txt, kMaxFileBytes},
        {"vocab.txt", &older.vocab_txt, kMaxFileBytes},
        {"tokenizer.model", &older.tokenizer_model, kMaxSideFileBytes}}) {
    if (std::find(names.begin(), names.end(), name) == names.end()) continue;
    MUSTER_ASSIGN_OR_RETURN(*contents, TextIfThere(in_folder(name), max_bytes));
  }
  absl::StatusOr<text::OlderTokenizer> made = text::TokenizerOfOlderFiles(older);
  if (absl::IsNotFound(made.status())) {
    return absl::NotFoundError(absl::StrCat(
        files.folder, " has no tokenizer.json, and Muster cannot make it (",
        made.status().message(),
        "); transformers may: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"));
  }
  MUSTER_RETURN_IF_ERROR(made.status());
  files.tokenizer = std::move(made->tokenizer);
  files.tokenizer_config = std::move(made->tokenizer_config);
  files.without_flags = made->without_flags;
  return absl::OkStatus();
}

SpecialTokens RolesOf(const std::map<std::string, std::string>& roles) {
  const auto find = [&roles](const char* name) {
    const auto role = roles.find(name);
    return role == roles.end() ? std::nullopt : std::optional<std::string>(role->second);
  };
  return {.bos = find("bos_token"),
          .eos = find("eos_token"),
          .unk = find("unk_token"),
          .sep = find("sep_token"),
          .pad = find("pad_token"),
          .cls = find("cls_token"),
          .mask = find("mask_token")};
}

// As in transformers, ids of added tokens are honored only if they are the next free ones.
void WarnOfOtherIds(const text::FolderTokens& tokens, const text::TokenizerCore& core,
                    const std::string& folder) {
  size_t others = 0;
  std::string first;
  for (const auto& [content, id] : tokens.ids) {
    const std::optional<int64_t> given = core.TokenToId(content);
    if (!given.has_value() || *given == id || ++others > 1) continue;
    first = absl::StrCat("\"", Printable(content), "\" has id ", id, " there, but gets ", *given);
  }
  if (others == 0) return;
  MUSTER_LOG(Warning) << folder << ": " << others << " of " << tokens.ids.size()
                      << " ids in added_tokens.json or added_tokens_decoder do not hold, as a "
                         "token gets the model's id or the next free one; the first: "
                      << first;
}

}  // namespace

StreamDecoder::StreamDecoder(std::shared_ptr<const text::TokenizerCore> core,
                             bool skip_special_tokens)
    : core_(std::move(core)),
      skip_special_tokens_(skip_special_tokens),
      chain_(std::make_unique<text::DecodeChain>(core_->NewChain())) {}
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;
StreamDecoder::~StreamDecoder() = default;

absl::StatusOr<std::string> StreamDecoder::Push(int64_t id) {
  MUSTER_RETURN_IF_ERROR(core_->Push(*chain_, id, skip_special_tokens_));
  return chain_->Take();
}

absl::StatusOr<std::string> StreamDecoder::Finish() {
  chain_->Finish();
  return chain_->Take();
}

absl::StatusOr<Tokenizer> Tokenizer::FromJson(absl::string_view json, absl::string_view source) {
  MUSTER_ASSIGN_OR_RETURN(const Json parsed, ParseFile(json, source));
  MUSTER_ASSIGN_OR_RETURN(std::shared_ptr<text::TokenizerCore> core,
                          text::TokenizerCore::Make(parsed, std::string(source)));
  return Tokenizer(std::move(core));
}

absl::StatusOr<Tokenizer> Tokenizer::FromFile(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const std::string contents, ReadFile(path, kMaxFileBytes));
  return FromJson(contents, path);
}

absl::StatusOr<Tokenizer> Tokenizer::FromFolder(const std::string& folder) {
  const std::string path = JoinPath(folder, "tokenizer.json");
  const auto read = [&folder](const char* name) { return ReadIfThere(JoinPath(folder, name)); };
  text::FolderFiles files = {.folder = folder};
  const absl::StatusOr<std::string> contents = ReadFile(path, kMaxFileBytes);
  if (absl::IsNotFound(contents.status())) MUSTER_RETURN_IF_ERROR(RefuseLinkToNothing(path));
  const bool older = absl::IsNotFound(contents.status()) && PathExists(folder);
  if (!older) {
    MUSTER_RETURN_IF_ERROR(contents.status());
    MUSTER_ASSIGN_OR_RETURN(files.tokenizer, ParseFile(*contents, path));
  }
  MUSTER_ASSIGN_OR_RETURN(files.tokenizer_config, read("tokenizer_config.json"));
  MUSTER_ASSIGN_OR_RETURN(files.special_tokens_map, read("special_tokens_map.json"));
  MUSTER_ASSIGN_OR_RETURN(files.added_tokens, read("added_tokens.json"));
  if (older) MUSTER_RETURN_IF_ERROR(ReadOlderFiles(files));
  MUSTER_ASSIGN_OR_RETURN(const text::FolderTokens tokens, text::TokensOfFolder(files));
  MUSTER_ASSIGN_OR_RETURN(
      std::shared_ptr<text::TokenizerCore> core,
      text::TokenizerCore::Make(files.tokenizer, older ? folder : path, tokens.added));
  WarnOfOtherIds(tokens, *core, folder);
  core->set_special_tokens(RolesOf(tokens.roles));
  return Tokenizer(std::move(core));
}

absl::StatusOr<Encoding> Tokenizer::Encode(absl::string_view text,
                                           const EncodeOptions& options) const {
  const TextInput input(text);
  MUSTER_ASSIGN_OR_RETURN(std::vector<Encoding> encodings,
                          EncodeBatch(absl::MakeConstSpan(&input, 1), options, 1));
  return std::move(encodings[0]);
}

absl::StatusOr<Encoding> Tokenizer::EncodePair(absl::string_view text, absl::string_view pair,
                                               const EncodeOptions& options) const {
  const TextInput input(text, pair);
  MUSTER_ASSIGN_OR_RETURN(std::vector<Encoding> encodings,
                          EncodeBatch(absl::MakeConstSpan(&input, 1), options, 1));
  return std::move(encodings[0]);
}

absl::StatusOr<std::vector<Encoding>> Tokenizer::EncodeBatch(absl::Span<const TextInput> inputs,
                                                             const EncodeOptions& options,
                                                             int threads) const {
  std::vector<Encoding> encodings(inputs.size());
  std::vector<absl::Status> failures(inputs.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < inputs.size(); i = next++) {
      try {
        absl::StatusOr<Encoding> encoding = core_->Encode(inputs[i], options);
        failures[i] = encoding.status();
        if (encoding.ok()) encodings[i] = *std::move(encoding);
      } catch (const std::bad_alloc&) {
        // On a started thread, or here while others run, the exception would end the process.
        failures[i] = absl::ResourceExhaustedError("out of host memory");
      }
    }
  };
  size_t bytes = 0;
  for (const TextInput& input : inputs) {
    bytes += input.text.size() + input.pair.value_or("").size();
  }
  const size_t most = threads > 0 ? static_cast<size_t>(threads)
                                  : std::max(std::thread::hardware_concurrency(), 1u);
  const size_t wanted = std::min({most, inputs.size(), 1 + bytes / kMinBytesOfThread});
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < wanted) others.emplace_back(work);
  } catch (const std::exception&) {
    // The system gives no more threads (ulimit -u, -v, a cgroup): fewer do all the work.
  }
  work();
  for (std::thread& other : others) other.join();
  for (size_t i = 0; i < failures.size(); ++i) {
    if (failures[i].ok()) continue;
    if (failures.size() == 1) return failures[i];
    return absl::Status(failures[i].code(),
                        absl::StrCat("text ", i, " of the batch: ", failures[i].message()));
  }
  std::optional<Padding> padding = options.padding;
  if (!padding.has_value() && options.limits_of_file) padding = core_->padding();
  if (padding.has_value()) text::Pad(encodings, *padding);
  return encodings;
}

absl::StatusOr<std::vector<int64_t>> Tokenizer::EncodeIds(absl::string_view text,
                                                          bool add_special_tokens) const {
  return core_->EncodeIds(text, add_special_tokens);
}

absl::StatusOr<std::string> Tokenizer::Decode(absl::Span<const int64_t> ids,
                                              bool skip_special_tokens) const {
  text::DecodeChain chain = core_->NewChain();
  for (const int64_t id : ids) {
    MUSTER_RETURN_IF_ERROR(core_->Push(chain, id, skip_special_tokens));
  }
  chain.Finish();
  return chain.Take();
}

StreamDecoder Tokenizer::Stream(bool skip_special_tokens) const {
  return StreamDecoder(core_, skip_special_tokens);
}

std::optional<int64_t> Tokenizer::TokenToId(absl::string_view token) const {
  return core_->TokenToId(token);
}

std::optional<std::string> Tokenizer::IdToToken(int64_t id) const {
  const std::string* const token = core_->IdToToken(id);
  return token == nullptr ? std::nullopt : std::optional<std::string>(*token);
}

int64_t Tokenizer::VocabSize(bool with_added_tokens) const {
  return core_->VocabSize(with_added_tokens);
}

const SpecialTokens& Tokenizer::special_tokens() const { return core_->special_tokens(); }
const std::optional<Truncation>& Tokenizer::truncation() const { return core_->truncation(); }
const std::optional<Padding>& Tokenizer::padding() const { return core_->padding(); }

}  // namespace muster
