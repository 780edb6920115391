// The SDK's values as JSON, for --json. Numbers are numbers; ids come twice, as a number and as a
// string of decimal digits ("id"), because many readers of JSON round numbers above 2^53.
#pragma once

#include <string>

#include "client/admin.h"
#include "nlohmann/json.hpp"

namespace wavekv::client {

using Json = nlohmann::ordered_json;

// One line. Text that is not UTF-8 (labels are the clients') is mended, never thrown about.
std::string DumpJson(const Json& json);

Json ToJson(const StepCounters& counters);
Json ToJson(const DaemonStats& stats);
Json ToJson(const SequenceSummary& sequence);
Json ToJson(const Histogram& histogram);
Json ToJson(const IndexDescription& description);
Json ToJson(const Explanation& explanation);
Json ToJson(const RecallSample& sample);

}  // namespace wavekv::client
