#include "worker/text/added_tokens.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/settings.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

bool WordBefore(absl::string_view text, size_t at) {
  return at > 0 && IsWord(PreviousCharacter(text, at));
}

bool WordBehind(absl::string_view text, size_t at) {
  return at < text.size() && IsWord(NextCharacter(text, at));
}

uint32_t BlanksBegin(absl::string_view text, size_t end) {
  for (size_t at = end; at > 0; end = at) {
    if (!IsWhitespace(PreviousCharacter(text, at))) break;
  }
  return static_cast<uint32_t>(end);
}

uint32_t BlanksEnd(absl::string_view text, size_t begin) {
  for (size_t at = begin; at < text.size(); begin = at) {
    if (!IsWhitespace(NextCharacter(text, at))) break;
  }
  return static_cast<uint32_t>(begin);
}

absl::StatusOr<AddedToken> ReadToken(const nlohmann::json& json, const std::string& path) {
  Settings settings(json, path);
  AddedToken token;
  token.id = settings.Id("id");
  token.content = settings.String("content");
  token.single_word = settings.Bool("single_word");
  token.lstrip = settings.Bool("lstrip");
  token.rstrip = settings.Bool("rstrip");
  token.normalized = settings.Bool("normalized");
  token.special = settings.Bool("special");
  MUSTER_RETURN_IF_ERROR(settings.Finish());
  return token;
}

}  // namespace

void AddedTokens::Add(AddedToken token, const Vocabulary& vocabulary, uint32_t& next_id) {
  const auto known = by_content_.find(token.content);
  if (known != by_content_.end()) {
    AddedToken& before = tokens_[known->second];
    token.id = before.id;
    // once special, always, as in the tokenizers library
    token.special = token.special || before.special;
    before = std::move(token);
    return;
  }
  const std::optional<uint32_t> of_model = vocabulary.Id(token.content);
  token.id = of_model.has_value() ? *of_model : next_id++;
  // Two contents of the model may have one id: the later one counts.
  by_id_[token.id] = tokens_.size();
  by_content_.emplace(token.content, tokens_.size());
  tokens_.push_back(std::move(token));
}

absl::StatusOr<AddedTokens> AddedTokens::Make(const nlohmann::json& json, const std::string& path,
                                              const Vocabulary& vocabulary,
                                              const Normalizer* normalizer,
                                              const std::vector<AddedToken>& more) {
  AddedTokens added;
  if (!json.is_null() && !json.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": must be a list, is ", json.type_name()));
  }
  auto next_id = static_cast<uint32_t>(vocabulary.size());
  for (size_t i = 0; i < json.size(); ++i) {
    MUSTER_ASSIGN_OR_RETURN(const AddedToken token,
                            ReadToken(json[i], absl::StrCat(path, "[", i, "]")));
    if (token.content.empty()) continue;
    added.Add(token, vocabulary, next_id);
    const uint32_t id = added.tokens_[added.by_content_.at(token.content)].id;
    if (id == token.id) continue;
    MUSTER_LOG(Warning) << path << "[" << i << "]: the token \"" << Printable(token.content)
                        << "\" has id " << token.id << " in the file, but gets " << id
                        << ", the model's or the next free one";
  }
  for (const AddedToken& token : more) {
    if (!token.content.empty()) added.Add(token, vocabulary, next_id);
  }
  std::vector<std::pair<std::string, uint32_t>> plain;
  std::vector<std::pair<std::string, uint32_t>> normalized;
  for (uint32_t i = 0; i < added.tokens_.size(); ++i) {
    const AddedToken& token = added.tokens_[i];
    if (!token.normalized) {
      plain.emplace_back(token.content, i);
      continue;
    }
    AlignedText content = AlignedText::Of(token.content);
    if (normalizer != nullptr) {
      MUSTER_RETURN_IF_ERROR(
          normalizer->Normalize(content, {0, static_cast<uint32_t>(token.content.size())}));
    }
    normalized.emplace_back(content.text, i);
  }
  // If normalization makes two contents the same, the tokenizers library finds either, by chance.
  std::stable_partition(normalized.begin(), normalized.end(),
                        [&](const auto& entry) { return added.tokens_[entry.second].special; });
  added.in_text_ = MakeFinder(plain);
  added.in_normalized_ = MakeFinder(normalized);
  return added;
}

