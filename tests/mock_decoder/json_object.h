// One flat JSON object, fields in the order they are added.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace wavekv::mock {

class JsonObject {
 public:
  // `text` has no character that JSON escapes: names and modes of ours.
  void Add(std::string_view name, std::string_view text) {
    AddRaw(name, absl::StrCat("\"", absl::string_view(text.data(), text.size()), "\""));
  }
  void Add(std::string_view name, const char* text) { Add(name, std::string_view(text)); }
  void Add(std::string_view name, bool value) { AddRaw(name, value ? "true" : "false"); }
  void Add(std::string_view name, std::integral auto value) { AddRaw(name, absl::StrCat(value)); }
  void Add(std::string_view name, double value) {
    AddRaw(name, std::isfinite(value) ? absl::StrFormat("%.6g", value) : "null");
  }
  void Add(std::string_view name, const std::vector<uint64_t>& values) {
    AddRaw(name, absl::StrCat("[", absl::StrJoin(values, ", "), "]"));
  }
  void AddNull(std::string_view name) { AddRaw(name, "null"); }

  // On one line, without a line break at the end.
  std::string ToString() const { return absl::StrCat("{", absl::StrJoin(fields_, ", "), "}"); }

 private:
  void AddRaw(std::string_view name, std::string_view value) {
    fields_.push_back(absl::StrCat("\"", absl::string_view(name.data(), name.size()),
                                   "\": ", absl::string_view(value.data(), value.size())));
  }

  std::vector<std::string> fields_;
};

}  // namespace wavekv::mock
