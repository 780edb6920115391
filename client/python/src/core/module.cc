// The extension module wavekv._core: sessions and sequences of the C++ SDK. The public face, with
// docstrings and types, is the package around it (client/python/src/wavekv).
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/gpu/attention_choice.h"
#include "client/python/src/core/arrays.h"
#include "client/python/src/core/status.h"
#include "client/session.h"

namespace wavekv::python {
namespace py = pybind11;
using client::Budget;

namespace {

std::optional<BorrowedTensor> BorrowOptional(const py::object& array, const char* what) {
  if (array.is_none()) return std::nullopt;
  return Borrow(array, what);
}

std::optional<client::Tensor> TensorOf(const std::optional<BorrowedTensor>& borrowed) {
  if (!borrowed.has_value()) return std::nullopt;
  return borrowed->tensor;
}

py::dict CountersDict(const client::StepCounters& c) {
  using py::operator""_a;
  return py::dict(
      "steady_tokens"_a = c.steady_tokens, "retrieved_clusters"_a = c.retrieved_clusters,
      "retrieved_tokens"_a = c.retrieved_tokens, "estimated_clusters"_a = c.estimated_clusters,
      "sketched_clusters"_a = c.sketched_clusters, "ignored_clusters"_a = c.ignored_clusters,
      "moved_to_estimation"_a = c.moved_to_estimation, "kv_bytes_read"_a = c.kv_bytes_read,
      "kv_bytes_full"_a = c.kv_bytes_full, "cache_hit_blocks"_a = c.cache_hit_blocks,
      "cache_miss_blocks"_a = c.cache_miss_blocks, "error_budget_met"_a = c.error_budget_met,
      "error_budget_capped"_a = c.error_budget_capped);
}

py::dict AttentionDict(const client::Attention& a, const ModelShape& shape) {
  using py::operator""_a;
  return py::dict("out"_a = ToNumpy(a.out, {shape.query_head_count, shape.value_dim}),
                  "lse"_a = ToNumpy(a.lse, {shape.query_head_count}), "generation"_a = a.generation,
                  "version"_a = a.version, "token_count"_a = a.token_count,
                  "counters"_a = CountersDict(a.counters));
}

py::dict EstimationDict(const client::Estimation& e, const ModelShape& shape) {
  using py::operator""_a;
  const int64_t heads = shape.query_head_count;
  return py::dict("out"_a = ToNumpy(e.out, {heads, shape.value_dim}),
                  "lse"_a = ToNumpy(e.lse, {heads}), "lse_lower"_a = ToNumpy(e.lse_lower, {heads}),
                  "lse_upper"_a = ToNumpy(e.lse_upper, {heads}), "generation"_a = e.generation,
                  "version"_a = e.version, "counters"_a = CountersDict(e.counters));
}

py::dict QueryDict(const client::QueryResult& q, const ModelShape& shape) {
  using py::operator""_a;
  py::list heads;
  for (const client::HeadZones& head : q.heads) {
    py::list retrieved;
    for (const client::ClusterRef& ref : head.retrieved) {
      retrieved.append(
          py::make_tuple(ref.segment_idx, ref.cluster_idx, ref.size, ref.estimated_mass));
    }
    heads.append(py::dict(
        "kv_head"_a = head.kv_head, "steady_tokens"_a = head.steady_tokens,
        "retrieved"_a = retrieved, "staged_rows"_a = head.staged.size(),
        "inline_keys"_a = py::bytes(reinterpret_cast<const char*>(head.inline_keys.data()),
                                    head.inline_keys.size()),
        "inline_values"_a = py::bytes(reinterpret_cast<const char*>(head.inline_values.data()),
                                      head.inline_values.size()),
        "inline_positions"_a = head.inline_positions));
  }
  return py::dict("heads"_a = heads, "estimation"_a = EstimationDict(q.estimation, shape),
                  "generation"_a = q.generation, "version"_a = q.version,
                  "token_count"_a = q.token_count, "step"_a = q.step,
                  "counters"_a = CountersDict(q.counters));
}

client::Layout LayoutOf(const std::string& layout) {
  if (layout == "NHD") return client::Layout::kNHD;
  if (layout == "HND") return client::Layout::kHND;
  throw py::value_error("layout is '" + layout + "', expected 'NHD' or 'HND'");
}

void BindValues(py::module_& m) {
  py::enum_<DType>(m, "DType")
      .value("f32", DType::kF32)
      .value("f16", DType::kF16)
      .value("bf16", DType::kBF16);

  py::class_<ModelShape>(m, "ModelShape")
      .def(py::init<>())
      .def_readwrite("layer_count", &ModelShape::layer_count)
      .def_readwrite("query_head_count", &ModelShape::query_head_count)
      .def_readwrite("kv_head_count", &ModelShape::kv_head_count)
      .def_readwrite("key_dim", &ModelShape::key_dim)
      .def_readwrite("value_dim", &ModelShape::value_dim)
      .def_readwrite("dtype", &ModelShape::dtype)
      .def_readwrite("softmax_scale", &ModelShape::softmax_scale)
      .def_readwrite("model_id", &ModelShape::model_id);

  py::class_<Budget> budget(m, "Budget");
  py::enum_<Budget::Kind>(budget, "Kind")
      .value("ratio", Budget::Kind::kRatio)
      .value("clusters", Budget::Kind::kClusters)
      .value("coverage", Budget::Kind::kCoverage)
      .value("error", Budget::Kind::kError);
  budget.def(py::init<>())
      .def_readwrite("kind", &Budget::kind)
      .def_readwrite("value", &Budget::value)
      .def_readwrite("clusters_max", &Budget::clusters_max)
      .def_readwrite("sketch_clusters", &Budget::sketch_clusters)
      .def_readwrite("estimate_ratio", &Budget::estimate_ratio);

  py::class_<client::SequenceOptions>(m, "SequenceOptions")
      .def(py::init<>())
      .def_readwrite("shape", &client::SequenceOptions::shape)
      .def_readwrite("first_kv_head", &client::SequenceOptions::first_kv_head)
      .def_readwrite("total_kv_head_count", &client::SequenceOptions::total_kv_head_count)
      .def_readwrite("max_tokens", &client::SequenceOptions::max_tokens)
      .def_readwrite("label", &client::SequenceOptions::label)
      .def_readwrite("attach_wave_buffer", &client::SequenceOptions::attach_wave_buffer)
      .def_readwrite("logit_soft_cap", &client::SequenceOptions::logit_soft_cap)
      .def_readwrite("sliding_window", &client::SequenceOptions::sliding_window)
      .def("set_index",
           [](client::SequenceOptions& self, uint32_t segment_tokens, uint32_t small_segment_tokens,
              uint32_t tokens_per_cluster, uint32_t kmeans_iterations, std::optional<Budget> budget,
              std::vector<std::pair<uint32_t, Budget>> layer_budgets,
              std::vector<uint32_t> dense_layers, bool sketch) {
             self.index = {segment_tokens,
                           small_segment_tokens,
                           tokens_per_cluster,
                           kmeans_iterations,
                           sketch,
                           std::move(budget),
                           std::move(layer_budgets),
                           std::move(dense_layers)};
           });
}

using SequenceClass = py::class_<client::Sequence, Held<client::Sequence>>;

// segments: (first_position, labels [kv_heads, tokens] uint16).
uint32_t GiveLabels(client::Sequence& self, uint32_t layer, const py::list& segments) {
  using Labels = py::array_t<uint16_t, py::array::c_style>;
  std::vector<Labels> arrays;  // Keeps them through the call.
  std::vector<client::SegmentLabels> borrowed;
  for (const py::handle& handle : segments) {
    const auto segment = py::cast<py::tuple>(handle);
    const auto array = py::cast<py::array>(segment[1]);
    if (!py::isinstance<py::array_t<uint16_t>>(array) || array.ndim() != 2) {
      throw py::type_error("labels: expected an array [kv_heads, tokens] of uint16");
    }
    const Labels& labels = arrays.emplace_back(array);
    if (static_cast<size_t>(labels.shape(0)) != self.shape().kv_head_count) {
      throw py::value_error("labels: of " + std::to_string(labels.shape(0)) +
                            " KV heads, expected " + std::to_string(self.shape().kv_head_count));
    }
    borrowed.push_back({py::cast<uint64_t>(segment[0]), static_cast<uint32_t>(labels.shape(1)),
                        std::span(labels.data(), static_cast<size_t>(labels.size()))});
  }
  return Unwrap(WithoutGil([&] { return self.GiveLabels(layer, borrowed); }));
}

// What a sequence holds, and its life.
void BindContent(SequenceClass* sequence) {
  using client::Sequence;
  using py::arg;
  sequence->def_property_readonly("id", &Sequence::id)
      .def_property_readonly("generation", &Sequence::generation)
      .def("token_count", &Sequence::token_count, arg("layer"))
      .def(
          "insert",
          [](Sequence& self, uint64_t first_position, const std::vector<uint32_t>& layers,
             const py::object& keys, const py::object& values, const std::string& layout) {
            BorrowedTensor k = Borrow(keys, "keys");
            BorrowedTensor v = Borrow(values, "values");
            k.tensor.layout = v.tensor.layout = LayoutOf(layout);
            Check(WithoutGil(
                [&] { return self.Insert(first_position, layers, k.tensor, v.tensor); }));
          },
          arg("first_position"), arg("layers"), arg("keys"), arg("values"), arg("layout"))
      .def(
          "build_index",
          [](Sequence& self, const py::object& progress) {
            // An exception of the callback must not cross the SDK: kept and raised afterwards.
            std::exception_ptr raised;
            auto report = [&](const client::BuildProgress& p) {
              py::gil_scoped_acquire acquire;
              if (progress.is_none() || raised) return;
              try {
                progress(p.tokens_done, p.tokens_total);
              } catch (...) {
                raised = std::current_exception();
              }
            };
            auto result = WithoutGil([&] { return self.BuildIndex(report); });
            if (raised) std::rethrow_exception(raised);
            return Unwrap(std::move(result)).version;
          },
          arg("progress"))
      .def(
          "plan_index",
          [](Sequence& self, uint32_t layer, uint64_t token_count) {
            py::list segments;
            for (const client::PlannedSegment& segment :
                 Unwrap(WithoutGil([&] { return self.PlanIndex(layer, token_count); }))) {
              segments.append(py::make_tuple(segment.first_position, segment.token_count,
                                             segment.cluster_count));
            }
            return segments;
          },
          arg("layer"), arg("token_count"))
      .def("give_labels", &GiveLabels, arg("layer"), arg("segments"))
      .def(
          "fork",
          [](Sequence& self, uint64_t token_count, uint64_t max_tokens, std::string label) {
            return Hold(
                WithoutGil([&] { return self.Fork(token_count, max_tokens, std::move(label)); }));
          },
          arg("token_count"), arg("max_tokens"), arg("label"))
      .def("truncate",
           [](Sequence& self, uint64_t n) { Check(WithoutGil([&] { return self.Truncate(n); })); })
      .def("drop", [](Sequence& self) { Check(WithoutGil([&] { return self.Drop(); })); })
      .def("pin", [](Sequence& self, bool on) { Check(WithoutGil([&] { return self.Pin(on); })); })
      .def("set_ttl",
           [](Sequence& self, int64_t ms) {
             Check(WithoutGil([&] { return self.SetTtl(std::chrono::milliseconds(ms)); }));
           })
      .def("release", &Sequence::Release);
}

// What an engine asks of a sequence.
void BindQueries(SequenceClass* sequence) {
  using client::Sequence;
  using py::arg;
  sequence
      ->def(
          "attend",
          [](Sequence& self, uint32_t layer, const py::object& queries, const py::object& keys,
             const py::object& values, std::optional<Budget> budget, bool exact) {
            const BorrowedTensor q = Borrow(queries, "queries");
            const auto k = BorrowOptional(keys, "keys");
            const auto v = BorrowOptional(values, "values");
            const client::AttendOptions options{TensorOf(k), TensorOf(v), budget, exact};
            return AttentionDict(
                Unwrap(WithoutGil([&] { return self.Attend(layer, q.tensor, options); })),
                self.shape());
          },
          arg("layer"), arg("queries"), arg("keys"), arg("values"), arg("budget"), arg("exact"))
      .def(
          "attend_staged",
          [](Sequence& self, uint32_t layer, const py::object& queries,
             std::optional<Budget> budget) {
            const BorrowedTensor q = Borrow(queries, "queries");
            const client::QueryOptions options{budget, false};
            return AttentionDict(
                Unwrap(WithoutGil([&] { return self.AttendStaged(layer, q.tensor, options); })),
                self.shape());
          },
          arg("layer"), arg("queries"), arg("budget"))
      .def(
          "query",
          [](Sequence& self, uint32_t layer, const py::object& queries,
             std::optional<Budget> budget, bool inline_rows) {
            const BorrowedTensor q = Borrow(queries, "queries");
            const client::QueryOptions options{budget, inline_rows};
            return QueryDict(
                Unwrap(WithoutGil([&] { return self.Query(layer, q.tensor, options); })),
                self.shape());
          },
          arg("layer"), arg("queries"), arg("budget"), arg("inline_rows"))
      .def(
          "estimate",
          [](Sequence& self, uint32_t layer, const py::object& queries,
             std::optional<Budget> budget) {
            const BorrowedTensor q = Borrow(queries, "queries");
            return EstimationDict(
                Unwrap(WithoutGil([&] { return self.Estimate(layer, q.tensor, budget); })),
                self.shape());
          },
          arg("layer"), arg("queries"), arg("budget"));
}

// What an engine asks that attends on the device itself, by wavekv.gpu.
void BindResident(py::module_& m, SequenceClass* sequence) {
  using client::ResidentAttachment;
  using client::Sequence;
  using py::arg;
  py::class_<ResidentAttachment>(m, "ResidentAttachment")
      .def_property_readonly("sequence_id",
                             [](const ResidentAttachment& self) { return self.sequence.value(); })
      .def_readonly("device_uuid", &ResidentAttachment::device_uuid)
      .def_readonly("token_count", &ResidentAttachment::token_count)
      .def_readonly("ring_rows", &ResidentAttachment::ring_rows)
      .def_readonly("region_bytes", &ResidentAttachment::region_bytes);
  sequence
      ->def(
          "attach_resident",
          [](Sequence& self, double cache_ratio, uint32_t ring_rows) {
            // By pointer: it owns descriptors, and cannot be copied as pybind11 would.
            return std::make_unique<ResidentAttachment>(Unwrap(WithoutGil([&] {
              return self.AttachResident({cache_ratio, ring_rows});
            })));
          },
          arg("cache_ratio"), arg("ring_rows"))
      .def(
          "resident_status",
          [](Sequence& self, uint64_t steady_first_above, int64_t wait_ms) {
            using py::operator""_a;
            const client::ResidentState state = Unwrap(WithoutGil([&] {
              return self.ResidentStatus(steady_first_above, std::chrono::milliseconds(wait_ms));
            }));
            py::object ended = py::none();
            if (!state.attached.ok()) {
              ended = py::make_tuple(static_cast<int>(state.attached.code()),
                                     std::string(state.attached.message()));
            }
            return py::dict("ended"_a = ended, "token_count"_a = state.token_count,
                            "steady_first"_a = state.steady_first,
                            "hit_blocks"_a = state.hit_blocks, "miss_blocks"_a = state.miss_blocks,
                            "overflows"_a = state.overflows, "violations"_a = state.violations);
          },
          arg("steady_first_above"), arg("wait_ms"))
      .def("detach_resident",
           [](Sequence& self) { Check(WithoutGil([&] { return self.DetachResident(); })); });
}

void BindSequence(py::module_& m) {
  SequenceClass sequence(m, "Sequence");
  BindContent(&sequence);
  BindQueries(&sequence);
  BindResident(m, &sequence);
}

// items: (sequence, layer, queries, keys or None, values or None, budget or None, exact).
// Returns one dict, or one (code, message) tuple, per item.
py::list AttendBatch(client::Session& session, const py::list& items) {
  std::vector<BorrowedTensor> borrowed;  // Keeps the arrays alive through the call.
  std::vector<client::AttendItem> batch;
  const auto borrow = [&](const py::object& array, const char* what) {
    return borrowed.emplace_back(Borrow(array, what)).tensor;
  };
  const auto optional = [&](const py::object& array,
                            const char* what) -> std::optional<client::Tensor> {
    if (array.is_none()) return std::nullopt;
    return borrow(array, what);
  };
  for (const py::handle& handle : items) {
    const auto item = py::cast<py::tuple>(handle);
    client::AttendItem& entry = batch.emplace_back();
    entry.sequence = py::cast<client::Sequence*>(item[0]);
    entry.layer = py::cast<uint32_t>(item[1]);
    entry.queries = borrow(item[2], "queries");
    entry.append_keys = optional(item[3], "keys");
    entry.append_values = optional(item[4], "values");
    entry.budget = py::cast<std::optional<Budget>>(item[5]);
    entry.exact = py::cast<bool>(item[6]);
  }
  auto results = Unwrap(WithoutGil([&] { return session.AttendBatch(batch); }));
  py::list replies;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].ok()) {
      replies.append(AttentionDict(*results[i], batch[i].sequence->shape()));
    } else {
      replies.append(py::make_tuple(static_cast<int>(results[i].status().code()),
                                    std::string(results[i].status().message())));
    }
  }
  return replies;
}

