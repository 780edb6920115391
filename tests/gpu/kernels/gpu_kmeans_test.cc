// Segmented k-means on the device, on fresh random keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "gpu/kernels/device_array.h"
#include "gpu/kernels/kmeans.h"
#include "tests/gpu/kernels/device_test.h"
#include "tests/gpu/kernels/head_problem.h"

namespace wavekv::gpu {
namespace {

struct Row {
  std::string name;
  Element element = Element::kBF16;
  uint32_t dim = 128;
  std::vector<uint32_t> tokens;  // Of each task.
  float noise = 0.3f;            // Of keys around their topic.
};

void PrintTo(const Row& row, std::ostream* os) { *os << row.name; }

std::vector<Row> Rows() {
  std::vector<Row> rows = {
      {.name = "WholeSegments", .tokens = {8192, 8192, 8192}},
      {.name = "DifferentLengths", .tokens = {8192, 1, 5000, 16, 17, 1024}},
      {.name = "AllKeysAlike", .tokens = {2000}, .noise = 0},
  };
  for (const Element element : {Element::kBF16, Element::kF16}) {
    for (const uint32_t dim : {64u, 128u, 256u}) {
      rows.push_back({.name = std::string(element == Element::kBF16 ? "BF16" : "F16") + "Dim" +
                              std::to_string(dim),
                      .element = element,
                      .dim = dim,
                      .tokens = {3000, 777}});
    }
  }
  return rows;
}

struct TaskData {
  uint32_t tokens, centroids;
  std::vector<uint16_t> bits;    // [tokens, dim]
  std::vector<uint16_t> labels;  // [tokens]
  std::vector<double> centred;   // [tokens, dim]
};

// Mean cosine of the keys with the mean of their label.
double MeanCosine(const TaskData& task, const std::vector<uint16_t>& labels, uint32_t dim) {
  std::vector<double> sums(size_t{task.centroids} * dim);
  for (uint32_t i = 0; i < task.tokens; ++i) {
    for (uint32_t d = 0; d < dim; ++d) {
      sums[size_t{labels[i]} * dim + d] += task.centred[size_t{i} * dim + d];
    }
  }
  double total = 0;
  for (uint32_t i = 0; i < task.tokens; ++i) {
    double dot = 0, key = 0, mean = 0;
    for (uint32_t d = 0; d < dim; ++d) {
      const double x = task.centred[size_t{i} * dim + d];
      const double y = sums[size_t{labels[i]} * dim + d];
      dot += x * y;
      key += x * x;
      mean += y * y;
    }
    if (key > 0 && mean > 0) total += dot / std::sqrt(key * mean);
  }
  return total / task.tokens;
}

// The same iterations in float64.
std::vector<uint16_t> Reference(const TaskData& task, uint32_t dim, uint32_t iterations) {
  std::vector<double> centroids(size_t{task.centroids} * dim);
  const auto set = [&](uint32_t c, const double* row) {
    double squares = 0;
    for (uint32_t d = 0; d < dim; ++d) squares += row[d] * row[d];
    for (uint32_t d = 0; d < dim; ++d) {
      centroids[size_t{c} * dim + d] = squares > 0 ? row[d] / std::sqrt(squares) : 0;
    }
  };
  for (uint32_t c = 0; c < task.centroids; ++c) {
    set(c, &task.centred[uint64_t{c} * task.tokens / task.centroids * dim]);
  }
  std::vector<uint16_t> labels(task.tokens);
  for (uint32_t iteration = 0; iteration < iterations; ++iteration) {
    if (iteration > 0) {
      std::vector<double> sums(centroids.size());
      std::vector<uint32_t> counts(task.centroids);
      for (uint32_t i = 0; i < task.tokens; ++i) {
        ++counts[labels[i]];
        for (uint32_t d = 0; d < dim; ++d) {
          sums[size_t{labels[i]} * dim + d] += task.centred[size_t{i} * dim + d];
        }
      }
      for (uint32_t c = 0; c < task.centroids; ++c) {
        if (counts[c] > 0) set(c, &sums[size_t{c} * dim]);
      }
    }
    for (uint32_t i = 0; i < task.tokens; ++i) {
      double best = -HUGE_VAL;
      for (uint32_t c = 0; c < task.centroids; ++c) {
        double dot = 0;
        for (uint32_t d = 0; d < dim; ++d) {
          dot += task.centred[size_t{i} * dim + d] * centroids[size_t{c} * dim + d];
        }
        if (dot > best) {
          best = dot;
          labels[i] = static_cast<uint16_t>(c);
        }
      }
    }
  }
  return labels;
}

class KMeansTest : public testing::TestWithParam<Row> {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << kNoDevice;
    seed_ = TestSeed();
    random_.seed(seed_);
  }