AddedTokens::Finder AddedTokens::MakeFinder(
    const std::vector<std::pair<std::string, uint32_t>>& texts) {
  Finder finder;
  std::vector<std::pair<absl::string_view, uint32_t>> entries;
  for (const auto& [text, place] : texts) {
    if (text.empty()) continue;
    entries.emplace_back(text, place);
    finder.starts[static_cast<unsigned char>(text[0])] = true;
    finder.empty = false;
  }
  finder.trie = Trie(std::move(entries));
  return finder;
}

// The leftmost match counts, and of those that begin there the longest; the next one begins after
// its text, not after the blanks that it takes.
void AddedTokens::FindAll(absl::string_view text, const Finder& finder,
                          std::vector<Match>& matches) const {
  uint32_t done = 0;
  for (size_t at = 0; at < text.size() && !finder.empty;) {
    if (!finder.starts[static_cast<unsigned char>(text[at])]) {
      ++at;
      continue;
    }
    uint32_t place = Trie::kNoValue;
    size_t match_end = at;
    uint32_t node = Trie::kRoot;
    for (size_t end = at; end < text.size();) {
      node = finder.trie.Step(node, static_cast<unsigned char>(text[end++]));
      if (node == Trie::kNowhere) break;
      if (finder.trie.Value(node) == Trie::kNoValue) continue;
      place = finder.trie.Value(node);
      match_end = end;
    }
    if (place == Trie::kNoValue) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[place];
    auto begin = static_cast<uint32_t>(at);
    auto end = static_cast<uint32_t>(match_end);
    at = match_end;
    if (token.single_word && (WordBefore(text, begin) || WordBehind(text, end))) continue;
    if (token.lstrip) begin = std::max(BlanksBegin(text, begin), done);
    if (token.rstrip) end = BlanksEnd(text, end);
    if (begin >= end) continue;
    if (done < begin) matches.push_back({done, begin, -1});
    matches.push_back({begin, end, token.id});
    done = end;
  }
  if (done < text.size()) matches.push_back({done, static_cast<uint32_t>(text.size()), -1});
}

absl::StatusOr<SplitText> AddedTokens::Extract(absl::string_view text,
                                               const Normalizer* normalizer) const {
  SplitText split;
  if (text.empty()) return split;
  std::vector<Match> matches;
  std::vector<Match> inner;
  FindAll(text, in_text_, matches);
  for (const Match& match : matches) {
    AlignedText part =
        AlignedText::Of(text.substr(match.begin, match.end - match.begin), match.begin);
    const ByteRange original = {match.begin, match.end};
    inner.clear();
    if (match.id >= 0) {
      inner.push_back({0, match.end - match.begin, match.id});
    } else {
      if (normalizer != nullptr) MUSTER_RETURN_IF_ERROR(normalizer->Normalize(part, original));
      FindAll(part.text, in_normalized_, inner);
    }
    const auto shift = static_cast<uint32_t>(split.aligned.text.size());
    for (const Match& found : inner) {
      split.spans.push_back({found.begin + shift, found.end + shift,
                             part.OriginalOf(found.begin, found.end), found.id});
    }
    if (shift == 0) {
      split.aligned = std::move(part);
    } else {
      split.aligned.Append(part, 0, part.text.size());
    }
  }
  return split;
}

const AddedToken* AddedTokens::Find(int64_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

const AddedToken* AddedTokens::Find(absl::string_view content) const {
  const auto found = by_content_.find(std::string(content));
  return found == by_content_.end() ? nullptr : &tokens_[found->second];
}

}  // namespace muster::text
