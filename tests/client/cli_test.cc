// The `wavekv` program itself against a daemon that answers what the test wants.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "tests/client/fake_daemon.h"
#include "tests/client/program.h"

namespace wavekv {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// Beyond 2^53, as ids with an epoch in their upper half are.
constexpr uint64_t kId = (uint64_t{0xfedcba98} << 32) + 12345;
const std::string kIdText = absl::StrCat(kId);

void FillShape(v1::ModelShape* shape) {
  shape->set_layer_count(2);
  shape->set_query_head_count(4);
  shape->set_kv_head_count(2);
  shape->set_key_dim(32);
  shape->set_value_dim(32);
  shape->set_dtype(v1::DTYPE_BF16);
  shape->set_softmax_scale(1);
  shape->set_model_id("llama");
}

class CliTest : public testing::Test {
 protected:
  void SetUp() override {
    daemon_ = std::make_unique<FakeDaemon>(address_, FakeDaemon::Options{});
    daemon_->on_list = [](const v1::ListSequencesRequest& request, v1::ListSequencesReply* reply) {
      // Two pages.
      v1::SequenceInfo* const info = reply->add_sequences();
      FillShape(info->mutable_shape());
      info->set_sequence_id(request.page_token().empty() ? kId : kId + 1);
      info->set_label(request.page_token().empty() ? "first" : "second");
      info->set_token_count(4096);
      if (request.page_token().empty()) reply->set_next_page_token("more");
      return grpc::Status::OK;
    };
    daemon_->on_describe = [](const v1::DescribeIndexRequest& request,
                              v1::DescribeIndexReply* reply) {
      if (request.sequence().sequence_id() != kId) {
        return grpc::Status(grpc::StatusCode::NOT_FOUND,
                            absl::StrCat("sequence ", request.sequence().sequence_id()));
      }
      reply->set_generation(3);
      reply->set_version(request.has_layer() ? 100 + request.layer() : 9);
      reply->set_token_count(4096);
      reply->set_steady_tokens(280);
      reply->set_index_count(request.has_layer() && request.has_kv_head() ? 1 : 4);
      reply->set_cluster_count(256);
      reply->set_imbalance(1.25);
      reply->mutable_sizes()->mutable_edges()->Add(8);
      reply->mutable_sizes()->mutable_edges()->Add(16);
      reply->mutable_sizes()->mutable_edges()->Add(32);
      reply->mutable_sizes()->mutable_counts()->Add(64);
      reply->mutable_sizes()->mutable_counts()->Add(192);
      reply->add_segments()->set_token_count(4026);
      reply->set_segments_left_off(2);
      return grpc::Status::OK;
    };
  }

  ProgramResult Run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), WAVEKV_CLI_PATH);
    return RunProgram(arguments, {"WAVEKV_ADDRESS=" + address_});
  }
  json RunJson(std::vector<std::string> arguments) const {
    arguments.push_back("--json");
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  }

  const TempDir dir_;
  const std::string address_ = absl::StrCat("unix:", dir_.path(), "/d.sock");
  std::unique_ptr<FakeDaemon> daemon_;
};

TEST_F(CliTest, Usage) {
  EXPECT_EQ(Run({"--help"}).exit_code, 0);
  EXPECT_THAT(Run({"--version"}).out, StartsWith("wavekv "));
  const std::vector<std::vector<std::string>> wrong = {
      {},
      {"nonsense"},
      {"index"},
      {"index", "not a number"},
      {"index", "0"},
      {"explain", "5"},
      {"explain", "5", "--layer", "0", "--head", "0", "--budget", "ratio=2"},
      {"recall", "5", "--budget", "all"},
      {"top", "--interval", "0"},
      {"record"},
      {"record", "--sequence", "5"},
      {"record", "--sequence", "0", "--out", "x"},
      {"record", "--sequence", "5", "--out", "x", "--layers", "5-3"},
      {"record", "--sequence", "5", "--out", "x", "--duration", "-1"},
      {"replay"},
      {"replay", "x", "--budget", "half"},
      {"replay", "x", "--sketch_clusters", "5000"},
      {"status", "--nonsense"},
  };
  for (const auto& arguments : wrong) {
    SCOPED_TRACE(absl::StrJoin(arguments, " "));
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_FALSE(result.err.empty());
  }
  EXPECT_THAT(Run({"index", "seven"}).err, HasSubstr("'seven' is no id of a sequence"));
}