  TaskData MakeTask(uint32_t tokens) {
    const Row& row = GetParam();
    std::normal_distribution<float> normal;
    std::vector<float> mean(row.dim), topics(size_t{64} * row.dim);
    for (float& x : mean) x = 3 * normal(random_);
    for (float& x : topics) x = normal(random_);
    TaskData task{tokens, std::max(1u, tokens / 16), {}, {}, {}};
    for (uint32_t i = 0; i < tokens; ++i) {
      const size_t topic = row.noise == 0 ? 0 : random_() % 64;
      for (uint32_t d = 0; d < row.dim; ++d) {
        task.bits.push_back(ToBits(
            row.element, mean[d] + topics[topic * row.dim + d] + row.noise * normal(random_)));
      }
    }
    std::vector<double> sum(row.dim);
    for (size_t i = 0; i < task.bits.size(); ++i) {
      task.centred.push_back(FromBits(row.element, task.bits[i]));
      sum[i % row.dim] += task.centred[i];
    }
    for (size_t i = 0; i < task.bits.size(); ++i) task.centred[i] -= sum[i % row.dim] / tokens;
    return task;
  }

  // Clusters all tasks on the device and fills their labels.
  void Cluster(std::vector<TaskData>* tasks) {
    const Row& row = GetParam();
    struct Memory {
      DeviceArray<uint16_t> keys, centroids, labels;
      DeviceArray<float> mean, offsets;
    };
    std::vector<Memory> memory(tasks->size());
    std::vector<KMeansTask> descriptors;
    for (size_t i = 0; i < tasks->size(); ++i) {
      const TaskData& task = (*tasks)[i];
      Memory& m = memory[i];
      m.keys = *DeviceArray<uint16_t>::Copy(task.bits);
      m.centroids = *DeviceArray<uint16_t>::Make(size_t{kCentroidsMax} * row.dim);
      m.labels = *DeviceArray<uint16_t>::Copy(std::vector<uint16_t>(task.tokens, 0xffff));
      m.mean = *DeviceArray<float>::Make(row.dim);
      m.offsets = *DeviceArray<float>::Make(kCentroidsMax);
      descriptors.push_back({m.keys.data(), row.dim, task.tokens, task.centroids, m.mean.data(),
                             m.centroids.data(), m.offsets.data(), m.labels.data()});
    }
    const auto device_tasks = *DeviceArray<KMeansTask>::Copy(descriptors);
    const KMeansShape shape{
        .task_count = static_cast<uint32_t>(tasks->size()),
        .token_count_max = *std::max_element(row.tokens.begin(), row.tokens.end()),
        .head_dim = row.dim,
        .element = row.element};
    const absl::Status status = LaunchKMeans(device_tasks.data(), shape, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t i = 0; i < tasks->size(); ++i) (*tasks)[i].labels = *memory[i].labels.Download();
  }

  uint64_t seed_ = 0;
  std::mt19937_64 random_;
};

TEST_P(KMeansTest, IsAsGoodAsTheSameIterationsInFloat64) {
  SCOPED_TRACE("WAVEKV_TEST_SEED=" + std::to_string(seed_));
  std::vector<TaskData> tasks;
  for (const uint32_t tokens : GetParam().tokens) tasks.push_back(MakeTask(tokens));
  Cluster(&tasks);
  if (HasFatalFailure()) return;
  double device = 0, reference = 0;
  for (const TaskData& task : tasks) {
    for (const uint16_t label : task.labels) ASSERT_LT(label, task.centroids);
    if (task.tokens > 5000) continue;  // The reference would take seconds.
    device += MeanCosine(task, task.labels, GetParam().dim) * task.tokens;
    reference +=
        MeanCosine(task, Reference(task, GetParam().dim, 10), GetParam().dim) * task.tokens;
  }
  EXPECT_GE(device, 0.998 * reference);
}

TEST_P(KMeansTest, GivesTheSameLabelsEachTime) {
  std::vector<TaskData> first;
  for (const uint32_t tokens : GetParam().tokens) first.push_back(MakeTask(tokens));
  std::vector<TaskData> second = first;
  Cluster(&first);
  Cluster(&second);
  if (HasFatalFailure()) return;
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].labels, second[i].labels) << i;
}

INSTANTIATE_TEST_SUITE_P(Rows, KMeansTest, testing::ValuesIn(Rows()),
                         [](const auto& info) { return info.param.name; });

TEST(KMeansShapeTest, RefusesWhatNoKernelDoes) {
  const KMeansShape good{.task_count = 1, .token_count_max = 100, .head_dim = 128};
  KMeansShape dim = good, tokens = good, tasks = good;
  dim.head_dim = 80;
  tokens.token_count_max = kSegmentTokensMax + 1;
  tasks.task_count = 70000;
  for (const KMeansShape& shape : {dim, tokens, tasks}) {
    EXPECT_EQ(LaunchKMeans(nullptr, shape, nullptr).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace wavekv::gpu
