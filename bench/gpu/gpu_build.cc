// Time of clustering one layer on the device (8 KV heads, dim 128, bf16, segments of 8,192 tokens,
// 512 clusters each), and its quality beside the CPU build's method in float32.
//
//   bench_gpu_build [--tokens=122880] [--heads=8] [--runs=20] [--seed=N] [--out=FILE]
//
// Runs alternate between two copies of the keys. Quality is the mean cosine of centred keys with
// their cluster's mean, over sampled segments; the reference runs ten iterations from the same
// initial centroids and rounds nothing to 16 bits. Last line: JSON.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bench/gpu/topic_trace.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/kmeans.h"
#include "nlohmann/json.hpp"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kDim = 128, kSegment = gpu::kSegmentTokensMax, kTokensPerCluster = 16;
constexpr uint32_t kReferenceIterations = 10, kSampled = 16;

struct Options {
  uint32_t tokens = 122880, heads = 8, runs = 20;
  uint64_t seed = std::random_device{}();
  std::string out;
};

// Keys of a segment in float32, centred by their mean.
struct Segment {
  uint32_t tokens = 0;
  std::vector<float> keys;  // [tokens, kDim]
};

Segment Centre(const uint16_t* rows, uint32_t tokens) {
  Segment segment{tokens, std::vector<float>(size_t{tokens} * kDim)};
  std::vector<double> mean(kDim);
  for (size_t i = 0; i < segment.keys.size(); ++i) {
    segment.keys[i] = BF16ToFloat(rows[i]);
    mean[i % kDim] += segment.keys[i];
  }
  for (size_t i = 0; i < segment.keys.size(); ++i) {
    segment.keys[i] -= static_cast<float>(mean[i % kDim] / tokens);
  }
  return segment;
}

// Directions of the labelled clusters' means; a cluster without tokens keeps its direction.
void UpdateDirections(const Segment& segment, const std::vector<uint16_t>& labels,
                      std::vector<float>* directions) {
  std::vector<double> sums(directions->size());
  std::vector<uint32_t> counts(directions->size() / kDim);
  for (uint32_t i = 0; i < segment.tokens; ++i) {
    ++counts[labels[i]];
    for (uint32_t d = 0; d < kDim; ++d) {
      sums[size_t{labels[i]} * kDim + d] += segment.keys[size_t{i} * kDim + d];
    }
  }
  for (size_t c = 0; c < counts.size(); ++c) {
    if (counts[c] == 0) continue;
    double squares = 0;
    for (uint32_t d = 0; d < kDim; ++d) squares += sums[c * kDim + d] * sums[c * kDim + d];
    const double inverse = squares > 0 ? 1 / std::sqrt(squares) : 0;
    for (uint32_t d = 0; d < kDim; ++d) {
      (*directions)[c * kDim + d] = static_cast<float>(sums[c * kDim + d] * inverse);
    }
  }
}

double MeanCosine(const Segment& segment, const std::vector<uint16_t>& labels,
                  uint32_t centroid_count) {
  std::vector<float> directions(size_t{centroid_count} * kDim);
  UpdateDirections(segment, labels, &directions);
  double sum = 0;
  for (uint32_t i = 0; i < segment.tokens; ++i) {
    double dot = 0, squares = 0;
    for (uint32_t d = 0; d < kDim; ++d) {
      const double x = segment.keys[size_t{i} * kDim + d];
      dot += x * directions[size_t{labels[i]} * kDim + d];
      squares += x * x;
    }
    if (squares > 0) sum += dot / std::sqrt(squares);
  }
  return sum / segment.tokens;
}