TEST_F(CliTest, AnErrorNamesAddressAndCure) {
  const ProgramResult unknown = Run({"index", "77"});
  EXPECT_EQ(unknown.exit_code, 1);
  EXPECT_THAT(unknown.err, HasSubstr("77"));
  EXPECT_THAT(unknown.err, HasSubstr(address_));
  EXPECT_THAT(unknown.err, HasSubstr("wavekv sequences"));
  EXPECT_EQ(unknown.out, "");

  const std::string elsewhere = absl::StrCat("unix:", dir_.path(), "/other.sock");
  const ProgramResult away = Run({"status", "--address", elsewhere});
  EXPECT_EQ(away.exit_code, 1);
  EXPECT_THAT(away.err, HasSubstr(elsewhere));
  EXPECT_THAT(away.err, HasSubstr("WAVEKV_ADDRESS"));
}

TEST_F(CliTest, Status) {
  daemon_->on_stats = [](v1::GetStatsReply* reply) {
    reply->set_pool_bytes_max(uint64_t{1} << 40);
    (*reply->mutable_calls())["Attend"] = 1234;
    reply->add_tenants()->set_tenant("uid:1000");
    reply->set_numa_nodes(2);
    reply->set_shmem_huge_pages("advise");
    return grpc::Status::OK;
  };
  const ProgramResult text = Run({"status"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("1.00 TiB"));
  EXPECT_THAT(text.out, HasSubstr("Attend 1,234"));
  EXPECT_THAT(text.out, HasSubstr("2 NUMA nodes, huge pages for the pool: advise"));
  const json object = RunJson({"status"});
  EXPECT_EQ(object["pool_bytes_max"], uint64_t{1} << 40);
  EXPECT_EQ(object["calls"]["Attend"], 1234);
  EXPECT_EQ(object["numa_nodes"], 2);
  EXPECT_EQ(object["shmem_huge_pages"], "advise");
  EXPECT_EQ(object["tenants"][0]["tenant"], "uid:1000");
  EXPECT_EQ(daemon_->CallCount("Detach"), 2u) << "a command leaves no lease behind";
}

TEST_F(CliTest, SequencesOfAllPages) {
  const ProgramResult text = Run({"sequences"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr(kIdText));
  EXPECT_THAT(text.out, HasSubstr("4,096"));
  EXPECT_THAT(text.out, HasSubstr("second"));
  const json object = RunJson({"sequences"});
  ASSERT_EQ(object["sequences"].size(), 2u);
  EXPECT_EQ(object["sequences"][1]["id"], absl::StrCat(kId + 1));
  EXPECT_EQ(object["sequences"][1]["sequence_id"].get<uint64_t>(), kId + 1);
  EXPECT_EQ(object["sequences"][0]["shape"]["dtype"], "bf16");
}

TEST_F(CliTest, IndexIsDrawn) {
  const ProgramResult text = Run({"index", kIdText});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("4,096, 70 of them in the steady zone (mean of 4 indexes"));
  EXPECT_THAT(text.out, HasSubstr("imbalance 1.250"));
  EXPECT_THAT(text.out,
              HasSubstr("16 – 31 │████████████████████████████████████████ 192 (75.0 %)"));
  EXPECT_THAT(text.out, HasSubstr("and 2 more"));
  EXPECT_THAT(text.out, HasSubstr("version 9"));
  const ProgramResult layer = Run({"index", kIdText, "--layer", "1", "--head", "0"});
  EXPECT_THAT(layer.out, HasSubstr("layer 1, KV head 0"));
  EXPECT_THAT(layer.out, HasSubstr("version 101"));
  EXPECT_THAT(layer.out, HasSubstr("4,096, 280 of them in the steady zone\n"));
  const json object = RunJson({"index", kIdText, "--layer", "0"});
  EXPECT_EQ(object["id"], kIdText);
  EXPECT_EQ(object["layer"], 0);
  EXPECT_EQ(object["version"], 100);
  EXPECT_EQ(object["sizes"]["counts"], json({64, 192}));
}

TEST_F(CliTest, ExplainSendsWhatWasAsked) {
  v1::ExplainRequest seen;
  daemon_->on_explain = [&](const v1::ExplainRequest& request, v1::ExplainReply* reply) {
    seen = request;
    reply->set_steady_mass(0.5);
    reply->set_ranked_by("expected error");
    v1::ExplainedCluster* const cluster = reply->add_clusters();
    cluster->set_zone("retrieval");
    cluster->set_true_mass(0.125);
    cluster->set_expected_error(0.03125);
    cluster->set_size(9);
    for (uint64_t position = 1; position < 9; ++position) cluster->add_positions(position);
    return grpc::Status::OK;
  };
  const std::vector<std::string> arguments = {
      "explain", kIdText, "--layer", "1", "--head", "1", "--budget", "coverage=0.75", "--top", "5"};
  const ProgramResult text = Run(arguments);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("retrieval"));
  EXPECT_THAT(text.out, HasSubstr("Clusters by expected error"));
  EXPECT_THAT(text.out, HasSubstr("3.12e-02"));
  EXPECT_THAT(text.out, HasSubstr("12.50 %"));
  EXPECT_THAT(text.out, HasSubstr("1 2 3 4 5 6 …"));
  EXPECT_EQ(seen.sequence().sequence_id(), kId);
  EXPECT_EQ(seen.layer(), 1u);
  EXPECT_EQ(seen.kv_head(), 1u);
  EXPECT_EQ(seen.top(), 5u);
  EXPECT_EQ(seen.budget().coverage(), 0.75);
  const json object = RunJson(arguments);
  EXPECT_EQ(object["steady_mass"], 0.5);
  EXPECT_EQ(object["ranked_by"], "expected error");
  EXPECT_EQ(object["clusters"][0]["expected_error"], 0.03125);
  EXPECT_EQ(object["clusters"][0]["positions"].size(), 8u);
}