void BindSession(py::module_& m) {
  using client::Session;
  py::class_<Session, Held<Session>>(m, "Session")
      .def("create_sequence",
           [](Session& self, const client::SequenceOptions& options) {
             return Hold(WithoutGil([&] { return self.CreateSequence(options); }));
           })
      .def("attend_batch", &AttendBatch)
      .def("info", [](const Session& self) {
        using py::operator""_a;
        const client::ClientInfo info = self.info();
        return py::dict("tenant"_a = info.tenant, "daemon_version"_a = info.daemon_version,
                        "epoch"_a = info.epoch, "message_bytes_max"_a = info.message_bytes_max,
                        "tenant_bytes_max"_a = info.tenant_bytes_max,
                        "batch_max"_a = info.batch_max, "has_wave_buffer"_a = info.has_wave_buffer,
                        "shared_memory"_a = info.shared_memory,
                        "shared_memory_absent"_a = info.shared_memory_absent);
      });
  m.def("connect",
        [](std::string address, std::string token, std::string client_name, int64_t deadline_ms,
           int64_t build_deadline_ms, int64_t lease_ms, bool shared_memory) {
          client::ClientOptions options;
          options.address = std::move(address);
          options.token = std::move(token);
          options.client_name = std::move(client_name);
          options.deadline = std::chrono::milliseconds(deadline_ms);
          options.build_deadline = std::chrono::milliseconds(build_deadline_ms);
          options.lease = std::chrono::milliseconds(lease_ms);
          options.shared_memory = shared_memory;
          return Hold(WithoutGil([&] { return Session::Connect(std::move(options)); }));
        });
}