// The CPU build's iterations.
std::vector<uint16_t> ReferenceLabels(const Segment& segment, uint32_t centroid_count) {
  std::vector<float> directions(size_t{centroid_count} * kDim);
  for (uint32_t c = 0; c < centroid_count; ++c) {
    const size_t row = uint64_t{c} * segment.tokens / centroid_count;
    double squares = 0;
    for (uint32_t d = 0; d < kDim; ++d) squares += std::pow(segment.keys[row * kDim + d], 2);
    for (uint32_t d = 0; d < kDim; ++d) {
      directions[size_t{c} * kDim + d] =
          segment.keys[row * kDim + d] / static_cast<float>(std::sqrt(squares));
    }
  }
  std::vector<uint16_t> labels(segment.tokens);
  for (uint32_t iteration = 0; iteration < kReferenceIterations; ++iteration) {
    if (iteration > 0) UpdateDirections(segment, labels, &directions);
    for (uint32_t i = 0; i < segment.tokens; ++i) {
      float best = -HUGE_VALF;
      for (uint32_t c = 0; c < centroid_count; ++c) {
        float dot = 0;
        for (uint32_t d = 0; d < kDim; ++d) {
          dot += segment.keys[size_t{i} * kDim + d] * directions[size_t{c} * kDim + d];
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

class BuildBench {
 public:
  explicit BuildBench(const Options& options) : options_(options) {}

  absl::Status Prepare();
  absl::StatusOr<double> MedianMs();
  absl::StatusOr<double> CosineRatio();

 private:
  const Options& options_;
  gpu::DeviceArray<uint16_t> rows_[2], values_, labels_, centroids_;
  gpu::DeviceArray<float> offsets_, means_;
  gpu::DeviceArray<gpu::KMeansTask> tasks_[2];
  std::vector<gpu::KMeansTask> host_tasks_;
};

absl::Status BuildBench::Prepare() {
  const size_t elements = size_t{options_.heads} * options_.tokens * kDim;
  WAVEKV_ASSIGN_OR_RETURN(values_, gpu::DeviceArray<uint16_t>::Make(elements));
  const uint32_t segments = (options_.tokens + kSegment - 1) / kSegment;
  const size_t count = size_t{options_.heads} * segments;
  WAVEKV_ASSIGN_OR_RETURN(labels_, gpu::DeviceArray<uint16_t>::Make(count * kSegment));
  WAVEKV_ASSIGN_OR_RETURN(centroids_,
                          gpu::DeviceArray<uint16_t>::Make(count * gpu::kCentroidsMax * kDim));
  WAVEKV_ASSIGN_OR_RETURN(offsets_, gpu::DeviceArray<float>::Make(count * gpu::kCentroidsMax));
  WAVEKV_ASSIGN_OR_RETURN(means_, gpu::DeviceArray<float>::Make(count * kDim));
  for (uint64_t copy = 0; copy < 2; ++copy) {
    WAVEKV_ASSIGN_OR_RETURN(rows_[copy], gpu::DeviceArray<uint16_t>::Make(elements));
    const TraceShape trace{options_.seed + copy, options_.heads, options_.tokens, 1, kDim};
    WAVEKV_RETURN_IF_ERROR(MakeTraceRows(trace, rows_[copy].data(), values_.data(), nullptr));
    std::vector<gpu::KMeansTask> tasks;
    for (uint32_t head = 0; head < options_.heads; ++head) {
      for (uint32_t s = 0; s < segments; ++s) {
        const size_t i = tasks.size();
        const uint32_t tokens = std::min(kSegment, options_.tokens - s * kSegment);
        const size_t row = size_t{head} * options_.tokens + size_t{s} * kSegment;
        tasks.push_back({rows_[copy].data() + row * kDim, kDim, tokens,
                         std::max(1u, tokens / kTokensPerCluster), means_.data() + i * kDim,
                         centroids_.data() + i * gpu::kCentroidsMax * kDim,
                         offsets_.data() + i * gpu::kCentroidsMax, labels_.data() + i * kSegment});
      }
    }
    WAVEKV_ASSIGN_OR_RETURN(tasks_[copy], gpu::DeviceArray<gpu::KMeansTask>::Copy(tasks));
    host_tasks_ = std::move(tasks);  // In the end those of the last copy.
  }
  return absl::OkStatus();
}

absl::StatusOr<double> BuildBench::MedianMs() {
  const gpu::KMeansShape shape{.task_count = static_cast<uint32_t>(host_tasks_.size()),
                               .token_count_max = std::min(kSegment, options_.tokens),
                               .head_dim = kDim};
  cudaStream_t stream;
  cudaEvent_t start, end;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventCreate(&start));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventCreate(&end));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
  std::vector<double> times;
  // Ends with the copy whose labels CosineRatio looks at.
  for (uint32_t run = 0; run < 2 * ((options_.runs + 3) / 2); ++run) {
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(start, stream));
    WAVEKV_RETURN_IF_ERROR(gpu::LaunchKMeans(tasks_[run % 2].data(), shape, stream));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(end, stream));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    float ms = 0;
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&ms, start, end));
    if (run >= 2) times.push_back(ms);
  }
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventDestroy(start));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventDestroy(end));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamDestroy(stream));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