TEST_F(CliTest, BudgetsOfEveryKindArrive) {
  v1::Budget seen;
  daemon_->on_explain = [&](const v1::ExplainRequest& request, v1::ExplainReply*) {
    seen = request.budget();
    return grpc::Status::OK;
  };
  const auto send = [&](const std::string& budget) {
    const ProgramResult result =
        Run({"explain", kIdText, "--layer", "0", "--head", "0", "--budget", budget});
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  send("ratio=0.02");
  EXPECT_EQ(seen.kind_case(), v1::Budget::kRatio);
  EXPECT_EQ(seen.ratio(), 0.02);
  send("clusters=7");
  EXPECT_EQ(seen.clusters(), 7u);
  send("coverage=0.75");
  EXPECT_EQ(seen.coverage(), 0.75);
  send("error=0.05");
  EXPECT_EQ(seen.error(), 0.05);
}

TEST_F(CliTest, RecallOfLayersThatHaveSeenAQuery) {
  daemon_->on_recall = [](const v1::SampleRecallRequest& request, v1::SampleRecallReply* reply) {
    v1::LayerRecall* const layer = reply->add_layers();
    layer->set_sampled(true);
    layer->set_mass_covered_mean(0.875);
    layer->set_rel_error_max(0.0625);
    reply->add_layers()->set_layer(request.layers_size() > 0 ? request.layers(0) : 1);
    return grpc::Status::OK;
  };
  const ProgramResult text = Run({"recall", kIdText});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("87.50 %"));
  EXPECT_THAT(text.out, HasSubstr("6.25 %"));
  EXPECT_THAT(text.out, HasSubstr("no query yet"));
  const json object = RunJson({"recall", kIdText, "--layer", "5"});
  EXPECT_EQ(object["layers"][0]["mass_covered_mean"], 0.875);
  EXPECT_EQ(object["layers"][1]["layer"], 5);
  EXPECT_EQ(object["layers"][1]["sampled"], false);
}