void BindAttentionChoice(py::module_& m) {
  using client::AttentionProblem;
  using py::operator""_a;
  const auto problem_of = [](const ModelShape& shape, uint32_t batch, uint64_t tokens,
                             double hit_ratio) {
    return AttentionProblem{.batch = batch,
                            .tokens = tokens,
                            .kv_head_count = shape.kv_head_count,
                            .head_dim = shape.key_dim,
                            .element_bytes = static_cast<uint32_t>(DTypeBytes(shape.dtype)),
                            .hit_ratio = hit_ratio};
  };
  const client::DeviceRates h200;
  m.attr("HBM_BYTES_PER_S") = h200.hbm_bytes_per_s;
  m.attr("BUS_BYTES_PER_S") = h200.bus_bytes_per_s;
  m.attr("HIT_RATIO") = AttentionProblem{}.hit_ratio;
  m.def("estimate_attention", [problem_of](const ModelShape& shape, uint32_t batch, uint64_t tokens,
                                           double hit_ratio, double hbm, double bus) {
    const client::AttentionCost cost =
        Unwrap(client::EstimateAttention(problem_of(shape, batch, tokens, hit_ratio), {hbm, bus}));
    return py::dict("full_us"_a = cost.full_us, "wave_us"_a = cost.wave_us);
  });
  m.def("full_attention_tokens_max",
        [problem_of](const ModelShape& shape, uint32_t batch, uint64_t tokens_max, double hit_ratio,
                     double hbm, double bus) {
          return Unwrap(client::FullAttentionTokensMax(problem_of(shape, batch, 0, hit_ratio),
                                                       tokens_max, {hbm, bus}));
        });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  TranslateStatuses();
  m.attr("__version__") = WAVEKV_VERSION;
  BindValues(m);
  BindSequence(m);
  BindSession(m);
  BindAttentionChoice(m);
}

}  // namespace wavekv::python