absl::StatusOr<double> BuildBench::CosineRatio() {
  const uint32_t sampled = std::min<uint32_t>(kSampled, host_tasks_.size());
  std::vector<double> device(sampled), reference(sampled);
  std::vector<absl::Status> statuses(sampled);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < sampled; ++i) {
    threads.emplace_back([&, i] {
      const gpu::KMeansTask& task = host_tasks_[i * host_tasks_.size() / sampled];
      std::vector<uint16_t> rows(size_t{task.token_count} * kDim), labels(task.token_count);
      statuses[i] = gpu::CudaStatus(
          cudaMemcpy(rows.data(), task.keys, rows.size() * 2, cudaMemcpyDefault), "cudaMemcpy");
      if (!statuses[i].ok()) return;
      statuses[i] = gpu::CudaStatus(
          cudaMemcpy(labels.data(), task.labels, labels.size() * 2, cudaMemcpyDefault),
          "cudaMemcpy");
      if (!statuses[i].ok()) return;
      const Segment segment = Centre(rows.data(), task.token_count);
      device[i] = MeanCosine(segment, labels, task.centroid_count);
      reference[i] =
          MeanCosine(segment, ReferenceLabels(segment, task.centroid_count), task.centroid_count);
    });
  }
  for (std::thread& thread : threads) thread.join();
  double device_sum = 0, reference_sum = 0;
  for (uint32_t i = 0; i < sampled; ++i) {
    WAVEKV_RETURN_IF_ERROR(statuses[i]);
    device_sum += device[i];
    reference_sum += reference[i];
  }
  std::printf("mean cosine: device %.5f, reference %.5f\n", device_sum / sampled,
              reference_sum / sampled);
  return device_sum / reference_sum;
}

absl::Status Run(const Options& options) {
  BuildBench bench(options);
  WAVEKV_RETURN_IF_ERROR(bench.Prepare());
  WAVEKV_ASSIGN_OR_RETURN(const double build_ms, bench.MedianMs());
  WAVEKV_ASSIGN_OR_RETURN(const double cosine_ratio, bench.CosineRatio());
  const nlohmann::json row = {{"tokens", options.tokens},
                              {"kv_heads", options.heads},
                              {"build_ms", build_ms},
                              {"cosine_ratio", cosine_ratio},
                              {"iterations", gpu::KMeansShape{}.iterations},
                              {"runs", options.runs},
                              {"seed", options.seed}};
  std::printf("%u heads x %u tokens: %.2f ms, cosine ratio %.5f\n", options.heads, options.tokens,
              build_ms, cosine_ratio);
  if (!options.out.empty()) std::ofstream(options.out) << row.dump(1) << "\n";
  std::printf("%s\n", row.dump().c_str());
  return absl::OkStatus();
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    const uint64_t number = std::strtoull(value.c_str(), nullptr, 10);
    if (name == "--tokens") {
      options.tokens = number;
    } else if (name == "--heads") {
      options.heads = number;
    } else if (name == "--runs") {
      options.runs = number;
    } else if (name == "--seed") {
      options.seed = number;
    } else if (name == "--out") {
      options.out = value;
    } else {
      std::fprintf(stderr, "bench_gpu_build: unknown option %s\n", argv[i]);
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "bench_gpu_build: no CUDA device\n");
    return 1;
  }
  const absl::Status status = Run(options);
  if (!status.ok()) std::cerr << "bench_gpu_build: " << status << "\n";
  return status.ok() ? 0 : 1;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