TEST_F(CliTest, TopTicksAndEnds) {
  const ProgramResult lines = Run({"top", "--count", "3", "--interval", "0.01", "--json"});
  EXPECT_EQ(lines.exit_code, 0) << lines.err;
  std::vector<std::string> ticks = absl::StrSplit(lines.out, '\n', absl::SkipEmpty());
  ASSERT_EQ(ticks.size(), 3u);
  for (size_t i = 0; i < ticks.size(); ++i) {
    const json object = json::parse(ticks[i], nullptr, false);
    EXPECT_EQ(object["tick"], i);
    EXPECT_EQ(object["sequences"].size(), 2u);
    EXPECT_EQ(object["stats"]["daemon_version"], "fake");
  }
  const ProgramResult text = Run({"top", "--count", "1"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, Not(HasSubstr("\x1b"))) << "no redrawing where it is no terminal";
}

TEST_F(CliTest, OnATerminalTopRedrawsUntilQ) {
  const ProgramResult result = RunOnTerminal({WAVEKV_CLI_PATH, "top", "--interval", "0.05"},
                                             {"WAVEKV_ADDRESS=" + address_}, "q quits", "q");
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_THAT(result.out, HasSubstr("\x1b[H\x1b[2J"));
  EXPECT_THAT(result.out, HasSubstr(kIdText));
}

TEST_F(CliTest, OnATerminalABuildHasAProgressBar) {
  v1::BuildIndexProgress half;
  half.set_tokens_total(8192);
  half.set_tokens_done(4096);
  half.set_generation(3);
  v1::BuildIndexProgress end = half;
  end.set_tokens_done(8192);
  end.set_done(true);
  daemon_->build_progress = {half, end};
  daemon_->AddSequence(kId, 3);
  const ProgramResult result =
      RunOnTerminal({WAVEKV_CLI_PATH, "build", kIdText}, {"WAVEKV_ADDRESS=" + address_}, "", "");
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_THAT(result.out, HasSubstr("████████████████                │ 4,096 of 8,192 tokens"));
  EXPECT_EQ(Run({"build", kIdText}).err, "") << "and nowhere else";
}

TEST_F(CliTest, DoctorKnowsItsDaemon) {
  const json object = RunJson({"doctor"});
  ASSERT_TRUE(object["checks"].is_array());
  bool found = false;
  for (const json& check : object["checks"]) {
    if (check["name"] != "daemon") continue;
    found = true;
    EXPECT_THAT(check["found"].get<std::string>(), HasSubstr(address_));
    EXPECT_EQ(check["verdict"], "WARN") << "version \"fake\" is not ours";
  }
  EXPECT_TRUE(found);
  daemon_.reset();
  const ProgramResult away = Run({"doctor"});
  EXPECT_EQ(away.exit_code, 1);
  EXPECT_THAT(away.out, HasSubstr("FAIL  daemon"));
  EXPECT_THAT(away.out, HasSubstr("→ start wavekvd"));
}

TEST_F(CliTest, BuildAndDropActOnThePresentGeneration) {
  // A sequence of another client, whose generation the command has to find out.
  v1::BuildIndexProgress end;
  end.set_tokens_total(8192);
  end.set_tokens_done(8192);
  end.set_done(true);
  end.set_generation(3);
  end.set_version(11);
  daemon_->build_progress = {end};
  daemon_->AddSequence(kId, 3);
  const json built = RunJson({"build", kIdText});
  EXPECT_EQ(built["version"], 11);
  EXPECT_EQ(built["tokens"], 8192);
  EXPECT_THAT(Run({"build", kIdText}).out, HasSubstr("8,192 tokens"));
  EXPECT_EQ(daemon_->live_sequences().size(), 1u);
  EXPECT_EQ(RunJson({"drop", kIdText})["dropped"], true);
  EXPECT_EQ(daemon_->live_sequences().size(), 0u);
  EXPECT_EQ(Run({"drop", kIdText}).exit_code, 1);
}

TEST_F(CliTest, ADaemonThatHangsCostsOneDeadline) {
  daemon_->Hang("GetStats");
  const ProgramResult result = Run({"status", "--deadline", "0.5"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("GetStats"));
}

TEST_F(CliTest, TheTokenComesFromAFile) {
  const std::string path = dir_.path() + "/token";
  std::ofstream(path) << "the-token\n";
  EXPECT_EQ(Run({"status", "--token_file", path}).exit_code, 0);
  EXPECT_EQ(daemon_->last_authorization(), "Bearer the-token");
  const ProgramResult missing = Run({"status", "--token_file", path + ".missing"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(missing.err, HasSubstr("--token_file"));
}

}  // namespace
}  // namespace wavekv
